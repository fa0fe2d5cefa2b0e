"""State of another optimizer class, of other param groups or of another scheduler: refused before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from shardwise import ShardedOptimizer, ZeroRedundancyOptimizer, fully_shard
from shardwise.checkpoint import CheckpointError, load, save
from shardwise.errors import ConfigError

Make = Callable[[nn.Module, type[Optimizer], dict[str, Any]], Any]

APIS: dict[str, Make] = {
    "plain": lambda model, kind, options: kind(model.parameters(), **options),
    "sharded": lambda model, kind, options: ShardedOptimizer(dict(model.named_parameters()), kind, **options),
    "zero": lambda model, kind, options: ZeroRedundancyOptimizer(model.parameters(), kind, **options),
}
MOMENTUM = {"lr": 1e-2, "momentum": 0.9}
OTHERS: list[tuple[type[Optimizer], dict[str, Any], type[Optimizer], dict[str, Any], str]] = [
    (torch.optim.AdamW, {}, torch.optim.SGD, MOMENTUM, "exp_avg, exp_avg_sq, step.* state momentum_buffer"),
    (torch.optim.Adagrad, {}, torch.optim.AdamW, {}, "state step, sum.* state exp_avg, exp_avg_sq, step"),
    (torch.optim.SGD, MOMENTUM, torch.optim.AdamW, {}, "state momentum_buffer.* state exp_avg, exp_avg_sq, step"),
    (torch.optim.SGD, {"lr": 1e-2}, torch.optim.AdamW, {}, "do.s not have: dampening, momentum, nesterov"),
    (torch.optim.Adamax, {}, torch.optim.AdamW, {}, "exp_inf"),
    (torch.optim.NAdam, {}, torch.optim.RAdam, {}, "mu_product"),
]


class MyAdamW(torch.optim.AdamW):
    """A class of the user's own, with the state and the options of AdamW."""


def _model(api: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model if api == "zero" else fully_shard(model)


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _values(model: nn.Module, optimizer: Any) -> list[Any]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [[p.detach().clone() for p in model.parameters()], copy.deepcopy(groups), len(optimizer.state)]


def _assert_same(left: list[Any], right: list[Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left[0], right[0], strict=True))
    assert left[1:] == right[1:]


def each_second(api: str) -> slice:
    """Return which pairs of classes state of ``api`` is loaded between: plain optimizers meet all of them."""
    return slice(None) if api == "plain" else slice([*APIS].index(api) - 1, None, 2)


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_state_of_another_class_is_refused_before_anything_changes(tmp_path: Path, api: str) -> None:
    for number, (kind, options, other, other_options, text) in enumerate(OTHERS[each_second(api)]):
        folder, model = tmp_path / str(number), _model(api)
        optimizer = APIS[api](model, kind, options)
        _step(model, optimizer)
        save(folder, {"model": model, "optimizer": optimizer}, step=1)
        model = _model(api)
        optimizer = APIS[api](model, other, other_options)
        before = _values(model, optimizer)
        with pytest.raises(CheckpointError, match=rf"nothing has changed: .*state of {kind.__name__} .*{text}"):
            load(folder, {"model": model, "optimizer": optimizer}, strict=False)
        _assert_same(before, _values(model, optimizer))
        _step(model, optimizer)


@pytest.mark.parametrize("api", ["sharded", "zero"])
@on_ranks(2)
def test_state_dicts_of_another_class_are_refused_too(api: str) -> None:
    for kind, options, other, other_options, text in OTHERS:
        model = _model(api)
        saved = APIS[api](model, kind, options)
        _step(model, saved)
        optimizer = APIS[api](model, other, other_options)
        before = _values(model, optimizer)
        found = saved.state_dict() if api == "sharded" else saved.sharded().state_dict()
        one = _model("zero")
        plain = kind(one.parameters(), **options)
        _step(one, plain)
        loaders = [(optimizer.load_state_dict, plain.state_dict())]
        loaders.append((optimizer.load_state_dict if api == "sharded" else optimizer.sharded().load_state_dict, found))
        for take, state in loaders:
            with pytest.raises(ConfigError, match=f"state of another optimizer class .*{text}"):
                take(state)
        _assert_same(before, _values(model, optimizer))


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_state_that_torch_takes_over_is_taken_over(tmp_path: Path, api: str) -> None:
    fine: list[tuple[type[Optimizer], dict[str, Any], type[Optimizer], dict[str, Any]]] = [
        (torch.optim.SGD, {"lr": 1e-2}, torch.optim.SGD, MOMENTUM),
        (torch.optim.SGD, MOMENTUM, torch.optim.SGD, {"lr": 1e-2}),
        (torch.optim.AdamW, {"amsgrad": True}, torch.optim.AdamW, {}),
        (torch.optim.AdamW, {}, torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {}, MyAdamW, {}),
        (MyAdamW, {}, torch.optim.AdamW, {}),
    ]
    for number, (kind, options, other, other_options) in [*enumerate(fine)][each_second(api)]:
        folder, model = tmp_path / str(number), _model(api)
        model.bias.requires_grad_(number != 2)  # a parameter that has never stepped has no state
        optimizer = APIS[api](model, kind, options)
        lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # adds the option initial_lr
        _step(model, optimizer)
        save(folder, {"model": model, "optimizer": optimizer}, step=1)
        other_model = _model(api)
        other_model.bias.requires_grad_(number != 2)
        again = APIS[api](other_model, other, other_options)
        load(folder, {"model": other_model, "optimizer": again})
        assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        _step(model, optimizer)
        _step(other_model, again)
        assert all(map(torch.equal, *([*map(_full, m.parameters())] for m in (model, other_model))))


def _full(param: torch.Tensor) -> torch.Tensor:
    return param.detach() if type(param) is nn.Parameter else param.full_tensor()  # pyright: ignore


def _in_groups(model: nn.Module, *options: dict[str, Any]) -> Optimizer:
    params = list(model.parameters())
    groups = [params] if len(options) == 1 else [[param] for param in params]
    return torch.optim.SGD([{"params": p, **o} for p, o in zip(groups, options, strict=True)], lr=0.1)


@on_ranks(2)
def test_one_param_group_is_not_loaded_into_two_with_options_of_their_own(tmp_path: Path) -> None:
    model = _model("plain")
    save(tmp_path, {"model": model, "optimizer": _in_groups(model, {"lr": 0.3})}, step=1)
    two = _in_groups(model, {"lr": 0.1}, {"lr": 0.2})
    with pytest.raises(CheckpointError, match=r"weight and bias are in one param group there, .* options \(lr\)"):
        load(tmp_path, {"model": model, "optimizer": two})
    assert [group["lr"] for group in two.param_groups] == [0.1, 0.2]
    alike = _in_groups(model, {}, {})
    load(tmp_path, {"model": model, "optimizer": alike})
    assert [group["lr"] for group in alike.param_groups] == [0.3, 0.3]


@on_ranks(2)
def test_state_of_another_scheduler_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = _model("plain")
    optimizer = _in_groups(model, {})
    save(tmp_path, {"model": model, "scheduler": lr_scheduler.StepLR(optimizer, 2)}, step=1)
    model = _model("plain")
    with torch.no_grad():
        next(model.parameters()).zero_()
    before = _values(model, optimizer)
    for other in (lr_scheduler.ExponentialLR(optimizer, 0.5), lr_scheduler.CosineAnnealingLR(optimizer, 10)):
        with pytest.raises(CheckpointError, match="another scheduler, with .*gamma, .*step_size; a "):
            load(tmp_path, {"model": model, "scheduler": other})
    _assert_same(before, _values(model, optimizer))
    load(tmp_path, {"model": model, "scheduler": lr_scheduler.StepLR(optimizer, 3)})

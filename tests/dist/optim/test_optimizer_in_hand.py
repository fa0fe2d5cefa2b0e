"""What users do to the ``state`` and ``param_groups`` of a sharded optimizer has an effect, or is refused by name."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.each import of_each
from helpers.ranks import on_ranks
from torch import nn
from torch.optim import Optimizer

from shardwise import ShardedOptimizer, StateError, ZeroRedundancyOptimizer, checkpoint, fully_shard

APIS = ["ZeRO whole", "ZeRO even", "sharded", "sharded over fully_shard"]


def _made(api: str) -> tuple[nn.Sequential, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    if api == "sharded over fully_shard":
        fully_shard(model)
    if api.startswith("sharded"):
        return model, ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, lr=0.1, momentum=0.9)
    partition: Any = api.split()[1]
    return model, ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, partition=partition, lr=0.1, momentum=0.9
    )


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def _set_new(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def _set_each(optimizer: Optimizer) -> None:
    for param in list(optimizer.state):
        optimizer.state[param] = {}


def _delete_each(optimizer: Optimizer) -> None:
    for param in list(optimizer.state):
        del optimizer.state[param]


@on_ranks(2)
@of_each(APIS)
def test_state_that_is_taken_off_or_put_there_is_refused(api: str) -> None:
    model, optimizer = _made(api)
    for _ in range(2):
        _step(model, optimizer)
    assert len(optimizer.state) == 4
    assert isinstance(copy.deepcopy(dict(optimizer.state)), dict)
    ways: list[Callable[[Optimizer], object]] = [_set_new, _set_each, _delete_each, lambda each: each.state.clear()]
    for way in ways:
        with pytest.raises(StateError, match="the state of a sharded optimizer was written to"):
            way(optimizer)
    assert len(optimizer.state) == 4
    for entry in optimizer.state.values():
        for tensor in entry.values():
            tensor.zero_()
    before = [param.detach().clone() for param in model.parameters()]
    _step(model, optimizer)
    for old, param in zip(before, model.parameters(), strict=True):  # without momentum of the steps before
        assert param.grad is not None
        torch.testing.assert_close(param.detach(), old - 0.1 * param.grad)


@on_ranks(2)
@of_each(APIS)
def test_an_entry_of_state_cannot_be_made_before_there_is_any(api: str) -> None:
    model, optimizer = _made(api)
    assert not optimizer.state
    weight = next(model.parameters())
    with pytest.raises((StateError, KeyError)):
        optimizer.state[weight]["momentum_buffer"] = torch.ones(9, 6)
    _step(model, optimizer)
    assert len(optimizer.state) == 4


def _fewer(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:2]


def _none(optimizer: Optimizer) -> None:
    del optimizer.param_groups[0]["params"][:]


def _others(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(9, 6))


def _another_group(optimizer: Optimizer) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [nn.Parameter(torch.ones(2))]})


def _no_group(optimizer: Optimizer) -> None:
    optimizer.param_groups.pop()


@on_ranks(2)
@of_each([*product(APIS, [_fewer, _none, _others, _another_group, _no_group])])
def test_param_groups_with_other_parameters_are_refused(case: tuple[str, Callable[[Optimizer], None]]) -> None:
    api, change = case
    model, optimizer = _made(api)
    _step(model, optimizer)
    change(optimizer)
    with pytest.raises(StateError, match=r"param_groups hold other parameters .* Add parameters with add_param_group"):
        _step(model, optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        with pytest.raises(StateError, match="param_groups hold other parameters"):
            optimizer.state_dict()


@on_ranks(2)
@of_each(APIS)
def test_param_groups_may_be_other_dicts_with_other_options(api: str) -> None:
    model, optimizer = _made(api)
    _step(model, optimizer)
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.0}]
    before = [param.detach().clone() for param in model.parameters()]
    _step(model, optimizer)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    if isinstance(optimizer, ShardedOptimizer):
        assert sorted(optimizer.state_dict()["state"]) == sorted(name for name, _ in model.named_parameters())


@on_ranks(2)
@of_each(APIS)
def test_hooks_on_state_dicts_are_called_and_may_put_another_in_its_place(api: str) -> None:
    model, optimizer = _made(api)
    _step(model, optimizer)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        if optimizer.rank:
            return
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, found: called.append("after") or {**found, "note": 7})  # type: ignore[func-returns-value]
    optimizer.register_load_state_dict_pre_hook(
        lambda _, given: {**given, "param_groups": slower(given["param_groups"])}
    )
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))

    def slower(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**group, "lr": 0.01} for group in groups]

    found = optimizer.state_dict()
    assert found.pop("note") == 7
    optimizer.load_state_dict(found)
    assert called == ["before", "after", "loaded"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01]
    assert [group["lr"] for group in found["param_groups"]] == [0.1]


@on_ranks(2)
@of_each(APIS)
def test_defaults_are_those_of_the_optimizer_which_schedulers_of_momentum_look_at(api: str) -> None:
    model, optimizer = _made(api)
    plain = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    assert optimizer.defaults == plain.defaults
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.5, total_steps=6) for each in (optimizer, plain)]
    for _ in range(3):
        _step(model, optimizer)
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
    mine, expected = ({key: each.param_groups[0][key] for key in ("lr", "momentum")} for each in (optimizer, plain))
    assert mine == expected


Change = Callable[[Optimizer], None]


def _by_hand(optimizer: Optimizer) -> None:
    optimizer.param_groups[0].update(lr=0.01, momentum=0.0, nesterov=False)


def _by_scheduler(optimizer: Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    optimizer.step()
    scheduler.step()


def _by_new_dicts(optimizer: Optimizer) -> None:
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.01}]


def _train_with_a_late_group(kind: str, change: Change) -> list[torch.Tensor]:
    torch.manual_seed(0)
    early, late = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    optimizer: Optimizer
    if kind == "plain":
        optimizer = torch.optim.SGD([early], **options)
    elif kind == "sharded":
        optimizer = ShardedOptimizer({"early": early}, torch.optim.SGD, **options)
    else:
        partition: Any = kind.split()[1]
        optimizer = ZeroRedundancyOptimizer([early], torch.optim.SGD, partition=partition, **options)

    def backward() -> None:
        optimizer.zero_grad()
        (early.square().sum() + late.square().sum()).backward()

    backward()
    change(optimizer)
    optimizer.defaults["dampening"] = 0.0
    optimizer.defaults["weight_decay"] = 0.5  # of groups to come
    optimizer.add_param_group({"params": {"late": late} if kind == "sharded" else [late], "lr": 0.05})
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.05])
    for _ in range(2):
        backward()
        optimizer.step()
    return [early.detach(), late.detach()]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["ZeRO whole", "ZeRO even", "sharded"])
@pytest.mark.parametrize("change", [_by_hand, _by_scheduler, _by_new_dicts])
def test_options_set_before_a_group_is_added_are_kept(kind: str, change: Change) -> None:
    for found, expected in zip(
        _train_with_a_late_group(kind, change), _train_with_a_late_group("plain", change), strict=True
    ):
        assert torch.equal(found, expected)


@on_ranks(2)
@of_each(APIS)
def test_options_set_in_a_closure_are_those_of_the_step(api: str) -> None:
    model, optimizer = _made(api)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).sum()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.0
        return loss

    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step(closure)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


@on_ranks(2)
@of_each(APIS)
def test_what_a_closure_raises_comes_back_and_nothing_has_changed(api: str) -> None:
    model, optimizer = _made(api)
    before = [param.detach().clone() for param in model.parameters()]

    def closure() -> float:
        model(torch.ones(2, 6)).sum().backward()
        raise KeyError("of the closure")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


@on_ranks(2)
@of_each(APIS)
def test_a_group_is_not_added_to_groups_with_other_parameters(api: str) -> None:
    optimizer = _made(api)[1]
    _fewer(optimizer)
    late = nn.Parameter(torch.ones(2))
    with pytest.raises(StateError, match="param_groups hold other parameters"):
        optimizer.add_param_group({"params": {"late": late} if isinstance(optimizer, ShardedOptimizer) else [late]})
    assert len(optimizer.param_groups) == 1


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "through"),
    [
        ("plain", "checkpoint"),  # its own load_state_dict keeps the strides that it is given
        *((kind, through) for kind in APIS[:3] for through in ("checkpoint", "state dict")),
    ],
)
def test_loaded_state_has_the_memory_order_of_its_parameter(kind: str, through: str, tmp_path: Path) -> None:
    """Fused optimizers pair elements by memory: contiguous state would belong to other elements."""

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 2)).to(memory_format=torch.channels_last)
        options: Any = {"lr": 0.05, "fused": True}
        if kind == "plain":
            return model, torch.optim.AdamW(model.named_parameters(), **options)
        if kind == "sharded":
            return model, ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, **options)
        partition: Any = kind.split()[1]
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition=partition, **options)

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 96).view(2, 3, 4, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    other_model, other = made()
    if through == "checkpoint":
        checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)
        checkpoint.load(tmp_path, {"model": other_model, "optimizer": other})
    else:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            for rank in range(2):
                optimizer.consolidate_state_dict(to=rank)
                if rank == optimizer.rank:
                    found = optimizer.state_dict()
        else:
            found = optimizer.state_dict()
        for entry in found["state"].values():
            entry.update({key: value.contiguous() for key, value in entry.items()})
        other.load_state_dict(found)
        other_model.load_state_dict(model.state_dict())
    for _ in range(2):
        step(model, optimizer)
        step(other_model, other)
    for (name, found), expected in zip(other_model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected), name


@on_ranks(2)
@pytest.mark.parametrize("is_ours", [True, False])
def test_full_parameters_in_a_group_that_comes_later_are_refused(is_ours: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    fully_shard(model[0])
    fully_shard(model)
    first = {f"0.{name}": param for name, param in model[0].named_parameters()}
    optimizer: Optimizer = (
        ShardedOptimizer(first, torch.optim.SGD, lr=0.1) if is_ours else torch.optim.SGD(first.values(), lr=0.1)
    )
    loss = model(torch.ones(2, 6)).sum()
    optimizer.step()  # without a gradient; the root stays unsharded for its backward
    later = {f"1.{name}": param for name, param in model[1].named_parameters()}
    optimizer.add_param_group({"params": later if is_ours else [*later.values()]})
    loss.backward()
    with pytest.raises(StateError, match=r"an optimizer was given the full form of 1\.weight"):
        optimizer.step()

"""Gradients of backwards without sync: what user code clears is cleared, and no optimizer steps before they are reduced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import REORDERED, assert_same, average_gradients, full
from helpers.models import batch_for, build
from helpers.pairs import pairwise
from helpers.ranks import on_ranks
from helpers.sharded import loss_of, shard_units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import ShardedOptimizer, StateError, fully_shard, replicate

# What lets gradients wait, and what reduces them with the next backward.
WAYS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "no sync": (lambda m: m.set_requires_gradient_sync(False), lambda m: m.set_requires_gradient_sync(True)),
    "no all-reduce": (lambda m: m.set_requires_all_reduce(False), lambda m: m.set_requires_all_reduce(True)),
    "not last": (lambda m: m.set_is_last_backward(False), lambda m: m.set_is_last_backward(True)),
}


def clear_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


CLEARING: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: clear_by_hand(model),
}


def sharded(api: str, model: nn.Module, name: str) -> Any:
    if api == "hsdp":
        return shard_units(model, name, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    if api == "replicate":
        return replicate(model, mesh=init_device_mesh("cpu", (2,)))
    root: Any = shard_units(model, name)
    root.set_allow_rank_divergence(api == "diverging")
    return root


def pair(api: str, name: str) -> tuple[Any, nn.Module]:
    model = build(name)
    return sharded(api, copy.deepcopy(model), name), model


def optimizers_of(model: nn.Module, plain: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, **options) for each in (model, plain)]


def assert_step_alike(model: nn.Module, plain: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    average_gradients(plain)
    for optimizer in optimizers:
        optimizer.step()
    assert_same(model, plain, REORDERED)


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "api", "way", "clearing", "had_gradient"),
    [  # the first twelve have every value, and most pairs
        pytest.param(*case, marks=[pytest.mark.exhaustive] * (number >= 12))
        for number, case in enumerate(
            pairwise(
                ["plain", "mixed", "tied", "frozen"],
                ["fully_shard", "hsdp", "replicate", "diverging"],
                list(WAYS),
                list(CLEARING),
                [True, False],
            )
        )
    ],
)
def test_what_user_code_clears_is_not_added_later(
    name: str, api: str, way: str, clearing: str, had_gradient: bool
) -> None:
    model, plain = pair(api, name)
    optimizers = optimizers_of(model, plain, foreach=clearing == "optimizer, to zeros")
    pause, resume = WAYS[way]
    if had_gradient:  # one that is reduced already when others begin to wait
        loss_of(model, 7, name).backward()
    pause(model)
    for seed in (0, 1):  # a window that is given up
        loss_of(model, seed, name).backward()
    CLEARING[clearing](model, optimizers[0])
    for step in range(2):
        pause(model)
        loss_of(model, 10 * step + 2, name).backward()
        resume(model)
        loss_of(model, 10 * step + 3, name).backward()
        for seed in (2, 3):
            loss_of(plain, 10 * step + seed, name).backward()
        assert_step_alike(model, plain, optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("had_gradient", [True, False])
@pytest.mark.parametrize("api", ["fully_shard", "replicate"])
def test_gradients_that_wait_follow_a_model_to_another_dtype(api: str, had_gradient: bool) -> None:
    model, plain = pair(api, "plain")
    for each in (model, plain):
        if had_gradient:
            loss_of(each, 0).backward()
        if each is model:
            model.set_requires_gradient_sync(False)
        loss_of(each, 1).backward()
        each.double()
        if each is model:
            model.set_requires_gradient_sync(True)
        each(batch_for("plain", 2, 8).chunk(2)[dist.get_rank()].double()).square().mean().backward()
    average_gradients(plain)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float64}
    assert_same(model, plain, REORDERED)


@on_ranks(2)
@pytest.mark.parametrize("api", ["fully_shard", "replicate"])
def test_some_gradients_are_cleared_and_others_wait(api: str) -> None:
    model, plain = pair(api, "plain")
    optimizers = optimizers_of(model, plain)
    model.set_requires_gradient_sync(False)
    for each in (model, plain):
        loss_of(each, 0).backward()
        for number, param in enumerate(each.parameters()):
            if number % 2:
                param.grad = None
    model.set_requires_gradient_sync(True)
    for each in (model, plain):
        loss_of(each, 1).backward()
    assert_step_alike(model, plain, optimizers)


@on_ranks(2)
@pytest.mark.parametrize(
    ("api", "way", "kind"),
    [
        ("fully_shard", "no sync", "torch"),
        ("fully_shard", "not last", "ShardedOptimizer"),
        ("hsdp", "no all-reduce", "torch"),
        ("hsdp", "no all-reduce", "ShardedOptimizer"),
        ("replicate", "no sync", "torch"),
        ("diverging", "not last", "ShardedOptimizer"),
        pytest.param("fully_shard", "no sync", "ShardedOptimizer", marks=pytest.mark.exhaustive),
        pytest.param("fully_shard", "not last", "torch", marks=pytest.mark.exhaustive),
        pytest.param("replicate", "no sync", "ShardedOptimizer", marks=pytest.mark.exhaustive),
        pytest.param("diverging", "not last", "torch", marks=pytest.mark.exhaustive),
    ],
)
def test_no_optimizer_steps_and_nothing_is_clipped_while_gradients_wait(api: str, way: str, kind: str) -> None:
    model, plain = pair(api, "plain")
    optimizer: Any
    if kind == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.1)
    before = [param.full_tensor().clone() for param in model.parameters()]
    pause, resume = WAYS[way]
    for had_gradient in (False, True):
        pause(model)
        loss_of(model, 0).backward()
        params = list(model.parameters())
        for call in (
            optimizer.step,
            lambda: shardwise.clip_grad_norm_(params, 1.0),  # noqa: B023
            lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),  # noqa: B023
            lambda: params[0].grad.norm(),  # noqa: B023
        ):
            with pytest.raises(StateError, match="wait for a backward with sync"):
                call()
        assert all(map(torch.equal, before, [param.full_tensor() for param in model.parameters()]))
        if not had_gradient:
            optimizer.zero_grad()
            resume(model)
            loss_of(model, 0).backward()
    resume(model)
    loss_of(model, 1).backward()
    for seed in (0, 0, 1):
        loss_of(plain, seed).backward()
    assert_step_alike(model, plain, [optimizer, torch.optim.AdamW(plain.parameters(), lr=0.1)])


@on_ranks(2)
def test_an_optimizer_steps_on_parameters_whose_gradients_do_not_wait() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    for layer in model:
        fully_shard(layer)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    waiting: Any = model[0]
    waiting.set_requires_gradient_sync(False)
    for layer in model:
        layer(torch.ones(2, 4)).sum().backward()
    optimizers[1].step()
    with pytest.raises(StateError, match=r"an optimizer steps too early: gradients of weight wait"):
        optimizers[0].step()
    optimizers[0].zero_grad()
    optimizers[0].step()  # nothing waits any more


@on_ranks(2)
def test_a_loop_that_never_syncs_is_named_at_its_first_step() -> None:
    model: Any = fully_shard(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.raises(StateError, match="also if the last step of an epoch has fewer"),
        shardwise.policy(model, sync=False),
    ):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("way", ["no sync", "not last"])
def test_what_waits_outlives_copies_conversions_and_resets(way: str) -> None:
    model, plain = pair("fully_shard", "plain")
    pause, resume = WAYS[way]
    pause(model)
    for each in (model, plain):
        loss_of(each, 0).backward()
    twin = copy.deepcopy(model)
    assert all(param.grad is None for param in twin.parameters())
    model.to("cpu")
    resume(model)
    for each in (model, plain):
        loss_of(each, 1).backward()
    assert_step_alike(model, plain, optimizers_of(model, plain))
    model.zero_grad()
    pause(model)
    loss_of(model, 2).backward()
    model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("clears", [True, False])
def test_a_step_that_is_undone_lets_gradients_wait_again(clears: bool) -> None:
    model, plain = pair("fully_shard", "plain")
    optimizers = optimizers_of(model, plain)
    model.set_requires_gradient_sync(False)
    for each in (model, plain):
        loss_of(each, 0).backward()
    with shardwise.transaction(model, optimizers[0], skip=ArithmeticError):
        loss_of(model, 5).backward()
        raise ArithmeticError
    if clears:
        for optimizer in optimizers:
            optimizer.zero_grad()
    else:
        with pytest.raises(StateError, match="wait for a backward with sync"):
            optimizers[0].step()
    model.set_requires_gradient_sync(True)
    for each in (model, plain):
        loss_of(each, 1).backward()
    assert_step_alike(model, plain, optimizers)


@on_ranks(2)
@pytest.mark.parametrize("change", ["step", "clip"])
def test_where_ranks_take_different_ways_all_learn_that_gradients_of_one_wait(change: str) -> None:
    """Rank 1 runs the second layer in a last microbatch without sync."""
    model, plain = pair("diverging", "plain")
    optimizers = optimizers_of(model, plain)
    loss_of(model, 0).backward()
    if dist.get_rank() == 1:
        model.set_requires_gradient_sync(False)
        loss_of(model, 1).backward()
    with pytest.raises(StateError, match="wait for a backward with sync"):
        if change == "step":
            optimizers[0].step()
        else:
            shardwise.clip_grad_norm_(model.parameters(), 1.0)
    model.set_requires_gradient_sync(True)
    optimizers[0].zero_grad()
    for each in (model, plain):
        loss_of(each, 2).backward()
    assert_step_alike(model, plain, optimizers)


class Gate(nn.Module):
    """Two layers, and a parameter beside them; only some forwards use the second layer and the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) * self.scale if uses_all else x


@on_ranks(2, 4)
def test_sums_over_shards_are_reduced_by_a_backward_that_does_not_use_their_parameters(num_ranks: int) -> None:
    torch.manual_seed(0)
    plain = Gate()
    model: Any = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("replicate", "shard"))
    for each in (model.second, model):
        fully_shard(each, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    for uses_all in (True, False):
        model.set_requires_all_reduce(not uses_all)
        x = torch.randn(2, 4)
        for each in (model, plain):
            each(x, uses_all).sum().backward()
    assert_step_alike(model, plain, optimizers_of(model, plain))


@on_ranks(2)
def test_zero_grad_of_unsharded_modules_clears_their_own_gradients_and_those_that_wait() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    fully_shard([model[0], model[1]], reshard_after_forward=False)
    fully_shard(model)
    for each in (model, plain):
        each(torch.ones(1, 4)).sum().backward()
        loss = each(torch.ones(1, 4)).sum()  # the unit is unsharded until its backward
        each[0].zero_grad()
        loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)
    model.zero_grad()
    for unsharded in (False, True):
        model[0].set_requires_gradient_sync(False)
        model(torch.ones(1, 4)).sum().backward()
        if unsharded:
            model[0].unshard()
        model.zero_grad(set_to_none=False)
        model[0].reshard()
        model[0].set_requires_gradient_sync(True)
        model(torch.ones(1, 4)).sum().backward()
        plain.zero_grad()
        plain(torch.ones(1, 4)).sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad.full_tensor(), theirs.grad)
        model.zero_grad()


@pytest.mark.parametrize("way", list(WAYS))
@on_ranks(2)
def test_a_parameter_put_in_the_place_of_one_has_none_of_its_gradients_that_wait(way: str) -> None:
    """Also if the model is converted before the next forward, which hands waiting gradients on."""
    begin, end = WAYS[way]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if way == "no all-reduce" else None
    model: Any = nn.Sequential(nn.Linear(4, 3, bias=False))
    head: Any = fully_shard(model[0], mesh=mesh)  # a unit inside of the one that is converted
    fully_shard(model, mesh=mesh)
    begin(model)
    model(torch.ones(2, 4)).sum().backward()
    head.register_parameter("weight", nn.Parameter(head.weight.detach().clone()))
    model.double().float()
    end(model)
    model(torch.full((1, 4), 3.0)).sum().backward()
    assert full(head.weight.grad).equal(torch.full((3, 4), 3.0))

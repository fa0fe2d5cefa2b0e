"""Ranks that take different ways train as one process does on the whole batch."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.divergent import ALL, Steps, check, divergent, inputs, loss_of, on_all, over_replicas, sharded, way
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import DesyncError, StateError, fully_shard
from shardwise.torch_private import all_groups


def tower(num_ranks: int) -> Steps:
    """A tower that other ranks need in each step."""
    return [[[way(0, 1, 3) if (rank + step) % 2 else ALL] for rank in range(num_ranks)] for step in range(4)]


class Wide(nn.Module):
    """Blocks of eight parameters."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor, num_blocks: int = 99) -> torch.Tensor:
        for block in self.blocks[:num_blocks]:
            x = block(x)
        return x


def calls_of_a_step(num_blocks: int, transport: str) -> int:
    """Return how many calls a warm step makes that only the switch makes."""
    model = Wide(num_blocks)
    for block in model.blocks:
        fully_shard(block)
    root = fully_shard(model)
    root.set_transport(cast(Any, transport))
    root.set_allow_rank_divergence(True)
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        code = frame.f_code
        calls += event == "call" and (code.co_filename.endswith("/divergence.py") or code.co_name == "_serve_others")

    for number in range(6):
        if number == 5:
            sys.setprofile(count)
        try:
            model(torch.ones(2, 4)).sum().backward()
        finally:
            sys.setprofile(None)
        model.zero_grad()
    return calls


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_a_rank_whose_collectives_are_watched_makes_all_use_them() -> None:
    """Shared memory is not used then, so a skipped unit is gathered for the others."""
    with Watching() if dist.get_rank() else nullcontext():
        check(tower(2), sharded())


@pytest.mark.parametrize("transport", ["auto", "collective"])
@on_ranks(2)
def test_ranks_that_take_the_same_way_make_one_more_call_per_unit(transport: str) -> None:
    few, many = calls_of_a_step(3, transport), calls_of_a_step(6, transport)
    assert many - few == 3  # the launch of its reduction


@on_ranks(4)
def test_sums_over_the_shard_axis_stay_where_a_later_backward_uses_a_unit_on_no_rank() -> None:
    grads: list[torch.Tensor] = []
    for is_on in (False, True):
        torch.manual_seed(0)
        model = Wide(2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        root = fully_shard(model, mesh=mesh)
        root.set_allow_rank_divergence(is_on)
        for step in range(2):
            model.zero_grad()
            for micro in range(3):
                root.set_requires_all_reduce(micro == 2)
                model(torch.ones(2, 4), 1 if step and micro == 1 else 2).sum().backward()
        grads.append(cast(Any, model.blocks[1])[0].weight.grad.full_tensor())
    assert torch.equal(*grads)


@on_ranks(2)
def test_several_roots_under_one_optimizer_are_served_in_one_order() -> None:
    keep, models = [], []
    for _ in range(8):
        models.append(fully_shard(nn.Linear(4, 4)))
        models[-1].set_allow_rank_divergence(True)
        keep.append([object() for _ in range(1000 * dist.get_rank())])  # addresses differ between ranks
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
    for _ in range(2):
        x = torch.ones(2, 4)
        for model in models:
            x = model(x)
        x.sum().backward()
        optimizer.step()
    assert len(keep) == 8


@on_ranks(2)
def test_the_switch_goes_off_after_ranks_took_different_ways() -> None:
    model = sharded("gloo", reshard_after_forward=False)
    with Join([model]), torch.no_grad():
        if dist.get_rank() == 0:
            model(torch.ones(2, 5, dtype=torch.float64), ALL)
    model.set_allow_rank_divergence(False)
    model(torch.ones(2, 5, dtype=torch.float64), ALL).sum().backward()


@on_ranks(2)
def test_an_inner_module_cannot_have_the_switch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0]).set_allow_rank_divergence(True)
    fully_shard(model)
    with pytest.raises(StateError, match="must be called on the root FSDP module; it was called on 0"):
        model(torch.ones(2, 4))


@on_ranks(2, group_timeout_s=20)
def test_ranks_that_differ_in_the_switch_are_told() -> None:
    model = fully_shard(nn.Linear(4, 4))
    model.set_allow_rank_divergence(dist.get_rank() == 0)
    with pytest.raises(DesyncError, match="set_allow_rank_divergence"):
        model(torch.ones(2, 4))


@on_ranks(4)
def test_sums_over_the_shard_axis_add_up_where_a_backward_reduces_a_unit_twice() -> None:
    """Ranks run the layers in opposite orders, and reduce over the replicas in the second microbatch alone."""
    model = over_replicas()
    orders = [way(0, 1), way(1, 0), way(0, 1), way(1, 0)]
    steps = [[[each, way(0, 1)] for each in orders] for _ in range(3)]

    def before_micro(step: int, micro: int, count: int) -> None:
        model.set_requires_all_reduce(micro == count - 1)

    check(steps, model, before_micro=before_micro)


@pytest.mark.parametrize("first", ["switch", "manual"])
@on_ranks(2)
def test_manual_finalization_beside_the_switch_is_refused(first: str) -> None:
    model = fully_shard(nn.Linear(4, 4))
    settings = [lambda: model.set_allow_rank_divergence(True), lambda: model.set_manual_backward_finalization(True)]
    with pytest.raises(StateError, match="are both on"):
        for setting in settings if first == "switch" else settings[::-1]:
            setting()
        model(torch.ones(2, 4))
    dist.barrier()  # a rank may still be connecting


@on_ranks(2)
def test_the_switch_uses_its_group_again() -> None:
    model, counts = fully_shard(nn.Linear(4, 4)), list[int]()
    for is_on in (True, False, True, False, True):
        model.set_allow_rank_divergence(is_on)
        model(torch.ones(2, 4)).sum().backward()
        counts.append(len(all_groups()))
    assert len({*counts}) == 1


@pytest.mark.parametrize("has_run", [False, True])
@on_ranks(2)
def test_a_copy_has_the_switch(has_run: bool) -> None:
    """Its first forward runs on one rank alone."""
    model, plain = sharded(), divergent()
    if has_run:
        on_all([[[way(0)], [way(1)]]], model)
        for param, mine in zip(plain.parameters(), model.parameters(), strict=True):
            param.data.copy_(cast(Any, mine).full_tensor())
        model.zero_grad()
    steps = [[[way(0)], []], [[way(1)], [way(0)]]]
    check(steps, copy.deepcopy(model), plain)


@on_ranks(4)
def test_a_join_that_divides_by_the_ranks_that_are_in_it_scales_sums_over_shards_once() -> None:
    """Ranks 2 and 3 leave after the first backward; the last one alone reduces over the replicas."""
    model, plain = over_replicas(), divergent()
    count = 3 if dist.get_rank() < 2 else 1
    with Join([model], divide_by_initial_world_size=False):
        for micro in range(count):
            model.set_requires_all_reduce(micro == 2)
            loss_of(model, ALL, inputs(0, dist.get_rank(), micro)).backward()
    for rank, micro in [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (0, 2), (1, 2)]:
        (loss_of(plain, ALL, inputs(0, rank, micro)) / 2).backward()  # two are in it at the last backward
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        if its.grad is not None:
            assert torch.equal(cast(Any, mine.grad).full_tensor(), its.grad)

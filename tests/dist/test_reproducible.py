"""``Reproducible``: the same bits at any number of ranks, and named errors for what cannot have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import ConfigError, Reproducible, ShardedOptimizer, StateError, UsageError, fully_shard, shard_model

NUM = 12


class Net(nn.Module):
    """Odd widths, so that shards end within vectors; dropout, whose mask must follow the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(9, 13), nn.Dropout(0.2), nn.Linear(13, 9)) for _ in range(2))
        )
        self.head = nn.Linear(9, 5)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(data).tanh())


Make = Callable[[nn.Module, Any], torch.optim.Optimizer]


def adamw(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sgd(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def zero(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    return shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.05)


def sharded(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    return ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.05)


def muon(model: nn.Module, group: Any) -> torch.optim.Optimizer:
    matrices = {name: param for name, param in model.named_parameters() if param.ndim == 2}
    return ShardedOptimizer(matrices, torch.optim.Muon, lr=0.05)


def mesh_of(ranks: int, replicas: int) -> DeviceMesh:
    """Return a mesh of the first ``ranks`` ranks; without ``replicas`` it has one axis.  Collective over all ranks."""
    found = torch.arange(ranks)
    if not replicas:
        return DeviceMesh("cpu", found)
    return DeviceMesh("cpu", found.view(replicas, -1), mesh_dim_names=("replicate", "shard"))


def train(mesh: DeviceMesh, strategy: str, make: Make, dtype: torch.dtype, steps: int = 2) -> list[Any]:
    """Return the losses, norms and parameters of a run over ``mesh``."""
    torch.manual_seed(0)
    model = Net()
    precision = shardwise.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    shard_model(model, strategy=strategy, mesh=mesh, min_unit_bytes=0, mp_policy=precision)
    optimizer = make(model, None if mesh.ndim > 1 else mesh.get_group())
    fixed = Reproducible(model, optimizer, num_microbatches=NUM, seed=1)
    data = torch.randn(NUM, 3, 9, generator=torch.Generator().manual_seed(0))
    found: list[Any] = []
    for step in range(steps):
        losses: list[torch.Tensor] = []
        for number in fixed.microbatches():
            loss = model(data[number]).square().mean() / NUM
            loss.backward()
            losses.append(loss.detach())
        norm = fixed.clip_grad_norm_(0.1, norm_type=(2.0, 1.0, torch.inf)[step % 3])
        optimizer.step()
        optimizer.zero_grad()
        found += [float(norm), float(fixed.sum(losses))]
    return [*found, *(full_of(param).tolist() for param in model.parameters())]


def full_of(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param.detach()


def assert_same_bits(shapes: list[tuple[int, int]], *args: Any) -> None:
    """Train over a mesh of each of ``shapes``, and compare on all ranks with the first."""
    results: list[Any] = []
    for ranks, replicas in shapes:
        mesh = mesh_of(ranks, replicas)
        results.append(train(mesh, *args) if dist.get_rank() < ranks else None)
    for shape, found in zip(shapes, results, strict=True):
        assert found is None or found == (results[0] if results[0] is not None else found), shape


@pytest.mark.parametrize(
    ("strategy", "make", "dtype"),
    [
        ("zero3", adamw, torch.float32),
        ("zero2", sharded, torch.bfloat16),
        ("ddp", sgd, torch.float32),
        ("zero1", zero, torch.float32),
    ],
)
@on_ranks(4)
def test_the_bits_do_not_depend_on_the_number_of_ranks(strategy: str, make: Make, dtype: torch.dtype) -> None:
    assert_same_bits([(1, 0), (2, 0), (3, 0), (4, 0)], strategy, make, dtype)


@on_ranks(4)
def test_whole_matrices_have_the_same_bits() -> None:
    assert_same_bits([(1, 0), (3, 0), (4, 0)], "zero3", muon, torch.float32)


@on_ranks(4)
def test_replicas_of_shards_have_the_same_bits() -> None:
    assert_same_bits([(1, 1), (2, 2), (4, 2), (3, 3)], "hsdp", adamw, torch.float32)


# ---- What cannot have the same bits is refused.


def _shared(model: nn.Module | None = None) -> nn.Module:
    return fully_shard(Net() if model is None else model)


def _backward(model: nn.Module) -> None:
    model(torch.ones(2, 9)).sum().backward()


@on_ranks(2)
def test_a_number_of_ranks_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_microbatches is 9, .* 2 data-parallel ranks .* fit \[1, 3, 9\] ranks"):
        Reproducible(_shared(), num_microbatches=9)


@on_ranks(2)
def test_a_backward_outside_of_the_loop_is_refused() -> None:
    model = _shared()
    Reproducible(model, num_microbatches=2)
    with pytest.raises(StateError, match="were reduced outside of Reproducible.microbatches()"):
        _backward(model)


@on_ranks(2)
def test_a_second_backward_of_a_microbatch_is_refused_and_one_without_sync_counts() -> None:
    model = _shared()
    fixed = Reproducible(model, num_microbatches=4)
    for _ in fixed.microbatches():
        with shardwise.policy(model, sync=False):
            _backward(model)
        _backward(model)
    assert fixed.step == 1
    with pytest.raises(StateError, match=r"were reduced twice in microbatch [02]; .* sync=False"):
        for _ in fixed.microbatches():
            _backward(model)
            _backward(model)


@on_ranks(2)
def test_two_microbatches_in_one_backward_are_refused() -> None:
    model = _shared()
    fixed = Reproducible(model, num_microbatches=4)
    with pytest.raises(StateError, match=r"were reduced in microbatch [13], and not in microbatch [02]"):
        for number in fixed.microbatches():
            if number % 2:
                _backward(model)


@on_ranks(2)
def test_buffers_that_follow_from_the_microbatches_of_a_rank_are_refused() -> None:
    model = _shared(nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)))
    fixed = Reproducible(model, num_microbatches=2)
    with pytest.raises(StateError, match=r"1\.\w+ was written in a microbatch"):
        for _ in fixed.microbatches():
            _backward(model)


class Running(nn.Module):
    """Replaces its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * data.mean()
        return data * self.weight


@on_ranks(2)
def test_values_that_are_replaced_or_written_in_the_loop_are_refused() -> None:
    model = _shared(Running())
    fixed = Reproducible(model, num_microbatches=2)
    with pytest.raises(StateError, match=r"mean was written in a microbatch"):
        for _ in fixed.microbatches():
            _backward(model)
    torch.manual_seed(0)  # the loop has left another state on each rank
    model = _shared(nn.Linear(9, 9))
    fixed = Reproducible(model, num_microbatches=2)
    with pytest.raises(StateError, match=r"weight was written in a microbatch"):
        for _ in fixed.microbatches():
            _backward(model)
            with torch.no_grad():
                model.weight.mul_(0.5)


@on_ranks(2)
def test_gradients_of_a_loop_that_has_not_ended_are_not_used() -> None:
    for kind in (sgd, zero, sharded):
        torch.manual_seed(0)
        model = shard_model(Net(), strategy="zero1" if kind is zero else "zero3")
        optimizer = kind(model, None)
        fixed = Reproducible(model, optimizer, num_microbatches=4)
        for leaves in (False, True):
            with pytest.raises(
                StateError, match=r"optimizer.step\(\) ran in a loop over .*, or after one that was left early"
            ):
                for _ in fixed.microbatches():
                    _backward(model)
                    if leaves:
                        break
                    optimizer.step()
                optimizer.step()
        with pytest.raises(StateError, match=r"clip_grad_norm_\(\) ran in a loop"):
            fixed.clip_grad_norm_(1.0)
        for _ in fixed.microbatches():
            _backward(model)
        optimizer.step()


@on_ranks(2)
def test_loops_within_loops_and_backwards_before_them_are_refused() -> None:
    model = _shared()
    fixed = Reproducible(model, num_microbatches=2)
    with pytest.raises(UsageError, match="was called in microbatch [01] of a loop over it"):
        for _ in fixed.microbatches():
            list(fixed.microbatches())
    with shardwise.policy(model, sync=False):
        _backward(model)
    with pytest.raises(StateError, match="wait for a backward with sync"):
        list(fixed.microbatches())


class Switch(nn.Module):
    """One of two layers of the same shapes, behind layers that come first in the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
        self.ways = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])
        self.way = 0

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.ways[self.way](self.trunk(data))


@on_ranks(2)
def test_microbatches_that_use_other_parameters_of_a_unit_are_refused() -> None:
    model = Switch()
    fully_shard(model)
    fixed = Reproducible(model, num_microbatches=4)
    with pytest.raises(StateError, match=r"were reduced in microbatch [13], and not in microbatch [02]"):
        for number in fixed.microbatches():
            model.way = number % 2
            _backward(model)


@on_ranks(2)
def test_optimizers_whose_bits_depend_on_shards_are_refused() -> None:
    model = _shared()
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ConfigError, match=r"AdamW computes other bits for parameters of torch\.float32 that are cut"):
        Reproducible(model, fused, num_microbatches=2)
    Reproducible(model, torch.optim.AdamW(model.parameters()), num_microbatches=2)


@pytest.mark.parametrize("clip", ["shardwise", "torch", "sharded", "zero"])
@on_ranks(2)
def test_norms_in_the_order_of_ranks_are_refused(clip: str) -> None:
    model = _shared() if clip != "zero" else shard_model(Net(), strategy="zero1")
    optimizers = {"sharded": sharded, "zero": zero}
    optimizer: Any = optimizers[clip](model, None) if clip in optimizers else None
    fixed = Reproducible(model, optimizer, num_microbatches=2)
    for _ in fixed.microbatches():
        _backward(model)
    with pytest.raises(UsageError, match=r"sums the gradient of \w+.*Call fixed\.clip_grad_norm_"):
        if optimizer is not None:
            optimizer.clip_grad_norm_(1.0)
        elif clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            shardwise.clip_grad_norm_(model.parameters(), 1.0)
    assert fixed.clip_grad_norm_(1.0) > 0


@on_ranks(2)
def test_a_run_that_was_saved_with_other_microbatches_is_refused() -> None:
    saved = Reproducible(_shared(), num_microbatches=4).state_dict()
    fixed = Reproducible(_shared(), num_microbatches=2)
    with pytest.raises(ConfigError, match="the saved run has 4 microbatches per step and this one 2"):
        fixed.load_state_dict(saved)
    with pytest.raises(UsageError, match="sum got 2 numbers, .* this rank computes 1 microbatches"):
        fixed.sum([torch.ones(())] * 2)
    with pytest.raises(UsageError, match="sum got 1 numbers, 0 as tensors with one element"):
        fixed.sum([1.0])  # type: ignore[list-item]

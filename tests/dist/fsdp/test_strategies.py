"""Strategies by name: the numbers of one process, and the collectives and memory that their rows say."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.ranks import on_ranks
from helpers.strategies import STRATEGIES, held, moves
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import shardwise
from shardwise import ConfigError, Strategy, ZeroRedundancyOptimizer, fully_shard, set_default_transport, shard_model

UNITS = 4  # three blocks and the root
COLLECTIVES = {
    "all-reduce": "allreduce_",
    "reduce-scatter": "_reduce_scatter_base_",
    "all-gather": "_allgather_base_",
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 4))


def _mesh(name: str) -> DeviceMesh:
    ranks = dist.get_world_size()
    if len(STRATEGIES[name].optimizer) == 1:
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(4)
def test_every_strategy_trains_as_one_process_does(name: str) -> None:
    model, plain = _model(), _model()
    shard_model(model, strategy=name, mesh=_mesh(name), min_unit_bytes=0)
    optimizers = _optimizer(name, model), torch.optim.AdamW(plain.parameters(), lr=0.1)
    ranks = dist.get_world_size()
    for step in range(2):
        model(_batch(step, dist.get_rank())).square().mean().backward()
        sum(plain(_batch(step, rank)).square().mean() / ranks for rank in range(ranks)).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(found), expected, rtol=1e-4, atol=1e-5)


def _bytes_of(tensors: Any) -> int:
    return sum(shardwise.torch_private.local_of(each).nbytes for each in tensors)


@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(4)
def test_a_rank_holds_what_the_row_says(name: str) -> None:
    model = _model()
    whole = _bytes_of(model.parameters())
    mesh = _mesh(name)
    shard_model(model, strategy=name, mesh=mesh, min_unit_bytes=0)
    optimizer = _optimizer(name, model)
    loss = model(_batch(0, dist.get_rank())).square().mean()
    row, sizes = STRATEGIES[name], tuple(mesh.shape)
    blocks = [*model][:3]  # the root keeps its parameters, as with FSDP2
    kept, of_blocks = (_bytes_of(p for block in each for p in block.parameters()) for each in (blocks, [*_model()][:3]))
    assert kept == of_blocks * held(row.parameter, sizes)
    loss.backward()
    optimizer.step()
    if name != "zero1":  # whose partition is of whole tensors
        assert _bytes_of(p.grad for p in model.parameters()) == whole * held(row.gradient, sizes)
        state = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
        assert _bytes_of(state) == 2 * whole * held(row.optimizer, sizes)
        return
    sizes_of_state: list[Any] = [None] * dist.get_world_size()
    own = [v for values in optimizer.optim.state.values() for v in values.values() if v.dim()]  # type: ignore[attr-defined]
    dist.all_gather_object(sizes_of_state, _bytes_of(own))
    assert sum(sizes_of_state) == 2 * whole


@pytest.mark.parametrize("name", ["zero2", "zero3", "hsdp", "hfsdp"])
@on_ranks(4)
def test_every_unit_issues_the_collectives_of_the_row(name: str) -> None:
    set_default_transport("collective")
    model = _model()
    mesh = _mesh(name)
    row = STRATEGIES[name]
    for module in (*[*model][:3], model):
        # The root keeps its parameters by default, as with FSDP2; where rows leave the choice, it is made alike here.
        fully_shard(module, mesh=mesh, strategy=name, reshard_after_forward=True if name in ("zero3", "hsdp") else None)
    for step in range(2):
        with CommDebugMode() as found:
            model(_batch(step, dist.get_rank())).square().mean().backward()
    counts = {op.__name__.rpartition(".")[2]: number for op, number in found.get_comm_counts().items()}
    expected: dict[str, int] = {}
    axes = (
        range(mesh.ndim) if name == "hsdp" else [mesh.ndim - 1]
    )  # else collectives of both axes are one over all ranks
    for move in (move for axis in axes for move in moves(row, axis)):
        expected[COLLECTIVES[move]] = expected.get(COLLECTIVES[move], 0) + UNITS
    assert {name: counts.get(name, 0) for name in expected} == expected
    assert prod(mesh.shape) == 4


@on_ranks(2)
def test_accumulation_may_keep_the_parameters_of_zero_2() -> None:
    set_default_transport("collective")
    model, plain = _model(), _model()
    shard_model(model, strategy="zero2", min_unit_bytes=0)
    reference = copy.deepcopy(plain)
    counts: list[int] = []
    for number in range(3):
        last = number == 2
        with CommDebugMode() as found, shardwise.policy(model, sync=last, reshard_after_backward=last):
            (model(_batch(number, dist.get_rank())).square().mean() / 3).backward()
        counts.append(found.get_total_counts())
    assert counts == [UNITS, 0, UNITS]  # one gather, in the first forward, and one reduction, in the last backward
    for number in range(3):
        for rank in range(2):
            (reference(_batch(number, rank)).square().mean() / 6).backward()
    for sharded, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]


@on_ranks(2)
def test_what_does_not_fit_a_strategy_is_a_named_error() -> None:
    flat, model = init_device_mesh("cpu", (2,)), _model()
    for call, words in (
        (lambda: shard_model(_model(), strategy="zero4"), "strategy is 'zero4'"),
        (lambda: shard_model(_model(), strategy="hsdp", mesh=flat), "hsdp takes a mesh of 2 data-parallel axes"),
        (
            lambda: shard_model(_model(), strategy="zero2", reshard_after_forward=True),
            "leave out reshard_after_forward",
        ),
        (lambda: shard_model(_model(), strategy="ddp", sync_module_states=True), "'ddp' shards no parameter"),
        (lambda: fully_shard(model, strategy="ddp"), "ddp shards no parameter: call shard_model"),
        (lambda: fully_shard(model, strategy=Strategy.ZERO1), "zero1 shards no parameter: call shard_model"),
        (lambda: fully_shard(model, strategy=Strategy.HFSDP, mesh=flat), "hfsdp takes a mesh of 2 data-parallel axes"),
        (lambda: fully_shard(model, strategy="zero4"), "strategy is 'zero4'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=words):
            call()
    assert fully_shard(model, strategy=Strategy.ZERO2) is model  # what refused a strategy has sharded nothing

"""Replicas that begin with other values are named in the first backward that averages their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import init_device_mesh

from shardwise import DesyncError, fully_shard, replicate

Api = Callable[[nn.Module], nn.Module]


def hybrid(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replica", "shard"))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def each(model: nn.Module) -> nn.Module:
    replicate(model[0])
    return replicate(model)


def whole(model: nn.Module) -> nn.Module:
    return replicate(model)


def older(model: nn.Module) -> nn.Module:
    return replicate(model, init_sync=False)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).to(dtype)


def spoil(model: nn.Module, change: float = 0.5) -> None:
    """Change a frozen row of the head, on the last rank alone."""
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            model[2].weight[2, 6] += change


def step(model: nn.Module, rows: int = 4) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(rows, 5, dtype=dtype)).sum().backward()


@pytest.mark.parametrize("api", [each, whole, older])
@pytest.mark.parametrize("is_frozen", [False, True])
@on_ranks(2)
def test_replicas_that_differ_are_named_on_every_rank(api: Api, is_frozen: bool) -> None:
    model = net()
    model[2].requires_grad_(not is_frozen)
    spoil(model)
    model = api(model)
    said = "2.weight is not the same on rank 1 as on rank 0. Each would add"
    for _ in range(2):  # who goes on is told again
        with pytest.raises(DesyncError, match=said):
            step(model)


@on_ranks(4)
def test_replicas_of_shards_are_compared_with_their_own() -> None:
    model = hybrid(net())
    if dist.get_rank() == 3:  # its third row is the last
        model[2].weight.to_local().detach()[-1, 6] += 0.5
    with pytest.raises(DesyncError, match="2.weight is not the same on rank 3 as on rank 1. Each would add"):
        step(model)
    model = hybrid(net())
    for _ in range(2):
        step(model)


@pytest.mark.parametrize("api", [each, whole, older])
@on_ranks(2)
def test_values_that_are_made_equal_before_the_first_step_are_right(api: Api) -> None:
    model = net()
    spoil(model)
    model = api(model)
    if dist.get_rank() == 0:  # nobody waits for a replica that evaluates alone
        with torch.no_grad():
            model(torch.ones(1, 5))
    model.set_requires_gradient_sync(False)
    step(model)
    model.set_requires_gradient_sync(True)
    model.zero_grad()
    for param in model.parameters():
        dist.broadcast(param.to_local() if hasattr(param, "to_local") else param.detach(), 0)
    step(copy.deepcopy(model))
    step(model)


@on_ranks(2)
def test_a_rank_whose_values_are_not_numbers_is_named() -> None:
    model = net()
    spoil(model, float("nan"))
    with pytest.raises(DesyncError, match="not the same on rank 1 as on rank 0"):
        step(whole(model))

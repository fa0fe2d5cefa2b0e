"""Ranks that take different ways train as one process does on the whole batch."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.divergent import Divergent, Steps, Way, alone, assert_same, drawn, on_all
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

from shardwise import FSDPModule, fully_shard, replicate, shard_model

TRANSPORTS = ("auto", "gloo", "collective")
WAYS = ("sharded", "kept", "int", "hsdp", "replicate", "shard_model")


def sharded(kind: str, transport: str = "auto") -> nn.Module:
    torch.manual_seed(0)
    model = Divergent()
    size = dist.get_world_size()
    if kind == "replicate":
        for layer in model.layers:
            replicate(layer)
        replicate(model)
    elif kind == "shard_model":
        shard_model(model)
    else:
        mesh = (
            init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
            if kind == "hsdp"
            else init_device_mesh("cpu", (size,))
        )
        after = {"kept": False, "int": max(size // 2, 1)}.get(kind, True)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=after)
        fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    model.set_transport(transport)  # pyright: ignore
    model.set_allow_rank_divergence(True)
    return model


def check(steps: Steps, kind: str, transport: str = "auto", joins: bool = False) -> None:
    torch.manual_seed(0)
    plain = Divergent()
    model = sharded(kind, transport)
    found = on_all(steps, model, (lambda: Join([cast(Any, model)])) if joins else nullcontext)
    assert_same(found, alone(steps, plain), [name for name, _ in plain.named_parameters()])


def tower(num_ranks: int) -> Steps:
    """A tower that other ranks need in each step."""
    return [[[Way((0, 1, 3) if (rank + step) % 2 else (0, 1, 2, 3))] for rank in range(num_ranks)] for step in range(4)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", WAYS)
@on_ranks(2, 4)
def test_a_tower_on_some_ranks(kind: str, transport: str, num_ranks: int) -> None:
    check(tower(num_ranks), kind, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", WAYS)
@on_ranks(2, 4)
def test_ways_drawn_at_random(kind: str, transport: str, num_ranks: int) -> None:
    for seed in range(4):
        check(drawn(seed, num_ranks, 3), kind, transport, joins=seed % 2 == 1)


class Wide(nn.Module):
    """Blocks of eight parameters."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def calls_of_a_step(num_blocks: int, transport: str, is_on: bool) -> int:
    model = Wide(num_blocks)
    for block in model.blocks:
        fully_shard(block)
    root = fully_shard(model)
    root.set_transport(cast(Any, transport))
    root.set_allow_rank_divergence(is_on)
    calls, fewest = 0, sys.maxsize

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "/shardwise/fsdp/" in frame.f_code.co_filename

    for _ in range(12):
        calls = 0
        sys.setprofile(count)
        try:
            model(torch.ones(2, 4)).sum().backward()
        finally:
            sys.setprofile(None)
        model.zero_grad()
        dist.barrier()
        fewest = min(fewest, calls)  # of the first steps, and where a reduction was still on its way, more
    return fewest


@pytest.mark.parametrize("transport", ["auto", "collective"])
@on_ranks(2)
def test_ranks_that_take_the_same_way_make_no_more_calls_per_unit(transport: str) -> None:
    off, on = ([calls_of_a_step(num, transport, is_on) for num in (3, 6)] for is_on in (False, True))
    assert on[1] - on[0] == off[1] - off[0] > 0, (on, off)

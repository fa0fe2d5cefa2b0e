"""A backward that raises on every rank, at the same place, leaves nothing behind that one rank waits for."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from helpers.models import Block
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard


class Refused(Exception):
    """What user code raises in backward."""


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(6, 10) for _ in range(4)])


def _wait_on_rank_three(_: torch.Tensor) -> None:
    time.sleep(0.7 if dist.get_rank() == 3 else 0.0)


def _refuse(_: torch.Tensor) -> None:
    raise Refused


@on_ranks(4)
def test_replicas_whose_shard_peers_are_late_leave_a_failed_backward_together() -> None:
    model, plain = _blocks(), _blocks()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_trains_alike(model, plain, steps=2)
    x = batch(7)
    for number, block in enumerate(model):
        x = block(x)
        if number == 3:
            x.register_hook(_wait_on_rank_three)
        if number == 0:
            x.register_hook(_refuse)
    with pytest.raises(Refused):
        x.square().mean().backward()
    model.zero_grad()
    assert_trains_alike(model, plain)

"""Ranks that diverge: an error on every rank that names the rank, the unit and the call; never a hang."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn

from shardwise import DesyncError, fully_shard
from shardwise.testing import WorkerPool
from shardwise.testing.models import Block


class Skippable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 8 * (1 + i)) for i in range(3))

    def forward(self, x: torch.Tensor, skip: int = -1, reverse: bool = False) -> torch.Tensor:
        for index, block in enumerate(reversed(self.blocks) if reverse else self.blocks):
            if index != skip:
                x = block(x)
        return x


def build() -> Skippable:
    torch.manual_seed(0)
    model = Skippable()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def diverge(how: str) -> str:
    """Rank 1 leaves the path of the others; return the message that this rank got."""
    model, rank = build(), dist.get_rank()
    x = torch.randn(2, 8)
    for _ in range(3):
        model(x).sum().backward()
    start = time.monotonic()
    try:
        for _ in range(3):
            if how == "skip":
                model(x, skip=1 if rank == 1 else -1).sum().backward()
            elif how == "order":
                model(x, reverse=rank == 1).sum().backward()
            else:
                for _ in range(2 if rank == 1 else 1):
                    model(x).sum().backward()
                if rank == 0:
                    time.sleep(0.1)
        if how == "microbatches" and rank == 0:
            dist.barrier()
    except RuntimeError as error:
        assert time.monotonic() - start < 30
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("how", ["skip", "order"])
def test_a_rank_that_leaves_the_order_is_named(pool: WorkerPool, how: str) -> None:
    messages = pool.run(diverge, how=how, num_ranks=2, timeout_s=60.0, group_timeout_s=6.0, fresh=True)
    assert all(message.startswith("DesyncError") for message in messages), messages
    assert all("rank 1" in message and "unit 'blocks." in message for message in messages), messages


def test_another_number_of_microbatches_is_named(pool: WorkerPool) -> None:
    messages = pool.run(diverge, how="microbatches", num_ranks=2, timeout_s=60.0, group_timeout_s=6.0, fresh=True)
    assert messages[1].startswith("DesyncError"), messages
    assert "rank 0" in messages[1], messages


@on_ranks(2)
def test_a_change_on_all_ranks_is_no_error() -> None:
    model, x = build(), torch.randn(2, 8)
    for reverse in (False, False, True, True, False):
        model(x, reverse=reverse).sum().backward()
    with torch.no_grad():
        model(x)
    model(x, skip=1).sum().backward()


def test_the_error_is_public() -> None:
    assert issubclass(DesyncError, RuntimeError)

"""Marks behind sums over replicas: what is the same on all ranks passes, whatever it is scaled by, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from shardwise.collectives.protocol import MOST_RANKS, ReductionChecksum


def summed(numbers: list[int], scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what an all-reduce gives of sections whose ranks have come to these numbers."""
    total = torch.zeros(4, dtype=dtype)
    for number in numbers:
        total += ReductionChecksum(torch.zeros(4, dtype=dtype), "blocks.0.weight", number).put()
    return total * scale


@pytest.mark.parametrize("size", [2, 3, 7, MOST_RANKS])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 1e6])
def test_ranks_that_sum_the_same_are_heard_of_by_nobody(size: int, divisor: float) -> None:
    for number in range(40):
        whole = summed([number] * size, 1 / divisor)
        ReductionChecksum(whole, "blocks.0.weight", number).check(1 / divisor, range(size), 0)


@pytest.mark.parametrize("size", [2, 3, 7, MOST_RANKS])
def test_one_rank_that_is_a_sum_ahead_is_noticed_by_all(size: int) -> None:
    for number in range(40):
        numbers = [number] * (size - 1) + [number + 1]
        for rank in (0, size - 1):
            whole = summed(numbers, 1 / size)
            with pytest.raises(RuntimeError, match=f"rank {rank} sums gradients of blocks.0.weight with its replicas"):
                ReductionChecksum(whole, "blocks.0.weight", numbers[rank]).check(1 / size, range(size), rank)


def test_sums_of_other_parameters_are_noticed_and_the_replicas_named() -> None:
    mine, other = (ReductionChecksum(torch.zeros(3), label, 0) for label in ("a", "b"))
    whole = mine.put() + other.put()
    with pytest.raises(RuntimeError, match="with its replicas, rank 6, as number 1"):
        ReductionChecksum(whole, "a", 0).check(1.0, (4, 6), 4)

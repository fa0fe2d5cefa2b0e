"""The few exchanges between ranks that a training loop needs beside its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunRanks:
    """Where this process stands: its rank, how many there are, and its device.  The default process group is theirs.

    ``tp`` neighbours at a time form a tensor-parallel group: they work on the same part of the batch, ``data_rank`` of
    ``num_data_ranks``.
    """

    rank: int
    num_ranks: int
    device: torch.device
    tp: int = 1

    @property
    def data_rank(self) -> int:
        return self.rank // self.tp

    @property
    def num_data_ranks(self) -> int:
        return self.num_ranks // self.tp

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        dist.barrier()

    def mean(self, values: Sequence[torch.Tensor]) -> list[float]:
        """Return each value's mean over ranks, summed in rank order so that it never depends on the transport."""
        return [total / self.num_ranks for total in self.total(values)]

    def total(self, values: Sequence[torch.Tensor]) -> list[float]:
        """Return each value's sum over ranks, added in rank order in fp64.  Shape: every value is ()."""
        mine = torch.stack([value.detach().double().cpu() for value in values])
        parts = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(parts, mine)
        return torch.stack(parts).cumsum(0)[-1].tolist()

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        values: list[T | None] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return [item for item in values if item is not None]

    def from_first(self, value: T | None) -> T:
        """Return rank 0's value on every rank; the others pass None."""
        box: list[T | None] = [value]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        return box[0]

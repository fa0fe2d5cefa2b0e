"""The few exchanges between ranks that a training loop needs beside its gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.comm.lost_peers import naming_lost_peers

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
        self._named(dist.barrier)

    def mean(self, values: Sequence[torch.Tensor]) -> list[float]:
        """Return each value's mean over ranks, summed in rank order so that it never depends on the transport."""
        return [total / self.num_ranks for total in self.total(values)]

    def total(self, values: Sequence[torch.Tensor]) -> list[float]:
        """Return each value's sum over ranks, added in rank order in fp64.  Shape: every value is ()."""
        mine = torch.stack([value.detach().double().cpu() for value in values])
        return torch.stack(self._each(mine, len(mine))).cumsum(0)[-1].tolist()

    def highest(self, values: Sequence[int]) -> list[int]:
        """Return the highest of each value over ranks."""
        if self.num_ranks == 1:
            return list(values)
        found = torch.tensor(values)
        self._named(lambda: dist.all_reduce(found, dist.ReduceOp.MAX))
        return found.tolist()

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank.  JSON must hold it: no rank runs what another sends."""
        mine = json.dumps(value).encode()
        sizes = [int(size) for size in self._each(torch.tensor([len(mine)]), 1)]
        row = torch.zeros(max(sizes), dtype=torch.uint8)
        row[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self._each(row, len(row))
        return [json.loads(bytes(part[:size].tolist())) for part, size in zip(rows, sizes, strict=True)]

    def from_first(self, value: T | None) -> T:
        """Return rank 0's value on every rank; the others pass None.  JSON must hold it."""
        found = self.gather(value)[0]
        assert found is not None
        return found

    def _each(self, mine: torch.Tensor, numel: int) -> list[torch.Tensor]:
        parts = [torch.empty(numel, dtype=mine.dtype) for _ in range(self.num_ranks)]
        self._named(lambda: dist.all_gather(parts, mine))
        return parts

    def _named(self, act: Callable[[], object]) -> None:
        naming_lost_peers(act, "ranks cannot tell each other where they are", range(self.num_ranks), self.rank)

"""How fast ranks of this host read each other's memory: forwards and backwards of a model that computes nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from shardwise.api.fully_shard import fully_shard
from shardwise.planner.hardware import Wire
from shardwise.testing.pool import WorkerPool

_SMALL, _LARGE = 1 << 10, 1 << 21  # elements
_TIMES, _WARM = 12, 3


def measured_shared(ranks: int) -> Wire:
    """Return the link of ``ranks`` processes, started here for some seconds: the slowest of them counts.

    Bytes are those of all sections that a rank copies; with one thread the rank's own time counts, as for operations.
    """
    with WorkerPool(max_ranks=ranks) as pool:
        found = pool.run(_seconds_on_rank, num_ranks=ranks, timeout_s=120)
    small, large = (max(each[place] for each in found) for place in (0, 1))
    rate = 4 * (_LARGE - _SMALL) / max(large - small, 1e-9)
    return Wire(rate, max(small - 4 * _SMALL / rate, 0.0))


def _seconds_on_rank() -> list[float]:
    """Return the median seconds by which an all-gather makes a forward longer, for both sizes."""
    torch.set_num_threads(1)
    seconds: list[float] = []
    for numel in (_SMALL, _LARGE):
        plain, sharded = _Idle(numel), fully_shard(_Idle(numel))
        alone, together = _forward_s(plain), _forward_s(sharded)
        seconds.append(max(together - alone, 0.0))
    return seconds


class _Idle(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[0]


@torch.no_grad()
def _forward_s(model: Callable[[torch.Tensor], torch.Tensor]) -> float:
    x = torch.zeros(1)
    seconds: list[float] = []
    for _ in range(_TIMES):
        dist.barrier()
        begin = time.thread_time()
        model(x)
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds[_WARM:])

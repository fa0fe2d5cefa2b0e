"""Time ``consolidate_state_dict``: torch's ZeroRedundancyOptimizer and ours, on 200 MiB of AdamW state.

Run: ``python benchmarks/consolidate.py [--num-ranks 2] [--rounds 5] [--out FILE]``.  Rounds alternate between the two; a
step before each call makes it move everything.  Memory is what malloc has lent at most during a call, beyond before it,
on ranks that send and on the one that receives (whose result is the state itself).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from bench_timing import PeakSampler, malloc_live_bytes
from over_ranks import Knob, measure_over_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from shardwise import ZeroRedundancyOptimizer

WIDTH, NUM_WEIGHTS = 1024, 25  # 100 MiB of parameters


def build(door: Any) -> torch.optim.Optimizer:
    """Return an optimizer with its state in place."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(NUM_WEIGHTS)]
    optimizer = door(params, torch.optim.AdamW, lr=1e-4)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def measure(rounds: int) -> dict[str, Any]:
    """Return, per API, median milliseconds and this rank's extra MiB."""
    optimizers: dict[str, Any] = {"torch": build(TorchZero), "shardwise": build(ZeroRedundancyOptimizer)}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    extra: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            optimizer.step()
            before = malloc_live_bytes() or 0
            dist.barrier()
            start = time.perf_counter()
            with PeakSampler() as sampler:
                optimizer.consolidate_state_dict(to=0)
                seconds = time.perf_counter() - start
            dist.barrier()
            times[name].append(1000 * seconds)
            extra[name].append(((sampler.live or before) - before) / 2**20)
    return {name: {"ms": statistics.median(times[name]), "extra_mib": max(extra[name])} for name in optimizers}


def _summary(every: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {
            "ms": round(max(each[name]["ms"] for each in every), 1),
            "sender_extra_mib": round(max(each[name]["extra_mib"] for each in every[1:]), 1),
            "receiver_extra_mib": round(receiver["extra_mib"], 1),
        }
        for name, receiver in every[0].items()
    }
    return {**found, "torch_over_shardwise": round(found["torch"]["ms"] / found["shardwise"]["ms"], 1)}


if __name__ == "__main__":
    measure_over_ranks(__doc__, Knob("rounds", 5), measure, _summary)

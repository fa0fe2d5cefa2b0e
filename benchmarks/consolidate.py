"""Time ``consolidate_state_dict``: torch's ZeroRedundancyOptimizer and ours, on 200 MiB of AdamW state.

Run: ``python benchmarks/consolidate.py [--num-ranks 2] [--rounds 5] [--out FILE]``.  Rounds alternate between the two; a
step before each call makes it move everything.  Memory is what malloc has lent at most during a call, beyond before it,
on ranks that send and on the one that receives (whose result is the state itself).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from shardwise import ZeroRedundancyOptimizer
from shardwise.recipes.bench.probe import PeakSampler, malloc_live_bytes

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
    """Return, per door, median milliseconds and this rank's extra MiB."""
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


def _main(rank: int, num_ranks: int, rounds: int, store_path: str, out: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    every: list[Any] = [None] * num_ranks
    dist.all_gather_object(every, measure(rounds))
    dist.destroy_process_group()
    if rank == 0:
        found: dict[str, Any] = {"num_ranks": num_ranks, "torch_version": torch.__version__, "rounds": rounds}
        for name, receiver in every[0].items():
            found[name] = {
                "ms": round(max(each[name]["ms"] for each in every), 1),
                "sender_extra_mib": round(max(each[name]["extra_mib"] for each in every[1:]), 1),
                "receiver_extra_mib": round(receiver["extra_mib"], 1),
            }
        found["torch_over_shardwise"] = round(found["torch"]["ms"] / found["shardwise"]["ms"], 1)
        print(json.dumps(found, indent=2))
        if out:
            Path(out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="", help="file for the result as JSON")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(
            _main, (args.num_ranks, args.rounds, str(Path(directory) / "store"), args.out), args.num_ranks
        )

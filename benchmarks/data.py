"""Time and memory of ``Microbatches`` beside torch's DataLoader with a sampler of torch, over the same datasets.

The peer of a map-style dataset is ``shuffle=True`` (RandomSampler); that of a mixture is WeightedRandomSampler over the
ConcatDataset.  Both read 12 microbatches per step, in one process that is a rank of a process group, step by step in turns:
torch's, ours, and both again, so that each finds the caches of the CPU as the other has left them.  ``ratio``: the time of
ours / that of torch's; ``noise``: that of the second of torch's / the first.  CPU time of the process, since others may be
using the machine; with workers, time.  ``memory_mib``: what the process has grown by since its first steps, at each fifth of
the steps.  ``far``: the time to the first batch at step 10^6 / that at step 0.

Run: python benchmarks/data.py [--steps 25000] [--size 8] [--width 1024] [--workers 0] [--data map mixture]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from shardwise import Microbatches, Mixture

NUM_ROWS, NUM_MICROBATCHES, WARM_UP = 20_000, 12, 500
Step = Callable[[int], None]


def torchs(dataset: Any, size: int, num_workers: int) -> Step:
    order: dict[str, Any] = {"shuffle": True}
    if isinstance(dataset, Mixture):
        parts = zip(dataset.sources.values(), dataset.weights, strict=True)
        weights = [weight / len(each) for each, weight in parts for _ in range(len(each))]
        order = {"sampler": WeightedRandomSampler(weights, len(weights))}
    loader = DataLoader(dataset, batch_size=size, num_workers=num_workers, drop_last=True, **order)

    def epochs() -> Iterator[Any]:
        while True:
            yield from loader

    batches = epochs()

    def step(number: int) -> None:
        for _ in islice(batches, NUM_MICROBATCHES):
            pass

    return step


def ours(dataset: Any, size: int, num_workers: int) -> Step:
    data = Microbatches(dataset, num_microbatches=NUM_MICROBATCHES, microbatch_size=size, num_workers=num_workers)

    def step(number: int) -> None:
        for _ in data.of_step(number):
            pass

    return step


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def compare(dataset: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios of times, microseconds per batch, and what the process has grown by."""
    clock = time.perf_counter if args.workers else time.process_time
    makers = torchs, ours, torchs, ours
    steps = [make(dataset, args.size, args.workers) for make in makers]
    seconds = [0.0, 0.0, 0.0, 0.0]  # no medians: numbers of samples are made in blocks, torch's once per epoch
    resident: list[int] = []
    for number in range(WARM_UP + args.steps):
        if number >= WARM_UP and (number - WARM_UP) * 5 // args.steps == len(resident):
            gc.collect()
            resident.append(resident_bytes())
        for place, step in enumerate(steps):
            start = clock()
            step(number)
            seconds[place] += (clock() - start) * (number >= WARM_UP)
    gc.collect()
    start, *later = *resident, resident_bytes()
    first, own, second, again = (each * 1e6 / NUM_MICROBATCHES / args.steps for each in seconds)
    return {
        "ratio": (own + again) / (first + second),
        "noise": second / first,
        "ours_us": (own + again) / 2,
        "torch_us": (first + second) / 2,
        "memory_mib": [round((each - start) / 2**20, 2) for each in later],
    }


def far(dataset: Any, args: argparse.Namespace) -> float:
    """Return the median time to the first batch at step 10^6 / that at step 0."""

    def first(step: int) -> float:
        data = Microbatches(dataset, num_microbatches=NUM_MICROBATCHES, microbatch_size=args.size)
        data._own()  # pyright: ignore[reportPrivateUsage]  compares a hundred samples, at any step
        start = time.process_time()
        next(data.of_step(step))
        return time.process_time() - start

    return statistics.median(first(10**6) / first(0) for _ in range(101))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25_000)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="numbers of a sample")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--data", nargs="+", choices=("map", "mixture"), default=["map", "mixture"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    rows = TensorDataset(torch.zeros(NUM_ROWS, args.width))
    both = {
        "a": (TensorDataset(torch.zeros(NUM_ROWS, args.width)), 0.7),
        "b": (TensorDataset(torch.zeros(999, args.width)), 0.3),
    }
    mixture = Mixture(both)
    datasets = {"map": rows, "mixture": mixture}
    for name in args.data:
        dataset = datasets[name]
        found = compare(dataset, args)
        print(json.dumps({"data": name, **found, "far": far(dataset, args)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

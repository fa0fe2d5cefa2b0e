"""What it costs that a thread waits for gloo's messages in place of the caller (``consistency/process_groups.py``).

``python benchmarks/message_waits.py [--rounds 400]``: two ranks exchange messages and wait for them by the thread and
directly, in turns; medians of the seconds of one exchange, and of a training step over messages.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.collectives.host import send_recv
from shardwise.consistency import process_groups
from shardwise.testing import WorkerPool

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)  # bytes
_Wait = Callable[[list[dist.Work], dist.ProcessGroup], None]


def wait_directly(works: list[dist.Work], _: dist.ProcessGroup) -> None:
    while works:
        works[0].wait()
        del works[0]


WAYS: dict[str, _Wait] = {"direct": wait_directly, "thread": process_groups.wait_all}


def exchanges(rounds: int) -> dict[int, dict[str, float]]:
    """Return the median seconds of an exchange by size and way."""
    group, other = dist.group.WORLD, 1 - dist.get_rank()
    assert group is not None
    found: dict[int, dict[str, float]] = {}
    for size in SIZES:
        out, into = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds if size < 1 << 20 else rounds // 4):
            for way, wait in WAYS.items():
                dist.barrier()
                begin = time.perf_counter()
                messages = [dist.irecv(into, other), dist.isend(out, other)]
                wait([each for each in messages if each is not None], group)
                taken[way].append(time.perf_counter() - begin)
        found[size] = {way: statistics.median(each) for way, each in taken.items()}
    return found


def steps(rounds: int) -> dict[str, float]:
    """Return the median seconds of a training step of twelve small units by way."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(12)))
    for block in model:
        shardwise.fully_shard(block)
    shardwise.fully_shard(model).set_transport("gloo")
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(64, 256)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way, wait in WAYS.items():
            with mock.patch.object(send_recv, "wait_all", wait), mock.patch.object(send_recv, "LEAST_BYTES_ON_HOST", 0):
                dist.barrier()
                begin = time.perf_counter()
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if number >= 3:
                    taken[way].append(time.perf_counter() - begin)
    return {way: statistics.median(each) for way, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    with WorkerPool(max_ranks=2) as pool:
        by_size = pool.run(exchanges, num_ranks=2, timeout_s=300, rounds=options.rounds)[0]
        of_steps = pool.run(steps, num_ranks=2, timeout_s=300, rounds=max(options.rounds // 4, 8))[0]
    for size, found in by_size.items():
        more = 1e6 * (found["thread"] - found["direct"])
        print(f"{size:9,} bytes: direct {1e6 * found['direct']:8.0f} us, by the thread {more:+.0f} us")
    ratio = of_steps["thread"] / of_steps["direct"]
    print(f"a step of 12 units: direct {1e3 * of_steps['direct']:.2f} ms, by the thread x {ratio:.3f}")


if __name__ == "__main__":
    main()

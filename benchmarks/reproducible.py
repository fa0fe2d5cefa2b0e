"""Time of a step with and without ``Reproducible``: torchrun --nproc-per-node 2 benchmarks/reproducible.py [V].

Both train the same GPT-like stack on V microbatches; without, gradients are accumulated locally and reduced in the last one.
Steps are interleaved; the figure is the ratio of medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import shardwise

WIDTH, DEPTH, TOKENS, STEPS = 384, 6, 512, 12


def model() -> nn.Module:
    """Return a sharded stack of MLPs."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(DEPTH)]
    return shardwise.shard_model(nn.Sequential(*layers), strategy="zero3")


def plain(num: int) -> Callable[[], None]:
    """Return a step that accumulates without sync."""
    net, data = model(), torch.randn(TOKENS, WIDTH)
    optimizer = torch.optim.AdamW(net.parameters())
    own = num // dist.get_world_size()

    def step() -> None:
        for number in range(own):
            with shardwise.policy(net, sync=number == own - 1):
                (net(data).square().mean() / own).backward()
        shardwise.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fixed(num: int) -> Callable[[], None]:
    """Return a step whose bits do not depend on the number of ranks."""
    net, data = model(), torch.randn(TOKENS, WIDTH)
    optimizer = torch.optim.AdamW(net.parameters())
    batches = shardwise.Reproducible(net, optimizer, num_microbatches=num)

    def step() -> None:
        for _ in batches.microbatches():
            (net(data).square().mean() / num).backward()
        batches.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Print the medians and their ratio."""
    dist.init_process_group("gloo")
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    steps = [plain(num), fixed(num)]
    times: list[list[float]] = [[], []]
    for round_ in range(STEPS):
        for index in (0, 1) if round_ % 2 else (1, 0):
            dist.barrier()
            begin = time.perf_counter()
            steps[index]()
            dist.barrier()
            times[index].append(time.perf_counter() - begin)
    without, with_ = (statistics.median(each[2:]) for each in times)
    if dist.get_rank() == 0:
        print(
            f"ranks {dist.get_world_size()}, V {num}: {without:.3f} s without, {with_:.3f} s with, {with_ / without:.3f}x"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Time of a step with and without ``Reproducible``: torchrun --nproc-per-node 2 benchmarks/reproducible.py [V] [FILE].

Both train the same GPT-like stack on V microbatches; without, gradients are accumulated locally and reduced in the last one.
Steps are interleaved; the figure is the ratio of medians.  Beside it: CPU seconds of all ranks, which other programs on the
host change less.  FILE gets both as JSON, beside those of other numbers of ranks.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
    times: list[list[tuple[float, float]]] = [[], []]
    for round_ in range(STEPS):
        for index in (0, 1) if round_ % 2 else (1, 0):
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            steps[index]()
            cpu = torch.tensor(time.process_time() - begin_cpu)
            dist.all_reduce(cpu)
            times[index].append((time.perf_counter() - begin, cpu.item()))
    found: dict[str, float] = {"V": num}
    for column, kind in enumerate(("seconds", "cpu_seconds")):
        without, with_ = (statistics.median(each[column] for each in its[2:]) for its in times)
        found |= {f"{kind}_without": without, f"{kind}_with": with_, f"{kind}_ratio": with_ / without}
    if dist.get_rank() == 0:
        print(f"ranks {dist.get_world_size()}: " + ", ".join(f"{key} {value:.3f}" for key, value in found.items()))
        if len(sys.argv) > 2:
            file = Path(sys.argv[2])
            results: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
            rounded = {key: round(value, 3) for key, value in found.items()}
            file.write_text(json.dumps(results | {f"{dist.get_world_size()} ranks": rounded}, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Steps of a model whose states exceed the memory of this machine: parameters, gradients and optimizer state are on disk.

Run: ``python benchmarks/more_than_memory.py [--num-ranks 2] [--blocks 150] [--out FILE]``; it needs 16 bytes
of disk per parameter, and 2**24 parameters per block.  A cgroup shows that little of it has to be in memory.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from over_ranks import Knob, measure_over_ranks
from torch import nn

from shardwise import DiskOffloadPolicy, OptimizerOffload, ShardedOptimizer, fully_shard, init_parameters
from shardwise.one_host import host_memory_bytes

WIDTH = 4096
NUM_BYTES = 2**30  # that measure the disk


class Block(nn.Module):
    """A residual layer, after which values have no other scale: of a plain chain of layers they would soon be denormal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        return x + self.linear(self.norm(x))


def disk_gb_per_s() -> tuple[float, float]:
    """Return at how many GB per second the disk of temporary files is read and written."""
    fd = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
    block = mmap.mmap(-1, 2**24)
    block[:] = os.urandom(len(block))
    found: list[float] = []
    for move in (os.pwrite, lambda fd, block, begin: os.preadv(fd, [block], begin)):
        began = time.perf_counter()
        for begin in range(0, NUM_BYTES, len(block)):
            move(fd, block, begin)
        found.append(NUM_BYTES / 1e9 / (time.perf_counter() - began))
    os.close(fd)
    return found[1], found[0]


def moved_gb() -> tuple[float, float]:
    """Return how many GB this process has read from disks and written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    written = int(lines["write_bytes"]) - int(lines["cancelled_write_bytes"])
    return int(lines["read_bytes"]) / 1e9, written / 1e9


def measure_rank(blocks: int) -> dict[str, Any]:
    """Make two steps, of which the second reads all states; return what they took."""
    read_speed, write_speed = disk_gb_per_s() if dist.get_rank() == 0 else (0.0, 0.0)
    with torch.device("meta"):
        model = nn.Sequential(*[Block() for _ in range(blocks)])
    folder = tempfile.gettempdir()
    for module in (*model, model):
        fully_shard(module, offload_policy=DiskOffloadPolicy(folder=folder))
    for block in model:  # one after the other, so that only one is in memory
        init_parameters(block, device="cpu")
    offload = OptimizerOffload(folder=folder)
    optimizer = ShardedOptimizer(
        dict(model.named_parameters()), torch.optim.AdamW, lr=1e-4, fused=True, offload=offload
    )
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    steps: list[dict[str, float]] = []
    for _ in range(2):
        dist.barrier()
        began, before = time.perf_counter(), moved_gb()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        read, written = (after - first for after, first in zip(moved_gb(), before, strict=True))
        print(f"rank {dist.get_rank()}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        steps.append({"loss": float(loss), "s": time.perf_counter() - began, "read GB": read, "written GB": written})
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        "steps": steps,
        "disk reads GB/s": read_speed,
        "disk writes GB/s": write_speed,
        "peak resident GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def summary(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all ranks moved per step, beside the time that the disk takes for that alone."""
    first = every[0]
    steps: list[dict[str, float]] = []
    for ranks in zip(*[each["steps"] for each in every], strict=True):
        read, written = (sum(rank[key] for rank in ranks) for key in ("read GB", "written GB"))
        disk = read / first["disk reads GB/s"] + written / first["disk writes GB/s"]
        steps.append({**ranks[0], "read GB": read, "written GB": written, "s of the disk alone": disk})
    found = {
        **first,
        "steps": [{key: round(value, 6 if key == "loss" else 1) for key, value in step.items()} for step in steps],
        "states GB": 16 * first["parameters"] / 1e9,
        "memory of the host GB": (host_memory_bytes() or 0) / 1e9,
        "peak resident GB": max(each["peak resident GB"] for each in every),
    }
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}


if __name__ == "__main__":
    measure_over_ranks(__doc__, Knob("blocks", 150), measure_rank, summary)

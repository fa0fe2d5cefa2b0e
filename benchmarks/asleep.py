"""``shardwise.asleep``: what is resident while a model and its optimizer sleep, and how long they take to wake.

One process trains a sharded MLP with AdamW on the host, and sleeps in a folder; in turns with that it reads as many bytes from
a file without a name there, block by block with checksums, into memory of its own that has no pages yet.  ``wake``: the median
time to wake / that of reading.  ``resident``: what is resident while asleep / awake, above the process before the model.

Run: python benchmarks/asleep.py FOLDER [--mebibytes 512] [--turns 9]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.checkpoint.format import BLOCK_BYTES
from shardwise.offload.disk import StateFile
from shardwise.one_host import resident_bytes


def build(mebibytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    width = int((mebibytes * 2**20 / 3 / 4 / 8) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    for block in model:
        shardwise.fully_shard(block)
    shardwise.fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, model[0].in_features)).mean().backward()  # pyright: ignore
    optimizer.step()
    optimizer.zero_grad()


def read_s(folder: Path, num_bytes: int) -> float:
    """Return the seconds to read ``num_bytes`` into new memory."""
    file, num_blocks = StateFile(folder), -(-num_bytes // BLOCK_BYTES)
    file.reserve(num_blocks * BLOCK_BYTES)
    block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    block[:] = bytes(range(256)) * (BLOCK_BYTES // 256)
    sums = [file.write(number * BLOCK_BYTES, block) for number in range(num_blocks)]
    target = memoryview(mmap.mmap(-1, num_blocks * BLOCK_BYTES))
    start = time.perf_counter()
    for number, each in enumerate(sums):
        place = number * BLOCK_BYTES
        file.read(place, target[place : place + BLOCK_BYTES], each)
    return time.perf_counter() - start


def settled_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method=f"file://{args.folder.resolve()}/rendezvous", rank=0, world_size=1)
    step(*build(1))  # what the first step of a process loads
    before = settled_bytes()
    model, optimizer = build(args.mebibytes)
    step(model, optimizer)
    awake, asleep, wakes, sleeps, reads, num_bytes = settled_bytes() - before, 0, [], [], [], 0
    for _ in range(args.turns):
        start = time.perf_counter()
        with shardwise.asleep(model, optimizer, to=args.folder) as slept:
            sleeps.append(time.perf_counter() - start)
            asleep, num_bytes = settled_bytes() - before, slept.num_bytes
            start = time.perf_counter()
        wakes.append(time.perf_counter() - start)
        reads.append(read_s(args.folder, num_bytes))
        step(model, optimizer)
    found = {
        name: statistics.median(each) for name, each in (("wake_s", wakes), ("read_s", reads), ("sleep_s", sleeps))
    }
    found |= {"wake": found["wake_s"] / found["read_s"], "resident": asleep / awake, "bytes": num_bytes, "awake": awake}
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

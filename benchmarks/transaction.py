"""What a transaction costs: steps without one, and with one that copies or does not, take turns on the same machine.

``python benchmarks/transaction.py [--ranks 2] [--pairs 30] [--width 256] [--batch 128]`` prints a table; about a minute.
Ratios are medians over turns, each beside the plain step of its turn.
The last column is the time from an exception on one rank until all ranks are back and go on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import ZeroRedundancyOptimizer, fully_shard, replicate, set_default_transport, transaction

CASES = (
    ("fully_shard", "auto"),
    ("fully_shard", "collective"),
    ("replicate", "auto"),
    ("zero1", "auto"),
    ("zero1", "collective"),
)


@dataclass(frozen=True)
class Sizes:
    """What is measured: pairs of steps, width and blocks of the model, rows of a batch."""

    pairs: int
    width: int
    blocks: int
    batch: int


def build(api: str, sizes: Sizes) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a stack of MLP blocks behind ``api`` with AdamW."""
    torch.manual_seed(0)
    width = sizes.width
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(sizes.blocks)
    ]
    model: nn.Module = nn.Sequential(*blocks)
    if api == "zero1":
        model = DistributedDataParallel(model)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for block in (*blocks, model):
        (fully_shard if api == "fully_shard" else replicate)(block)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, around: AbstractContextManager[Any]
) -> float:
    """Make a step; return its seconds."""
    start = time.perf_counter()
    with around:
        model(batch).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def transaction_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> int:
    """Return what a step copies once the optimizer has state."""
    for _ in range(2):
        tx = transaction(model, optimizer)
        one_step(model, optimizer, batch, tx)
    return tx.num_bytes


def undo_ms(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Let rank 1 raise after its forward, while the others wait for it in backward; return milliseconds until all go on."""
    start = 0.0
    with transaction(model, optimizer, skip=KeyError):
        loss = model(batch).square().mean()
        start = time.perf_counter()
        if dist.get_rank() == 1:
            raise KeyError
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return (time.perf_counter() - start) * 1e3


def measure(rank: int, num_ranks: int, store: str, sizes: Sizes) -> None:
    """Run all cases as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    batch = torch.randn(sizes.batch, sizes.width)
    for api, transport in CASES:
        set_default_transport(transport)  # pyright: ignore[reportArgumentType]
        model, optimizer = build(api, sizes)
        copied = transaction_bytes(model, optimizer, batch)
        plain: list[float] = []
        guarded: list[float] = []
        turns: list[tuple[list[float], AbstractContextManager[Any]]] = [
            (plain, nullcontext()),
            (guarded, transaction(model, optimizer)),
        ]
        for number in range(sizes.pairs + 5):
            for seconds, around in turns[number % 2 :] + turns[: number % 2]:
                dist.barrier()
                seconds.append(one_step(model, optimizer, batch, around))
        undone = statistics.median([undo_ms(model, optimizer, batch) for _ in range(5)])
        step_ms = statistics.median(plain[5:]) * 1e3
        ratio = statistics.median([b / a for a, b in zip(plain[5:], guarded[5:], strict=True)])
        if rank == 0:
            print(
                f"{api:12} {transport:10} step {step_ms:7.2f} ms   in a transaction x {ratio:.3f}   "
                f"{copied / 1e6:6.2f} MB copied   undone in {undone:5.1f} ms",
                flush=True,
            )
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = Sizes(args.pairs, args.width, args.blocks, args.batch)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (args.ranks, f"{folder}/store", sizes), nprocs=args.ranks)


if __name__ == "__main__":
    main()

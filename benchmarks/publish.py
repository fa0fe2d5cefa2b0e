"""Time publishing what has changed beside full_tensors, and beside reading and writing the same shards once.

``python benchmarks/publish.py --ranks 2 --rounds 7`` prints a table and with ``--out`` writes it as JSON.  All go in turns
within one run, over a model of 100 million parameters in fp32, published in bf16; a part of the elements changes between
rounds.  The first round warms up and is not counted.  Each file is synced.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwise import WeightPublisher, WeightReader, full_tensors, fully_shard
from shardwise.checkpoint.files import Files, write_all
from shardwise.checkpoint.format import bytes_of
from shardwise.testing import WorkerPool

WIDTH, LAYERS = 2048, 24  # 100.7 million parameters


@dataclass(frozen=True)
class Row:
    """One way: seconds of the slowest rank, median and spread, and the bytes that leave the ranks."""

    name: str
    seconds: float
    spread: tuple[float, float]
    num_bytes: int


def change(model: nn.Module, part: float) -> int:
    """Change ``part`` of the elements of this rank's shards by a bit of bf16 each; return how many."""
    count = 0
    for param in model.parameters():
        local = param.to_local().detach().view(-1)
        stride = max(1, round(1 / part))
        local[int(torch.randint(stride, ())) :: stride] *= -1
        count += len(local[::stride])
    return count


def measure(part: float, rounds: int, folder: str) -> list[Row]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    place, files = Path(folder), Files()
    publisher = WeightPublisher(model, place / "publish", dtype=torch.bfloat16, anchor_every=10_000)
    reader, rank = WeightReader(place / "publish"), dist.get_rank()
    weights = {name: torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16) for name, _ in model.named_parameters()}

    def publish() -> None:
        publisher.publish()

    def gather() -> None:
        for name, tensor in full_tensors(model, dtype=torch.bfloat16):
            if rank == 0:
                weights[name].copy_(tensor)

    shards = place / f"shards-{rank}"

    def copy_shards() -> None:
        locals_ = [param.to_local().detach() for param in model.parameters()]
        write_all(files, shards, bytes_of(torch.cat([each.bfloat16().view(-1) for each in locals_])))
        with shards.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read()
        shards.unlink()

    def advance() -> None:
        if rank == 0:
            reader.advance(weights)

    publisher.publish()
    advance()
    dense = sum(each.nbytes for each in weights.values())
    ways: dict[str, Callable[[], None]] = {
        "publish()": publish,
        "reader.advance(), one rank": advance,
        "full_tensors into host memory of rank 0": gather,
        "shards in bf16 to a file and back": copy_shards,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    sizes: list[int] = []
    changed = torch.zeros((), dtype=torch.int64)
    for number in range(rounds + 1):
        torch.manual_seed(number)
        changed += change(model, part) if number else 0
        for name, call in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            seconds = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:
                times[name].append(seconds.item())
        newest = place / "publish" / f"step-{number + 2:08d}"
        if number:
            sizes.append(sum(each.stat().st_size for each in newest.iterdir()))
    dist.all_reduce(changed)
    if rank == 0:
        print(f"{sum(sizes) / changed.item():.3f} bytes per changed element, of versions with headers and manifests")
    moved = {"publish()": int(statistics.median(sizes)), "reader.advance(), one rank": int(statistics.median(sizes))}
    return [
        Row(name, statistics.median(found), (min(found), max(found)), moved.get(name, dense))
        for name, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", type=float, default=0.03, help="of the elements that changes between versions")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with WorkerPool(options.ranks, 600.0) as pool, tempfile.TemporaryDirectory() as folder:
        rows = pool.run(measure, num_ranks=options.ranks, part=options.part, rounds=options.rounds, folder=folder)[0]
    for row in rows:
        low, high = row.spread
        print(f"{row.name:42} {row.seconds:7.3f} s ({low:.3f} to {high:.3f}) {row.num_bytes / 1e6:8.1f} MB")
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

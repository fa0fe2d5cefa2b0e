"""What an event of the black box costs, and how many a training step makes.

``python benchmarks/black_box.py`` prints both; it takes seconds and needs one process.
"""

from __future__ import annotations

import statistics
import timeit

import torch
import torch.distributed as dist
from torch import nn

from shardwise import fully_shard, observe

NUMBER, REPEATS = 100_000, 7
NOTE, TRACK = 'note("reduction", "blocks.3")', 'track.note("reduce", "blocks.3")'


def cost_us(statement: str) -> float:
    """Return the median cost of ``statement`` in microseconds, without that of an empty one."""
    names = {"note": observe.note, "track": observe.Track("benchmark")}
    found = [
        statistics.median(timeit.repeat(each, globals=names, number=NUMBER, repeat=REPEATS))
        for each in (statement, "pass")
    ]
    return (found[0] - found[1]) / NUMBER * 1e6


def events_per_step(num_blocks: int) -> int:
    """Return how many events a forward and backward of ``num_blocks`` units and a root make."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_blocks)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    before = 0
    for _ in range(3):
        before = len(observe.entries())
        model(torch.ones(2, 8)).sum().backward()
    return len(observe.entries()) - before


def main() -> None:
    """Print the costs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = events_per_step(3), events_per_step(12)  # first: what is timed fills the ring
    print(f"events per step: {found[0]} with 3 blocks, {found[1]} with 12")
    print(f"note:       {cost_us(NOTE):.2f} us")
    print(f"track.note: {cost_us(TRACK):.2f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Ranks that take different ways: what the switch costs ranks that do not, and the usual workaround beside it.

same way: shapes of ``bench.py`` with ``set_allow_rank_divergence`` off and on, step by step in turns in one process per
rank; the ratio is the median over pairs.

tower: blocks, half of which a rank does not need, another half on each rank, changing every step.  Beside it the same model
without the switch, where ranks run a dummy input through the blocks that they do not need and add its sum times zero.  Time of
a step, and bytes of the buffers of all collectives of a step on a rank.

Run: python benchmarks/divergence.py [--rounds 40] [--shapes wide deep] [--transports auto collective]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from bench_contenders import CONTENDERS, BenchConfig, build_trained, make_setup
from bench_timing import take_step
from torch import nn

import shardwise
from shardwise.collectives.routes import Transport
from shardwise.observe import Op

RANKS, WARM_UP, WIDTH, BLOCKS, ROWS = 2, 6, 512, 8, 64
NAME = "shardwise full"


def in_turns(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Return the median milliseconds of both, and the median of second / first over pairs.  Collective."""
    times: dict[int, list[float]] = {0: [], 1: []}
    for number in range(2 * (rounds + WARM_UP)):
        which = (number + number // 2) % 2  # 0 1 1 0 0 1 1 0
        dist.barrier()
        start = time.perf_counter()
        (first, second)[which]()
        dist.barrier()
        times[which].append(1e3 * (time.perf_counter() - start))
    pairs = [after / before for before, after in zip(times[0][WARM_UP:], times[1][WARM_UP:], strict=True)]
    return statistics.median(times[0][WARM_UP:]), statistics.median(times[1][WARM_UP:]), statistics.median(pairs)


def same_way(shape: str, transport: Transport, rounds: int) -> str:
    """Time the switch off and on."""
    config = BenchConfig(shape=shape, ranks=RANKS, batch=2, rounds=rounds, seed=0, backend="gloo", names=(NAME,))
    setup = make_setup(config)
    both = [build_trained(CONTENDERS[NAME], setup.build_model(), setup) for _ in range(2)]
    for trained, is_on in zip(both, (False, True), strict=True):
        root = cast(shardwise.FSDPModule, trained.model)
        root.set_transport(transport)
        root.set_allow_rank_divergence(is_on)
    off, on, ratio = in_turns(lambda: take_step(both[0], setup), lambda: take_step(both[1], setup), rounds)
    return f"same way, {shape:5}, {transport:10}: off {off:7.2f} ms, on {on:7.2f} ms, on / off {ratio:.3f}"


class Tower(nn.Module):
    """Blocks of two matrices each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor, needed: set[int], dummies: bool) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number in needed:
                x = x + block(x)
            elif dummies:
                x = x + 0.0 * block(x[:1]).sum()
        return x


def sharded(transport: Transport, diverges: bool) -> tuple[nn.Module, Callable[[], None]]:
    """Return a model and its step."""
    torch.manual_seed(0)
    model = Tower()
    for block in model.blocks:
        shardwise.fully_shard(block)
    root = shardwise.fully_shard(model)
    root.set_transport(transport)
    root.set_allow_rank_divergence(diverges)
    x, steps = torch.randn(ROWS, WIDTH), iter(range(sys.maxsize))

    def step() -> None:
        half = (next(steps) + dist.get_rank()) % 2
        model(x, {*range(half, BLOCKS, 2)}, not diverges).sum().backward()
        model.zero_grad()

    return model, step


def bytes_of(model: nn.Module, step: Callable[[], None]) -> float:
    """Return the MiB of the buffers of all collectives of a step on this rank."""
    with shardwise.trace(model) as trace:
        for _ in range(2):
            step()
    return sum(call.num_bytes for call in trace.calls if call.op in (Op.UNSHARD, Op.SERVE, Op.REDUCE)) / 2 / (1 << 20)


def tower(transport: Transport, rounds: int) -> str:
    """Time dummy inputs, and ranks that skip."""
    (plain, with_dummies), (free, skipping) = sharded(transport, False), sharded(transport, True)
    before, after, ratio = in_turns(with_dummies, skipping, rounds)
    dummies, skips = bytes_of(plain, with_dummies), bytes_of(free, skipping)
    return (
        f"tower, {transport:10}: dummy inputs {before:7.2f} ms and {dummies:6.1f} MiB, "
        f"skipped {after:7.2f} ms and {skips:6.1f} MiB, skipped / dummies {ratio:.3f}"
    )


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shapes", nargs="*", default=["wide", "deep"])
    parser.add_argument("--transports", nargs="*", default=["auto", "collective"])
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        sys.exit(subprocess.run([*command, __file__, *sys.argv[1:]]).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = [same_way(shape, transport, options.rounds) for shape in options.shapes for transport in options.transports]
    lines += [tower(transport, options.rounds) for transport in options.transports]
    if not dist.get_rank():
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

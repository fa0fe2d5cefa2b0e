"""Time of one training step: no communication, DDP, torch's FSDP2 and shardwise's doors, interleaved in one run.

Every round steps every configuration once, in an order that rank 0 draws; the figures are medians over rounds of
barrier-to-barrier times, and ratios of them.  Run: python benchmarks/step.py --shape wide --ranks 2 --rounds 15
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.recipes.config import ModelShape
from shardwise.recipes.gpt import build_gpt, next_byte_loss
from shardwise.testing import WorkerPool

SHAPES = {
    "wide": ModelShape(layers=8, width=512, heads=8, context=256),
    "deep": ModelShape(layers=64, width=64, heads=4, context=256),
    "small": ModelShape(layers=4, width=128, heads=4, context=64),
}
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train: how the model is wrapped, and which optimizer steps it."""

    wrap: Callable[[nn.Module], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


def sharded_by(door: Callable[..., object]) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            door(block)
        door(model)
        return model

    return wrap


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def contenders() -> dict[str, Contender]:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    return {
        "local": Contender(lambda model: model, adamw),
        "DDP": Contender(DistributedDataParallel, adamw),
        "FSDP2": Contender(sharded_by(torch_fully_shard), adamw),
        "FSDP2 + fused": Contender(sharded_by(torch_fully_shard), fused_adamw),
        "shardwise full": Contender(sharded_by(shardwise.fully_shard), adamw),
        "shardwise full + fused": Contender(sharded_by(shardwise.fully_shard), fused_adamw),
        "shardwise replicate": Contender(sharded_by(shardwise.replicate), adamw),
    }


def measure(shape: str, rounds: int, batch: int) -> dict[str, list[float]]:
    """Runs on every rank; returns the seconds of each round by contender."""
    built = {}
    for name, contender in contenders().items():
        model = contender.wrap(build_gpt(SHAPES[shape], seed=0))
        built[name] = (model, contender.optimizer(model))
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 256, (batch, SHAPES[shape].context + 1), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in built}
    order = list(built)
    for number in range(rounds + WARM_UP):
        random.Random(number).shuffle(order)
        for name in order:
            model, optimizer = built[name]
            dist.barrier()
            start = time.perf_counter()
            next_byte_loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="wide")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    with WorkerPool(arguments.ranks, timeout_s=1800) as pool:
        times = pool.run(
            measure, num_ranks=arguments.ranks, shape=arguments.shape, rounds=arguments.rounds, batch=arguments.batch
        )[0]
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        {
            "name": name,
            "ms": round(1000 * median, 1),
            "x_local": round(median / medians["local"], 3),
            "fsdp2_over_this": round(medians["FSDP2"] / median, 3),
        }
        for name, median in medians.items()
    ]
    print(f"{arguments.shape}, {arguments.ranks} ranks over gloo, medians of {arguments.rounds} interleaved rounds")
    for row in rows:
        print(
            f"{row['name']:24} {row['ms']:9.1f} ms {row['x_local']:7.3f} x local {row['fsdp2_over_this']:7.3f} FSDP2 / this"
        )
    if arguments.out is not None:
        facts = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__}
        arguments.out.write_text(json.dumps({**facts, **vars(arguments), "out": None, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

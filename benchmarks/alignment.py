"""Time forward and backward with full parameters aligned as torch's tensors (64 bytes), and packed without gaps as before.

Run: ``python benchmarks/alignment.py [--num-ranks 2] [--rounds 20] [--out FILE]``.  Each round runs both layouts and torch's
FSDP2 once, in random order and between barriers, on the same values; what counts is the median of the ratios within a round.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from over_ranks import Knob, measure_over_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shardwise import fully_shard
from shardwise.collectives.streams import Device

# Width, blocks, rows of a microbatch: widths that fit vector registers, and odd ones.
SHAPES = {"even": (256, 6, 64), "odd": (255, 6, 64), "many small": (64, 24, 32), "many small, odd": (61, 24, 32)}
LAYOUTS = {"aligned": (fully_shard, 64), "packed": (fully_shard, 1), "torch": (torch_fully_shard, 64)}


def build(api: Any, width: int, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(blocks)]
    )
    for block in model:
        api(block)
    return api(model)


def measure(shape: str, rounds: int, warmups: int = 3) -> dict[str, Any]:
    """Return the median milliseconds of each layout, and the medians of ratios within a round."""
    width, blocks, batch = SHAPES[shape]
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {name: build(api, width, blocks) for name, (api, _) in LAYOUTS.items()}
    order, taken = random.Random(0), {name: list[float]() for name in models}
    for index in range(rounds + warmups):
        for name in order.sample(list(models), len(models)):
            Device.alignment = LAYOUTS[name][1]  # the first forward lays memory out, each backward looks at gradients
            dist.barrier()
            start = time.perf_counter()
            models[name](x).square().mean().backward()
            dist.barrier()
            if index >= warmups:
                taken[name].append(1000 * (time.perf_counter() - start))
            models[name].zero_grad()
    found: dict[str, Any] = {"ms": {name: round(statistics.median(each), 2) for name, each in taken.items()}}
    for other in ("packed", "torch"):
        ratios = [mine / theirs for mine, theirs in zip(taken["aligned"], taken[other], strict=True)]
        found[f"aligned over {other}"] = round(statistics.median(ratios), 3)
    return found


def measure_all(rounds: int) -> dict[str, Any]:
    return {shape: measure(shape, rounds) for shape in SHAPES}


def _first(every: list[dict[str, Any]]) -> dict[str, Any]:
    return every[0]  # ranks step together


if __name__ == "__main__":
    measure_over_ranks(__doc__, Knob("rounds", 20), measure_all, _first)

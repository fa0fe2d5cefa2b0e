"""Time an optimizer step: torch's optimizer over the DTensors of torch's FSDP2, and ShardedOptimizer over ours.

Run: ``python benchmarks/optimizer_step.py [--num-ranks 2] [--rounds 15] [--out FILE]``.  Each round steps every
configuration once, in random order and between barriers; what counts is the ratio of medians within one run.  Gradients
come from a real backward and stay in place.
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
from torch.distributed.tensor import init_device_mesh

from shardwise import fully_shard
from shardwise.optim.sharded_optimizer import ShardedOptimizer


class Block(nn.Module):
    """A residual MLP with a norm: 8 parameters when ``width`` is split over two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention[1](self.attention[0](self.norms[0](x)))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


SHAPES = {"few_large": (512, 8), "many_small": (64, 64)}  # width, blocks: 20M in 97 tensors, 2.7M in 769


def build(door: Any, width: int, blocks: int, bias: bool = True) -> nn.Module:
    """Return the sharded model with gradients in place."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*[Block(width) for _ in range(blocks)])
    for block in model:
        door(block, mesh=mesh)
    door(model, mesh=mesh)
    model(torch.randn(2, width)).square().mean().backward()
    return model


def configurations(shape: str) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers to compare; each has a model of its own."""
    found: dict[str, torch.optim.Optimizer] = {}
    for way, options in (("default", {}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        theirs = build(torch_fully_shard, *SHAPES[shape])
        found[f"torch {way}"] = torch.optim.AdamW(theirs.parameters(), lr=1e-4, **options)
        ours = build(fully_shard, *SHAPES[shape])
        found[f"ours {way}"] = ShardedOptimizer(dict(ours.named_parameters()), torch.optim.AdamW, lr=1e-4, **options)
    return found


def muon_configurations() -> dict[str, torch.optim.Optimizer]:
    """The same for Muon, over the matrices that torch's can take (none with an empty shard)."""
    found: dict[str, torch.optim.Optimizer] = {}
    for name, door in (("torch muon", torch_fully_shard), ("ours muon", fully_shard)):
        model = build(door, 128, 8)
        matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2}
        if name.startswith("torch"):
            found[name] = torch.optim.Muon(list(matrices.values()), lr=1e-4)
        else:
            found[name] = ShardedOptimizer(matrices, torch.optim.Muon, lr=1e-4)
    return found


def measure(optimizers: dict[str, torch.optim.Optimizer], rounds: int, warmups: int = 3) -> dict[str, float]:
    """Return the median milliseconds of each, the slowest rank's between barriers."""
    taken: dict[str, list[float]] = {name: [] for name in optimizers}
    order = random.Random(0)
    for index in range(rounds + warmups):
        for name in order.sample(list(optimizers), len(optimizers)):
            dist.barrier()
            start = time.perf_counter()
            optimizers[name].step()
            dist.barrier()
            if index >= warmups:
                taken[name].append(1000 * (time.perf_counter() - start))
    return {name: round(statistics.median(times), 2) for name, times in taken.items()}


def measure_all(rounds: int) -> dict[str, Any]:
    """Return medians and ratios (ours / torch's) for every shape."""
    found: dict[str, Any] = {}
    for shape in SHAPES:
        medians = measure(configurations(shape), rounds)
        ways = [name.removeprefix("ours ") for name in medians if name.startswith("ours")]
        ratios = {way: round(medians[f"ours {way}"] / medians[f"torch {way}"], 3) for way in ways}
        found[shape] = {"ms": medians, "ours_over_torch": ratios}
    medians = measure(muon_configurations(), max(rounds // 3, 3))
    ratio = round(medians["ours muon"] / medians["torch muon"], 3)
    found["muon"] = {"ms": medians, "ours_over_torch": {"default": ratio}}
    return found


def _first(every: list[dict[str, Any]]) -> dict[str, Any]:
    return every[0]  # ranks step together


if __name__ == "__main__":
    measure_over_ranks(__doc__, Knob("rounds", 15), measure_all, _first)

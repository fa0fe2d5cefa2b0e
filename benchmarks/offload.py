"""Time steps and updates of ``OptimizerOffload`` beside the resident optimizer and torch's ``CPUOffloadPolicy``.

Run: ``python benchmarks/offload.py [--num-ranks 2] [--rounds 9] [--out FILE]``.  Each round runs one step of every
contender, in random order and between barriers.  What counts is the ratio of medians within one run: of a step to max(compute,
16 bytes per parameter / host stream), of an update's bytes per second to those of a copy with the same threads, and of a step
with state on disk to max(1.3 x resident, 1.15 x 16 bytes per parameter / disk), whose rate is the median of five measurements.
"disk alone" reads and writes the same state with the same threads and updates nothing: where nothing overlaps with backward
(``undo=False``), a step takes no less than that and a resident one together.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from over_ranks import Knob, measure_over_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shardwise import OptimizerOffload, ShardedOptimizer, fully_shard
from shardwise.offload.disk import DiskTier, State
from shardwise.planner.hardware import measured

WIDTH, BLOCKS, BATCH = 1024, 6, 256
BYTES_OF_UPDATE = 28  # AdamW in fp32 reads parameter, gradient and two moments, and writes three of them


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(shard: Callable[..., Any], **options: Any) -> nn.Module:
    """Return the sharded model."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    for block in model:
        shard(block, **options)
    shard(model, **options)
    return model


def steps_of(batch: int) -> dict[str, Callable[[], None]]:
    """Return one training step of each contender."""
    data = torch.randn(batch, WIDTH)

    def step_of(model: nn.Module, optimizer: Any, clip: float = 0.0) -> Callable[[], None]:
        def step() -> None:
            model(data).square().mean().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()

        return step

    options: dict[str, Any] = {"lr": 1e-5, "fused": True}
    found: dict[str, Callable[[], None]] = {"compute alone": step_of(build(fully_shard), None)}
    for name, offload, clip in (
        ("resident", None, 0.0),
        ("offloaded", OptimizerOffload(), 0.0),
        ("offloaded, undo=True", OptimizerOffload(undo=True), 0.0),
        ("on disk", OptimizerOffload(folder=tempfile.mkdtemp()), 0.0),
        ("resident, clipped", None, 1e-3),
        ("offloaded, clipped", OptimizerOffload(), 1e-3),
        ("offloaded, clipped, undo=True", OptimizerOffload(undo=True), 1e-3),
    ):
        model = build(fully_shard)
        found[name] = step_of(
            model, ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, offload=offload, **options), clip
        )
    model = build(torch_fully_shard, offload_policy=TorchOffload(pin_memory=False))
    found["torch's CPUOffloadPolicy"] = step_of(model, torch.optim.AdamW(model.parameters(), **options))
    return found


def disk_alone() -> Callable[[], None]:
    """Return a function that moves AdamW's state of all units from disk and back."""
    tier, model = DiskTier(tempfile.mkdtemp()), build(fully_shard)
    sizes = [[p.to_local().shape for p in block.parameters()] for block in model]
    held: list[State] = [[torch.randn(shape) for shape in shapes * 2] for shapes in sizes]

    def run() -> None:
        for unit, state in enumerate(held):
            held[unit] = tier.store(unit, tier.load(unit, state))
        tier.rest()

    return run


def seconds_of(run: Callable[[], None]) -> float:
    """Return how long ``run`` takes on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measure_rank(rounds: int) -> dict[str, Any]:
    """Return the medians of this rank's group."""
    runs = steps_of(BATCH)
    numel = 2 * 1024 * 1024 * 8
    source, target = torch.randn(numel), torch.empty(numel)
    param = nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    adamw = torch.optim.AdamW([param], lr=1e-5, fused=True)
    small = build(fully_shard)
    updated = ShardedOptimizer(
        dict(small.named_parameters()), torch.optim.AdamW, offload=OptimizerOffload(undo=False), lr=1e-5, fused=True
    )
    small(torch.randn(BATCH, WIDTH)).square().mean().backward()

    def copy() -> None:
        target.copy_(source)

    runs |= {
        "copy": copy,
        "disk alone": disk_alone(),
        "update, units": updated.step,
        "update, one tensor": adamw.step,
    }
    # The ranks have one thread each, as the updates of two ranks on two cores do.
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        order = list(runs)
        random.Random(number).shuffle(order)
        for name in order:
            took = seconds_of(runs[name])
            if number >= 2:
                times[name].append(took)
    medians = {name: statistics.median(each) for name, each in times.items()}
    own = sum(p.to_local().numel() for p in small.parameters())
    disk = statistics.median(measured(torch.float32, 0, tempfile.gettempdir())[-1] for _ in range(5))
    stream = 8 * numel / medians["copy"]
    least = max(medians["compute alone"], 16 * own / stream)
    return {
        "ms": {name: round(1e3 * each, 2) for name, each in medians.items()},
        "parameters of a rank": own,
        "copy GB/s": round(stream / 1e9, 2),
        "update GB/s": round(BYTES_OF_UPDATE * own / medians["update, units"] / 1e9, 2),
        "update / copy (bar 0.70)": round(BYTES_OF_UPDATE * own / medians["update, units"] / stream, 3),
        "offloaded / max(compute, host) (bar 1.15)": round(medians["offloaded"] / least, 3),
        "disk GB/s of a rank": round(disk / 1e9, 2),
        "on disk / (resident + disk alone)": round(
            medians["on disk"] / (medians["resident"] + medians["disk alone"]), 3
        ),
        "on disk / resident": round(medians["on disk"] / medians["resident"], 3),
        "on disk / its bar": round(medians["on disk"] / max(1.3 * medians["resident"], 1.15 * 16 * own / disk), 3),
        "offloaded / resident": round(medians["offloaded"] / medians["resident"], 3),
        "offloaded / resident, clipped": round(medians["offloaded, clipped"] / medians["resident, clipped"], 3),
        "torch / offloaded": round(medians["torch's CPUOffloadPolicy"] / medians["offloaded"], 3),
    }


def summary(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what rank 0 has measured: times are those of the slowest rank."""
    return every[0]


if __name__ == "__main__":
    measure_over_ranks(__doc__, Knob("rounds", 9), measure_rank, summary)

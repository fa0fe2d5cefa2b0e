"""Host microseconds per unit and step, and per parameter of ``fully_shard``, beside torch's FSDP2.

Collectives are a fake process group's, tensors are tiny: what is left is Python, and what the fake group does, which
grows with the world size: ``collectives`` is the part of ours that is spent in its calls, two all-gathers and one
reduce-scatter.  ``own`` is a step of ours whose collectives return at once: the fake group copies a tensor per rank, on
this thread, and leaves cold caches to what comes after, which no backend does.  64 units of 8 parameters; CPU time of the
process, the least of interleaved rounds: others may be using the machine.

Run: python benchmarks/host_cost.py [--world 8 1024 16384]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise.collectives import c10d

NUM_UNITS, NUM_PARAMS = 64, 8


class Tiny(nn.Module):
    """Eight parameters and as little arithmetic as uses them all."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(rows, 2)) for _ in range(NUM_PARAMS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: () -> ()."""
        for weight in self.weights:
            x = x + weight[0, 0]
        return x


def build(shard: Callable[..., object] | None, mesh: DeviceMesh, rows: int = 4) -> tuple[nn.Module, float]:
    model = nn.Sequential(*(Tiny(rows) for _ in range(NUM_UNITS)))
    start = time.perf_counter()
    if shard is not None:
        for unit in model:
            shard(unit, mesh=mesh)
        shard(model, mesh=mesh)
    return model, time.perf_counter() - start


def step_s(model: nn.Module) -> float:
    start = time.process_time()
    model(torch.zeros(())).backward()
    seconds = time.process_time() - start
    for param in model.parameters():
        param.grad = None
    return seconds


@contextmanager
def clocked_collectives() -> Iterator[list[float]]:
    """Measure the seconds of every collective that our units launch."""
    seconds: list[float] = []
    kept = c10d.all_gather_single, c10d.reduce_scatter_single

    def clocked(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            start = time.process_time()
            work = function(*args)
            seconds.append(time.process_time() - start)
            return work

        return call

    c10d.all_gather_single, c10d.reduce_scatter_single = (clocked(each) for each in kept)
    try:
        yield seconds
    finally:
        c10d.all_gather_single, c10d.reduce_scatter_single = kept


class Done:
    """A collective that is over, and has moved nothing."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


@contextmanager
def without_collectives() -> Iterator[None]:
    """Let the collectives that our units launch return at once."""
    kept, done = (c10d.all_gather_single, c10d.reduce_scatter_single), Done()
    c10d.all_gather_single = c10d.reduce_scatter_single = lambda *_: done
    try:
        yield
    finally:
        c10d.all_gather_single, c10d.reduce_scatter_single = kept


def measure(world: int, rounds: int) -> dict[str, float]:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    doors = {"local": None, "fsdp2": torch_fully_shard, "shardwise": shardwise.fully_shard}
    mesh = init_device_mesh("cpu", (world,))
    for door in (torch_fully_shard, shardwise.fully_shard):
        build(door, mesh)  # what the first call imports and caches is not a cost per parameter
    built = {name: build(door, mesh) for name, door in doors.items()}
    times: dict[str, list[float]] = {name: [] for name in doors}
    collectives: list[float] = []
    own: list[float] = []
    for _ in range(2):  # passes whose values are checked: those without collectives would be refused
        step_s(built["shardwise"][0])
    for _ in range(rounds + 3):
        for name, (model, _) in built.items():
            with clocked_collectives() as seconds:
                times[name].append(step_s(model))
            if name == "shardwise":
                collectives.append(sum(seconds))
                with without_collectives():
                    step_s(model)  # caches are what such steps leave
                    own.append(step_s(model))
    least = {name: min(values[3:]) for name, values in times.items()}
    dist.destroy_process_group()
    result: dict[str, float] = {
        "world": world,
        "collectives_us_per_unit": 1e6 * min(collectives[3:]) / NUM_UNITS,
        "own_us_per_unit": 1e6 * (min(own[3:]) - least["local"]) / NUM_UNITS,
    }
    for name in ("fsdp2", "shardwise"):
        result[f"{name}_us_per_unit"] = 1e6 * (least[name] - least["local"]) / NUM_UNITS
        result[f"{name}_init_us_per_param"] = 1e6 * built[name][1] / (NUM_UNITS * NUM_PARAMS)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, nargs="+", default=[8, 1024, 16384])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(world, arguments.rounds) for world in arguments.world]
    for row in rows:
        print({key: round(value, 1) for key, value in row.items()})
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

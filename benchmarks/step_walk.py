"""Count the calls of one step, and how often they enter another file, beside torch's FSDP2.

A model of three blocks of two linear layers and a root, each block a unit, on two ranks of a fake process group: forward
and backward, no optimizer.
A call is a Python call into the package (``shardwise/``; ``torch/distributed/fsdp/_fully_shard/`` for FSDP2); it enters a
room when the last call of the package that is still running is in another file.  Counts, no timings: they repeat exactly.

Run: python benchmarks/step_walk.py [--by file|function] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise

PACKAGES = {
    "shardwise": (shardwise.fully_shard, Path(shardwise.__file__).parent),
    "fsdp2": (fsdp.fully_shard, Path(fsdp.__file__).parent / "_fully_shard"),
}


class Walk:
    """Counts calls into the files below ``folder`` while it is entered."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder) + "/"
        self._inside: list[str] = []
        self.calls: Counter[str] = Counter()
        self.entries: Counter[str] = Counter()

    def __enter__(self) -> Walk:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(self._folder):
            return
        if event == "return":
            if self._inside:
                self._inside.pop()
            return
        budget = name.removeprefix(self._folder)
        self.calls[f"{budget}:{frame.f_code.co_name}"] += 1
        if not self._inside or self._inside[-1] != budget:
            self.entries[budget] += 1
        self._inside.append(budget)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()


def walk(shard: Callable[..., Any], folder: Path) -> Walk:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)), nn.Linear(8, 8))
    for block in model[:3]:
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    for _ in range(3):
        step(model)
    found = Walk(folder)
    with found:
        step(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=["file", "function"], default=None)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    rows: dict[str, dict[str, int]] = {}
    for name, (shard, folder) in PACKAGES.items():
        found = walk(shard, folder)
        rows[name] = {
            "calls": found.calls.total(),
            "room_entries": found.entries.total(),
            "rooms": len(found.entries),
        }
        print(f"{name}: {rows[name]}")
        if arguments.by == "file":
            per_file: Counter[str] = Counter()
            for key, count in found.calls.items():
                per_file[key.split(":")[0]] += count
            for key, count in per_file.most_common():
                print(f"{count:6} calls {found.entries[key]:5} entries  {key}")
        elif arguments.by == "function":
            for key, count in found.calls.most_common(150):
                print(f"{count:6}  {key}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What benchmarks of one knob share: local gloo ranks, and one JSON of what all of them measured."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Knob:
    """The option that a benchmark takes, a whole number."""

    name: str
    default: int


def measure_over_ranks(
    about: str | None, knob: Knob, measure: Callable[[int], Any], summary: Callable[[list[Any]], dict[str, Any]]
) -> None:
    """Call ``measure`` with the value of ``knob`` on every rank; print the summary of what they return, and write ``--out``.

    Both functions must be importable: ranks are new processes.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument(f"--{knob.name}", type=int, default=knob.default)
    parser.add_argument("--out", default="", help="file for the result as JSON")
    args = vars(parser.parse_args())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _measure,
            (args["num_ranks"], f"{folder}/store", measure, args[knob.name], f"{folder}/found"),
            args["num_ranks"],
        )
        every = torch.load(f"{folder}/found", weights_only=False)
    told = {"num_ranks": args["num_ranks"], "torch": torch.__version__, knob.name: args[knob.name], **summary(every)}
    text = json.dumps(told, indent=2)
    print(text)
    if args["out"]:
        Path(args["out"]).write_text(text + "\n")


def _measure(rank: int, num_ranks: int, store: str, measure: Callable[[int], Any], value: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    every: list[Any] = [None] * num_ranks
    dist.all_gather_object(every, measure(value))
    dist.destroy_process_group()
    if rank == 0:
        torch.save(every, out)

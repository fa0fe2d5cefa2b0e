"""Time saving and loading beside torch's DCP: the same state, the same disk, in turns within one run.

``python benchmarks/checkpoint.py --mib 512 --ranks 2 --rounds 5`` prints a table and with ``--out`` writes it as JSON.
Both sync their files.  Memory is what a call holds at its peak beyond what was there before, on the rank with the most.
The first round warms up and is not counted: the first save in the background pays for its buffer, the first plain copy for its.
The ratio of the two, taken per round, is printed: the machine's mood is in both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from shardwise import ShardedOptimizer, ZeroRedundancyOptimizer, fully_shard
from shardwise.checkpoint import finish, load, save
from shardwise.checkpoint.state import contents_of
from shardwise.testing import WorkerPool

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WIDTH = 1024


@dataclass(frozen=True)
class Row:
    """One way of saving or loading: medians over the rounds, of the rank that took longest."""

    name: str
    seconds: float
    spread: tuple[float, float]
    peak_mib: float


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


def _plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def _sharded(model: nn.Module) -> torch.optim.Optimizer:
    return ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=1e-3, foreach=False)


def _whole_matrix(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    return ShardedOptimizer(named, torch.optim.AdamW, lr=1e-3, foreach=False, update="whole_matrix")


def _zero(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, foreach=False, partition="even")


def build(
    mib: int, make: Callable[[nn.Module], torch.optim.Optimizer] = _plain, is_sharded: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks(max(1, round(mib * 2**20 / (3 * 4 * (WIDTH + 1) * WIDTH))))
    if is_sharded:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = make(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def peak_of(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of ``call``, and MiB at its peak beyond those before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return seconds, memory("VmHWM") - before


def memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def worst(seconds: float, peak: float) -> tuple[float, float]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (seconds, peak))
    return max(each[0] for each in found), max(each[1] for each in found)


def measure(mib: int, rounds: int, folder: str) -> list[Row]:
    model, optimizer = build(mib)
    state = {"model": model, "optimizer": optimizer}
    place = Path(folder)
    host: list[torch.Tensor] = []

    def dcp_state() -> dict[str, Any]:
        found = get_state_dict(model, optimizer, options=FLAT)
        return {"model": found[0], "optimizer": found[1]}

    def dcp_load() -> None:
        found = dcp_state()
        dcp.load(found, checkpoint_id=place / "dcp")
        set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=FLAT
        )

    def copy() -> None:
        tensors = [param.to_local() for param in model.parameters()]
        tensors += [v.to_local() for s in optimizer.state.values() for v in s.values() if hasattr(v, "to_local")]
        if not host:
            host.extend(torch.empty_like(tensor) for tensor in tensors)
        for target, source in zip(host, tensors, strict=True):
            target.copy_(source)

    futures: list[Any] = []
    apart = dist.new_group()  # DCP's thread calls collectives

    def dcp_async() -> None:
        futures.append(dcp.async_save(dcp_state(), checkpoint_id=place / "dcp-async", process_group=apart))

    step = 0

    def ours(wait: bool) -> None:
        nonlocal step
        step += 1
        save(place / ("sync" if wait else "async"), state, step=step, keep=1, wait=wait)

    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "DCP: save": (lambda: dcp.save(dcp_state(), checkpoint_id=place / "dcp"), lambda: None),
        "shardwise: save": (lambda: ours(True), lambda: None),
        "DCP: load": (dcp_load, lambda: None),
        "shardwise: load": (lambda: load(place / "sync", state), lambda: None),
        "DCP: async_save, blocking part": (dcp_async, lambda: futures.pop().result()),
        "shardwise: save(wait=False), blocking part": (lambda: ours(False), lambda: settle(place / "async")),
        "plain copy of the shards": (copy, lambda: None),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, (call, after) in calls.items():
            if name == "DCP: save" and dist.get_rank() == 0:
                shutil.rmtree(place / "dcp", ignore_errors=True)
            if name.startswith("DCP: async") and dist.get_rank() == 0:
                shutil.rmtree(place / "dcp-async", ignore_errors=True)
            own = peak_of(call)
            after()
            found = worst(*own)
            if number:  # the first round warms up
                taken[name].append(found)
    rows: list[Row] = []
    for name, found in taken.items():
        seconds = sorted(each[0] for each in found)
        rows.append(Row(name, statistics.median(seconds), (seconds[0], seconds[-1]), max(each[1] for each in found)))
    finish(place / "sync")
    finish(place / "async")
    copied, blocked = taken["plain copy of the shards"], taken["shardwise: save(wait=False), blocking part"]
    ratios = sorted(b[0] / c[0] for b, c in zip(blocked, copied, strict=True))
    rows.append(Row("blocking part over plain copy (ratio)", statistics.median(ratios), (ratios[0], ratios[-1]), 0.0))
    return rows


def measure_loads(mib: int, rounds: int, folder: str) -> list[Row]:
    """Return a row for each optimizer that keeps state in a form of its own."""
    rows: list[Row] = []
    apis = {
        "ShardedOptimizer": (_sharded, True),
        "ShardedOptimizer, whole matrices": (_whole_matrix, True),
        "ZeRO": (_zero, False),
    }
    for name, (make, is_sharded) in apis.items():
        model, optimizer = build(mib, make, is_sharded)
        state, place = {"model": model, "optimizer": optimizer}, Path(folder) / name
        save(place, state, step=0)
        finish(place)
        held = worst(0.0, held_mib(state))[1]
        taken = [worst(*peak_of(lambda: load(place, state))) for _ in range(rounds + 1)][1:]  # noqa: B023  called here
        seconds = sorted(each[0] for each in taken)
        peak = max(each[1] for each in taken)
        rows.append(
            Row(f"{name}: load ({held:.0f} MiB held)", statistics.median(seconds), (seconds[0], seconds[-1]), peak)
        )
        if dist.get_rank() == 0:
            shutil.rmtree(place)
    return rows


def held_mib(state: dict[str, Any]) -> float:
    """Return how much of ``state`` this rank holds."""
    parts = contents_of(state, 0, 1).parts.values()
    return sum(part.tensor.numel() * part.tensor.element_size() for each in parts for part in each) / 2**20


def settle(folder: Path) -> None:
    """Wait for the save in the background without giving its memory back."""
    from shardwise.checkpoint.save import _savers

    for saver in _savers:
        if saver.folder == folder.absolute():
            saver.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="of model and optimizer state together, over all ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: a temporary folder)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, WorkerPool(arguments.ranks, 1800.0) as pool:
        rows: list[Row] = []
        for each in (measure, measure_loads):
            rows += pool.run(
                each, num_ranks=arguments.ranks, mib=arguments.mib, rounds=arguments.rounds, folder=folder
            )[0]
    print(f"{arguments.mib} MiB on {arguments.ranks} ranks; a rank's shards: {arguments.mib / arguments.ranks:.0f} MiB")
    print(f"{'':44s} {'seconds':>8s} {'from':>7s} {'to':>7s} {'peak MiB':>9s}")
    for row in rows:
        print(f"{row.name:44s} {row.seconds:8.3f} {row.spread[0]:7.3f} {row.spread[1]:7.3f} {row.peak_mib:9.0f}")
    if arguments.out is not None:
        arguments.out.write_text(
            json.dumps({"mib": arguments.mib, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

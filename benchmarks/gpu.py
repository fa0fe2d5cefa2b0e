"""Everything that only a GPU can show, in under ten minutes and one report (``make gpu``).

First the tests of ``tests/gpu``, then a GPT stepped beside torch's FSDP2 on every GPU of this host: time of a step, time
until the host is done with it, most memory, and whether the losses agree.  ``--rehearse`` does all of it but the tests on
two ranks of the CPU, with a model of no size, to see that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shardwise.recipes.config import ModelShape
from shardwise.recipes.gpt import GPT
from shardwise.testing import WorkerPool

ROOT = Path(__file__).resolve().parent.parent
REPORT = Path("benchmarks/results/gpu.md")
NOTHING = "no GPU on this host: nothing to run (`make gpu` needs at least one; everything else is in `make test`)"
TEST_LIMIT_S, CASE_LIMIT_S = 300, 90
LARGE = ModelShape(layers=24, width=1024, heads=16, context=512)
NONE = ModelShape(layers=2, width=32, heads=2, context=16)
CASES = ("fp32", "bf16", "bf16, parameters on the host")


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender in one case, on one rank: medians of seconds, bytes, and the losses."""

    step_s: float
    host_s: float
    peak_bytes: int
    losses: tuple[float, ...]


def build(case: str, shape: ModelShape, is_ours: bool, device: torch.device) -> Any:
    """Return the GPT, every block and the rest sharded by one of the two."""
    torch.manual_seed(0)
    model = GPT(shape)
    is_offloaded = "host" in case
    if not is_offloaded:
        model.to(device)
    door, precision, offload = _parts(is_ours)
    options: dict[str, Any] = {"mp_policy": precision(torch.bfloat16, torch.float32)} if "bf16" in case else {}
    if is_offloaded:
        options["offload_policy"] = offload(pin_memory=torch.accelerator.is_available())
    for block in model.blocks:
        door(block, **options)
    return door(model, **options)


def _parts(is_ours: bool) -> Sequence[Any]:
    if is_ours:
        return fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy
    from torch.distributed import fsdp

    return fsdp.fully_shard, fsdp.MixedPrecisionPolicy, fsdp.CPUOffloadPolicy


def measure(case: str, shape: ModelShape, device_type: str, num_steps: int) -> list[Figures]:
    """Run on every rank: step ours, then torch's; return the figures of each."""
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device(device_type, dist.get_rank() % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    return [_run(build(case, shape, is_ours, device), shape, device, num_steps) for is_ours in (True, False)]


def _run(model: nn.Module, shape: ModelShape, device: torch.device, num_steps: int) -> Figures:
    on_gpu = device.type != "cpu"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps: list[float] = []
    hosts: list[float] = []
    losses: list[float] = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(0, 256, (4, shape.context + 1), generator=generator).to(device)
        if on_gpu:
            torch.accelerator.synchronize()
        if on_gpu and step == 2:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hosts.append(time.perf_counter() - begin)
        if on_gpu:
            torch.accelerator.synchronize()
        steps.append(time.perf_counter() - begin)
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return Figures(statistics.median(steps[2:]), statistics.median(hosts[2:]), peak, tuple(losses))


def run_tests() -> str:
    """Run ``tests/gpu``; return the last line of pytest."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TEST_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"tests/gpu did not end within {TEST_LIMIT_S} s"
    print(done.stdout[-4000:], flush=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([*failed, (done.stdout.strip().splitlines() or [done.stderr[-500:]])[-1]])


def row_of(case: str, ranks: Sequence[Sequence[Figures]]) -> list[str]:
    """Return the two lines of a case: the slowest rank's times, the largest memory, how far losses are apart."""
    lines: list[str] = []
    apart = max(abs(a - b) for ours, theirs in ranks for a, b in zip(ours.losses, theirs.losses, strict=True))
    for index, name in enumerate(("shardwise", "FSDP2")):
        mine = [rank[index] for rank in ranks]
        times = [max(f.step_s for f in mine), max(f.host_s for f in mine)]
        peak = max(f.peak_bytes for f in mine)
        cells = [case, name, *(f"{1000 * each:.1f}" for each in times), f"{peak / 2**20:.0f}", f"{apart:.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def report_of(where: str, tests: str, rows: Sequence[str], shape: ModelShape) -> str:
    """Return the report as Markdown."""
    head = "| case | | step, ms | host, ms | peak, MiB | losses apart by |\n|---|---|---:|---:|---:|---:|"
    return (
        f"# What a GPU shows\n\nOn {where}; torch {torch.__version__}.  Written by `make gpu`.\n\n## tests/gpu\n\n"
        f"```text\n{tests}\n```\n\n## Beside FSDP2\n\nA GPT of {shape.layers} blocks of {shape.width}, 4 sequences of "
        f"{shape.context} per rank, AdamW; medians, of the slowest rank.\n\n{head}\n" + "\n".join(rows) + "\n"
    )


def measure_all(device_type: str, num_ranks: int, shape: ModelShape, num_steps: int) -> list[str]:
    """Return the rows of all cases; one that fails says so in its row."""
    backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
    rows: list[str] = []
    with WorkerPool(num_ranks, CASE_LIMIT_S) as pool:
        for case in CASES:
            options = {"case": case, "shape": shape, "device_type": device_type, "num_steps": num_steps}
            try:
                rows += row_of(case, pool.run(measure, num_ranks=num_ranks, backend=backend, **options))
            except AssertionError as error:
                print(error, flush=True)
                rows.append(f"| {case} | failed: {str(error).strip().splitlines()[-1]} | | | | |")
            print(*rows[-2:], sep="\n", flush=True)
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on two ranks of the CPU, to see that it runs")
    parser.add_argument("--out", type=Path, default=ROOT / REPORT, help="the report (default: %(default)s)")
    asked = parser.parse_args(words)
    count = torch.accelerator.device_count()
    if not count and not asked.rehearse:
        print(NOTHING)
        return 0
    if asked.rehearse:
        where, tests, shape = "two ranks of a CPU (a rehearsal)", "not run", NONE
        rows = measure_all("cpu", 2, shape, 3)
    else:
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        where, shape = f"{count} x {torch.cuda.get_device_name(0)}", LARGE
        tests = run_tests()
        rows = measure_all(kind.type, count, shape, 12)
    asked.out.write_text(report_of(where, tests, rows, shape))
    print(f"report: {asked.out}")
    return int("failed" in tests or any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Everything that only a GPU can show, in one report (``make gpu``).

First the tests of ``tests/gpu``, then a GPT on every GPU of this host: the model alone, then sharded by us and by torch's
FSDP2, in turns.  Time of a step, time until the host is done with it (in brackets: with forward and backward), most memory,
and whether the losses agree.  At last a step of each is captured in a CUDA graph and replayed.  ``--rehearse`` does all of
it but the tests and the graphs on two ranks of the CPU, with a model of no size, to see that it runs.
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
TEST_LIMIT_S, CASE_LIMIT_S = 300, 80
LARGE = ModelShape(layers=24, width=1024, heads=16, context=512)
NONE = ModelShape(layers=2, width=32, heads=2, context=16)
CASES = ("fp32", "bf16", "bf16, parameters on the host")


ALONE, OURS, THEIRS = CONTENDERS = ("the model alone", "shardwise", "FSDP2")
CAPTURED = "bf16, a captured step"
NUM_FIRST, NUM_REPLAYS = 4, 20


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender in one case, on one rank: medians of seconds, bytes, and the losses."""

    step_s: float
    host_s: float
    passes_s: float  # of the host, for forward and backward
    peak_bytes: int
    losses: tuple[float, ...]


def build(case: str, shape: ModelShape, name: str, device: torch.device) -> Any:
    """Return the GPT; but for the model alone, every block and the rest are sharded."""
    torch.manual_seed(0)
    model = GPT(shape)
    is_offloaded = "host" in case
    if name == ALONE:
        return model.to(device, torch.bfloat16 if "bf16" in case else torch.float32)
    if not is_offloaded:
        model.to(device)
    door, precision, offload = _parts(name == OURS)
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


class Contender:
    """A model and its optimizer; its first steps, taken while it has the device for itself, show its memory."""

    def __init__(self, case: str, shape: ModelShape, name: str, device: torch.device) -> None:
        self.shape, self.device, self.on_gpu = shape, device, device.type != "cpu"
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        self.model = build(case, shape, name, device)
        options = {"capturable": True} if case == CAPTURED else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True, **options)
        self.times: list[tuple[float, float, float]] = []
        self.losses: list[float] = []
        for _ in range(NUM_FIRST):
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self.step()
        self.peak_bytes = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        self.times.clear()

    def tokens(self) -> torch.Tensor:
        seed = len(self.losses) * dist.get_world_size() + dist.get_rank()
        tokens = torch.randint(0, 256, (4, self.shape.context + 1), generator=torch.Generator().manual_seed(seed))
        return tokens.to(self.device)

    def passes(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1]).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        tokens = self.tokens()
        if self.on_gpu:
            torch.accelerator.synchronize()
        begin = time.perf_counter()
        loss = self.passes(tokens)
        passed = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        done = time.perf_counter()
        if self.on_gpu:
            torch.accelerator.synchronize()
        self.times.append((time.perf_counter() - begin, done - begin, passed - begin))
        self.losses.append(loss.item())

    def figures(self) -> Figures:
        step_s, host_s, passes_s = (statistics.median(each) for each in zip(*self.times, strict=True))
        return Figures(step_s, host_s, passes_s, self.peak_bytes, tuple(self.losses))


def device_of_rank(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, dist.get_rank() % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def measure(case: str, shape: ModelShape, device_type: str, num_steps: int) -> list[Figures]:
    """Run on every rank: step all contenders in turns; return the figures of each."""
    device = device_of_rank(device_type)
    contenders = [Contender(case, shape, name, device) for name in CONTENDERS]
    for _ in range(num_steps):
        for each in contenders:
            each.step()
    return [each.figures() for each in contenders]


def capture(shape: ModelShape, device_type: str, name: str) -> Figures:
    """Run on every rank: capture a step of one contender in a CUDA graph, and replay it over other tokens."""
    contender = Contender(CAPTURED, shape, name, device_of_rank(device_type))
    tokens, graph = contender.tokens(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may ask CUDA for their events
        loss = contender.passes(tokens)
        contender.optimizer.step()
        contender.optimizer.zero_grad()
    for _ in range(NUM_REPLAYS):
        tokens.copy_(contender.tokens())
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        done = time.perf_counter() - begin
        torch.cuda.synchronize()
        contender.times.append((time.perf_counter() - begin, done, done))
        contender.losses.append(loss.item())
    contender.peak_bytes = torch.cuda.max_memory_allocated()
    return contender.figures()


def run_tests() -> str:
    """Run ``tests/gpu``; return the last line of pytest."""
    words = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-m", "gpu", "tests/gpu"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TEST_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"tests/gpu did not end within {TEST_LIMIT_S} s"
    print(done.stdout[-4000:], flush=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([*failed, (done.stdout.strip().splitlines() or [done.stderr[-500:]])[-1]])


def row_of(case: str, name: str, ranks: Sequence[Figures], others: Sequence[Figures]) -> str:
    """Return the line of a contender: the slowest rank's times, the largest memory, how far losses are from others'."""
    apart = max(
        abs(a - b) for one, two in zip(ranks, others, strict=True) for a, b in zip(one.losses, two.losses, strict=True)
    )
    step_s, host_s, passes_s = (max(getattr(f, of) for f in ranks) for of in ("step_s", "host_s", "passes_s"))
    times = f"{1000 * step_s:.1f} | {1000 * host_s:.1f} ({1000 * passes_s:.1f})"
    return f"| {case} | {name} | {times} | {max(f.peak_bytes for f in ranks) / 2**20:.0f} | {apart:.2g} |"


def report_of(where: str, tests: str, rows: Sequence[str], shape: ModelShape) -> str:
    """Return the report as Markdown."""
    head = "| case | | step, ms | host, ms | peak, MiB | losses apart from FSDP2's by |\n|---|---|---:|---:|---:|---:|"
    return (
        f"# What a GPU shows\n\nOn {where}; torch {torch.__version__}.  Written by `make gpu`.\n\n## tests/gpu\n\n"
        f"```text\n{tests}\n```\n\n## Beside FSDP2\n\nA GPT of {shape.layers} blocks of {shape.width}, 4 sequences of "
        f"{shape.context} per rank, AdamW (fused); medians, of the slowest rank; in brackets the host's time for forward and "
        f"backward.\n\n{head}\n" + "\n".join(rows) + "\n"
    )


def _failed(case: str, error: AssertionError) -> str:
    print(error, flush=True)
    return f"| {case} | failed: {str(error).strip().splitlines()[-1]} | | | | |"


def measure_all(device_type: str, num_ranks: int, shape: ModelShape, num_steps: int) -> list[str]:
    """Return the rows of all cases; one that fails says so in its row."""
    backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
    options: dict[str, Any] = {"num_ranks": num_ranks, "backend": backend, "shape": shape, "device_type": device_type}
    rows: list[str] = []
    with WorkerPool(num_ranks, CASE_LIMIT_S) as pool:
        for case in CASES:
            try:
                ranks = pool.run(measure, case=case, num_steps=num_steps, **options)
                columns = list(zip(*ranks, strict=True))
                rows += [
                    row_of(case, name, column, columns[-1]) for name, column in zip(CONTENDERS, columns, strict=True)
                ]
            except AssertionError as error:
                rows.append(_failed(case, error))
            print(*rows[-len(CONTENDERS) :], sep="\n", flush=True)
        for name in CONTENDERS if device_type != "cpu" else ():
            try:  # in processes of its own: a capture that fails may leave CUDA unusable
                figures = pool.run(capture, name=name, fresh=True, **options)
                rows.append(row_of(CAPTURED, name, figures, figures))
            except AssertionError as error:
                rows.append(_failed(f"{CAPTURED}, {name}", error))
            print(rows[-1], flush=True)
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

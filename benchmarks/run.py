"""Run the benchmarks one after another and write benchmarks/results/ (``make bench``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results")  # seen from ROOT: commands are recorded, and name no place of one machine
# All contenders at once hold too much for a host of two cores, four times over.
AT_FOUR = (
    "local", "local + fused", "DDP + bucket view", "torch ZeRO + bucket view", "FSDP2", "FSDP2 + fused", "FSDP2 tuned",
    "shardwise reference",
    "shardwise full", "shardwise full + fused", "shardwise hybrid", "shardwise recommended", "shardwise recommended (gloo)",
    "shardwise replicate", "shardwise ZeRO-1 + fused", "shardwise ZeRO-2 + fused",
)  # fmt: skip


def list_jobs(out: Path) -> list[list[str]]:
    """Return the command lines after ``python``; results go to the folder ``out``."""
    bench = ["benchmarks/bench.py", "--backend", "gloo", "--out", str(out)]
    at_four = ["--ranks", "4", "--rounds", "5", "--no-memory", "--only", *AT_FOUR]
    return [
        ["benchmarks/host_cost.py", "--out", str(out / "host_cost.json")],
        ["benchmarks/checkpoint.py", "--out", str(out / "checkpoint_w2.json")],
        ["benchmarks/consolidate.py", "--out", str(out / "consolidate_w2.json")],
        ["benchmarks/optimizer_step.py", "--out", str(out / "optimizer_step_w2.json")],
        [*bench, "--shape", "wide", "--ranks", "2", "--rounds", "11"],
        [*bench, "--shape", "deep", "--ranks", "2", "--rounds", "11"],
        [*bench, "--shape", "wide", *at_four],
        [*bench, "--shape", "deep", *at_four],
    ]


def main() -> int:
    (ROOT / RESULTS).mkdir(exist_ok=True)
    for words in list_jobs(RESULTS):
        print(f"== {' '.join(words)}", flush=True)
        status = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())

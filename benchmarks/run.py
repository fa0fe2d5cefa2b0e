"""Run the benchmarks one after another and write benchmarks/results/*.json (``make bench``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
JOBS: tuple[tuple[str, ...], ...] = (
    ("optimizer_step.py", "--out", str(RESULTS / "optimizer_step_w2.json")),
    ("host_cost.py", "--out", str(RESULTS / "host_cost.json")),
    ("step.py", "--shape", "wide", "--ranks", "2", "--out", str(RESULTS / "step_wide_2.json")),
    ("step.py", "--shape", "deep", "--ranks", "2", "--rounds", "10", "--out", str(RESULTS / "step_deep_2.json")),
)


def main() -> int:
    RESULTS.mkdir(exist_ok=True)
    for script, *arguments in JOBS:
        print(f"== {script} {' '.join(a for a in arguments if not a.endswith('.json') and a != '--out')}", flush=True)
        status = subprocess.run([sys.executable, str(HERE / script), *arguments], check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())

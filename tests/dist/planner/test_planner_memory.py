"""What a plan says a rank holds and sends is what it does, to the byte or nearly."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from shardwise.testing import WorkerPool

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "plan_accuracy.py"
NAMES = ("full, tied",)  # the smallest; the benchmark has all


def held_on_rank(names: tuple[str, ...]) -> list[dict[str, Any]]:
    bench = runpy.run_path(str(BENCHMARK))
    return [bench["held_on_rank"](case) for case in bench["CASES"] if case.name in names]


def test_planned_peaks_are_measured_peaks(pool: WorkerPool) -> None:
    bench = runpy.run_path(str(BENCHMARK))
    cases = [case for case in bench["CASES"] if case.name in NAMES]
    found = pool.run(held_on_rank, num_ranks=2, names=NAMES)
    for number, case in enumerate(cases):
        measured = max(each[number]["peak"] for each in found)
        planned = bench["predict"](case, bench["profile_of"](case)).peak.total
        assert abs(planned / measured - 1) < 0.01, (case.name, planned, measured)

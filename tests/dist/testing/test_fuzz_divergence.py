"""A slice of the fuzzer's area ``divergence`` with fixed seeds, and its rules."""

from __future__ import annotations

from pathlib import Path

import fuzz.divergence
import pytest
from fuzz.divergence.area import DIVERGENCE
from fuzz.divergence.case import Case, draw, is_valid
from fuzz.divergence.program import alone

from shardwise.testing import WorkerPool

# Every kind of mesh and transport, prefetching, copies, a switch that goes on and off, Join, parameters sent one by one.
CHOSEN = {2: (0, 2, 4, 8, 16, 20, 21), 4: (10, 15)}
FOUND = Path(fuzz.divergence.__file__).with_name("found.txt")  # cases that failed once, one per line


@pytest.mark.parametrize("is_chosen", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_take_drawn_ways_train_as_one_process(pool: WorkerPool, num_ranks: int, is_chosen: bool) -> None:
    cases = [draw(seed, num_ranks) for seed in range(25) if (seed in CHOSEN[num_ranks]) == is_chosen]
    assert DIVERGENCE.failures_of(pool, cases) == [""] * len(cases)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_cases_that_failed_once_train_as_one_process(pool: WorkerPool, num_ranks: int) -> None:
    cases = [
        case for line in FOUND.read_text().splitlines() if (case := DIVERGENCE.from_json(line)).num_ranks == num_ranks
    ]
    assert cases
    assert DIVERGENCE.failures_of(pool, cases) == [""] * len(cases)


def test_drawn_cases_are_valid_and_text_holds_them() -> None:
    for seed in range(100):
        case = draw(seed, 4)
        assert is_valid(case), seed
        assert DIVERGENCE.from_json(DIVERGENCE.to_json(case)) == case


def test_smaller_cases_run() -> None:
    smaller = list(DIVERGENCE.candidates(draw(0, 2)))
    assert len(smaller) > 5
    for case in smaller[::3]:
        alone(case)


def test_cases_shrink_to_what_fails() -> None:
    def fails(case: Case) -> bool:
        return '"reentrant"' in DIVERGENCE.to_json(case)

    case = next(case for seed in range(100) if fails(case := draw(seed, 4)))
    small = DIVERGENCE.shrink(case, fails, 1000)
    assert sum(len(ways) for step in small.steps for ways in step.ranks) <= small.num_ranks
    assert len(small.steps) == len(small.layers) == 1

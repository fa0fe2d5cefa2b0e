"""A slice of the fuzzer with fixed seeds, and proof that it would see what it looks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.testing.fuzz import Runner, draw
from shardwise.testing.fuzz.areas import AREAS
from shardwise.testing.fuzz.render import render
from shardwise.testing.fuzz.selftest import find

SEEDS = range(3)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(limit_s=60.0) as ranks:
        yield ranks


@pytest.mark.parametrize("area", AREAS)
def test_drawn_programs_train_as_in_one_process(runner: Runner, area: str) -> None:
    for seed in SEEDS:
        case = draw(seed, area, max_ranks=2)
        failures = runner.run(case).failures
        assert not failures, f"{failures}\n{render(case)}"


@pytest.mark.parametrize("fault", ["gathers are stale", "the divisor is wrong"])
def test_planted_faults_are_found(fault: str) -> None:
    assert find(fault, 5, 2, print)

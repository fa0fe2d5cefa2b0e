"""A slice of the fuzzer's area ``reproducible`` with fixed seeds, and its rules."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fuzz.fixed_sums import REPRODUCIBLE, candidates, draw

from shardwise.testing import WorkerPool


@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    [(2, (0,)), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((2, (3,)), (4, (7,))))],
)
def test_drawn_programs_have_the_same_bits_at_all_numbers_of_ranks(
    pool: WorkerPool, num_ranks: int, seeds: Sequence[int]
) -> None:
    cases = [draw(seed, num_ranks) for seed in seeds]
    assert REPRODUCIBLE.failures_of(pool, cases) == [""] * len(cases)


def test_text_holds_cases_and_smaller_ones_are_drawn() -> None:
    for seed in range(50):
        case = draw(seed, 4)
        assert REPRODUCIBLE.from_json(REPRODUCIBLE.to_json(case)) == case
    small = REPRODUCIBLE.shrink(draw(0, 4), lambda each: True, 500)
    assert (len(small.steps), small.moves, small.drops) == (1, False, False)
    assert list(candidates(draw(1, 4)))

"""Choose fewer cases than the product of several axes has."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return cases of one value per axis, so that every two values of different axes meet in at least one case.

    The result is the same on every rank.  Two axes give their product.
    """
    values = [list(axis) for axis in axes]
    cases = list(itertools.product(*(range(len(each)) for each in values)))

    def pairs_of(case: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs_of, cases))
    chosen: list[tuple[int, ...]] = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(chosen[-1])
    return [tuple(axis[index] for axis, index in zip(values, case, strict=True)) for case in chosen]


def checkered(*axes: Iterable[Any], every: int = 2) -> list[Any]:
    """Return the product of ``axes`` as parameters, of which one of ``every`` in each direction is for ``make test``.

    The others are for ``make test-exhaustive``.  Of two axes, each value of one meets every ``every``-th of the other.
    """
    return [
        pytest.param(
            *(value for _, value in case), marks=[pytest.mark.exhaustive] * (sum(n for n, _ in case) % every > 0)
        )
        for case in itertools.product(*map(enumerate, axes))
    ]


def few(cases: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """Return ``cases`` as parameters; all but one of each ``every`` are for ``make test-exhaustive``."""
    return [pytest.param(*case, marks=[pytest.mark.exhaustive] * (n % every > 0)) for n, case in enumerate(cases)]

"""Strategies as a table: what is a row, and the memory and bytes that follow from each; the page tells the same."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest

from shardwise import ConfigError, Placements
from shardwise.fsdp.placements import STRATEGIES, row_of

PAGE = Path(__file__).parents[2] / "docs" / "apis.md"
SIZES = (3, 5)  # replicas and shards, which no product confuses
KINDS = ("parameter", "gradient", "optimizer")


def test_what_is_no_row_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"optimizer=\('sharded',\)\) is no strategy.*zero2: "):
        Placements(("replicated",), ("replicated",), ("sharded",))
    with pytest.raises(ConfigError, match="strategy is 'zero4', expected Placements or one of zero3, hsdp"):
        row_of("zero4")


# The collective that leads from one placement to another, and its cost in sizes of the tensor per rank, for many ranks.
MOVES: dict[tuple[str, str], int] = {
    ("partial", "replicated"): 2,  # all-reduce of a gradient that each rank has computed from its own batch
    ("partial", "sharded"): 1,  # reduce-scatter
    ("sharded", "replicated"): 1,  # all-gather
    ("owned", "replicated"): 1,  # broadcast
}


def _held(placements: Sequence[str], sizes: tuple[int, ...]) -> str:
    """Return the part of the whole that one rank holds on a mesh of these ``sizes``."""
    part = Fraction(1, prod(n for n, each in zip(sizes, placements, strict=True) if each != "replicated"))
    names = {Fraction(1): "full", Fraction(1, 3 * 5): "1/W", Fraction(1, 5): "1/shards"}
    return names[part] if len(sizes) == 2 else {Fraction(1): "full", Fraction(1, 5): "1/W"}[part]


def _cost(row: Placements, axis: int) -> int:
    """Return the cost of the collectives of a step along ``axis``."""
    state, kept = row.optimizer[axis], row.parameter[axis]
    reduced = MOVES["partial", row.gradient[axis]]
    if state == "replicated":
        return reduced
    return reduced + MOVES[state, "replicated"] * (1 if kept == "replicated" else 2)  # for forward and for backward


def _sends(row: Placements, sizes: tuple[int, ...]) -> str:
    inner = f"{_cost(row, len(sizes) - 1)} x"
    if len(sizes) == 1:
        return inner
    # Along the outer axis travels what the inner one has left of a tensor.
    outer = Fraction(_cost(row, 0), 1 if row.gradient[1] == "replicated" else sizes[1])
    return f"{inner} within a group, {outer * 5}/shards x between groups"


def test_the_page_has_the_memory_and_bytes_of_each_row() -> None:
    expected: dict[str, list[str]] = {}
    for name, row in STRATEGIES.items():
        sizes = SIZES[-len(row.optimizer) :]
        expected[name] = [*(_held(getattr(row, kind), sizes) for kind in KINDS), _sends(row, sizes)]
    rows = [line.split(" | ") for line in PAGE.read_text().split("\n") if line.startswith("| `")]
    assert {row[0].strip("|` "): [*row[2:5], row[5].rstrip("| ")] for row in rows} == expected

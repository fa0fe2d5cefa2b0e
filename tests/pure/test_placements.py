"""The memory and bytes that follow from where each strategy holds what; the page tells the same."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from helpers.strategies import STRATEGIES, Row, held, sent

from shardwise import ConfigError, Strategy

PAGE = Path(__file__).parents[2] / "docs" / "apis.md"
SIZES = (3, 5)  # replicas and shards, which no product confuses
KINDS = ("parameter", "gradient", "optimizer")


def test_what_is_no_strategy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="strategy is 'zero4', expected one of zero3, hsdp, hfsdp, zero2, zero1, ddp"):
        Strategy("zero4")


def test_every_strategy_is_in_the_table() -> None:
    assert [*STRATEGIES] == [each.value for each in Strategy]


def _of_axes(part: Fraction, sizes: tuple[int, ...]) -> str:
    names = {Fraction(1): "full", Fraction(1, 3 * 5): "1/W", Fraction(1, 5): "1/shards"}
    return names[part] if len(sizes) == 2 else {Fraction(1): "full", Fraction(1, 5): "1/W"}[part]


def _sends(row: Row, sizes: tuple[int, ...]) -> str:
    inner = f"{sent(row, len(sizes) - 1, sizes)} x"
    return inner if len(sizes) == 1 else f"{inner} within a group, {sent(row, 0, sizes) * 5}/shards x between groups"


def test_the_page_has_the_memory_and_bytes_of_each_row() -> None:
    expected: dict[str, list[str]] = {}
    for name, row in STRATEGIES.items():
        sizes = SIZES[-len(row.optimizer) :]
        expected[name] = [*(_of_axes(held(getattr(row, kind), sizes), sizes) for kind in KINDS), _sends(row, sizes)]
    rows = [line.split(" | ") for line in PAGE.read_text().split("\n") if line.startswith("| `")]
    assert {row[0].strip("|` "): [*row[2:5], row[5].rstrip("| ")] for row in rows} == expected

"""Which neighbouring blocks become one unit, and how their paths are written."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.grouping import Child, UnitRow, UnitTable, compress_paths, group_blocks, repeated_blocks


def blocks(sizes: list[int]) -> list[Child]:
    return [Child(f"blocks.{index}", "block", size) for index, size in enumerate(sizes)]


@st.composite
def families(draw: st.DrawFn) -> list[Child]:
    kinds = st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.booleans(), st.booleans())
    drawn = draw(st.lists(kinds, max_size=30))
    return [
        Child(
            f"m.{index}",
            signature,
            size,
            is_explicit=explicit and size % 3 == 0,
            can_be_unit=able or size % 4 > 0,
            kind={"a": None, "b": "listed", "c": "listed"}[signature],
        )
        for index, (signature, size, explicit, able) in enumerate(drawn)
    ]


@given(families(), st.integers(0, 120))
def test_every_new_block_is_in_one_group_and_order_is_kept(children: list[Child], least: int) -> None:
    groups = group_blocks(children, least)
    wanted = [child.path for child in repeated_blocks(children) if not child.is_explicit]
    assert [path for group in groups for path in group] == wanted
    assert all(groups)


@given(families(), st.integers(0, 120))
def test_no_group_crosses_an_explicit_unit_or_what_is_no_block(children: list[Child], least: int) -> None:
    position = {child.path: index for index, child in enumerate(children)}
    for group in group_blocks(children, least):
        first = position[group[0]]
        assert [position[path] for path in group] == list(range(first, first + len(group)))


@given(families(), st.integers(0, 120))
def test_groups_are_large_enough_unless_their_run_is_not(children: list[Child], least: int) -> None:
    size = {child.path: child.num_bytes for child in children}
    able = {child.path for child in repeated_blocks(children) if not child.is_explicit and child.num_bytes < least}
    runs = [
        tuple(child.path for child in run)
        for is_small, run in groupby(children, key=lambda child: child.path in able)
        if is_small
    ]
    for group in group_blocks(children, least):
        if sum(size[path] for path in group) < least:
            assert group in runs
        assert len(group) == 1 or all(size[path] < least for path in group)


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([""], ""),
        (["head"], "head"),
        ([f"blocks.{n}" for n in range(8)], "blocks.0-7"),
        (["h.9", "h.10", "h.12", "head", "layer1", "layer2"], "h.9-10, h.12, head, layer1-2"),
        (["h.1", "h.0"], "h.1, h.0"),
        (["h.01", "h.02"], "h.01, h.02"),
    ],
)
def test_compressed_paths_are_short(paths: list[str], text: str) -> None:
    assert compress_paths(paths) == text


def test_the_table_has_one_line_a_unit_and_says_when_there_is_but_one() -> None:
    root, merged = UnitRow("", 1, 100, 400, 1.0), UnitRow("blocks.0-7", 8, 500_000, 2_000_000, 1.25)
    lines = str(UnitTable((root, merged))).splitlines()
    assert [line.split()[0] for line in lines] == ["unit", "(root)", "blocks.0-7", "2"]
    assert lines[2].split() == ["blocks.0-7", "8", "500,000", "1.907", "MiB", "1.25"]
    assert lines[-1] == "2 units, 500,100 parameters, 1.908 MiB"
    assert len({len(line) for line in lines[:-1]}) == 1
    assert "route" not in lines[0]
    assert "no block is a unit of its own" in str(UnitTable((root,)))


def test_the_table_has_a_column_of_routes_once_one_is_known() -> None:
    known = UnitRow("", 1, 100, 400, 1.0, "shared memory"), UnitRow("head", 1, 10, 40, 1.0)
    lines = str(UnitTable(known)).splitlines()
    assert lines[0].split()[-1] == "route"
    assert lines[1].endswith("shared memory")
    assert lines[2].split()[-1] == "-"

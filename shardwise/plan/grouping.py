"""Choose which neighbouring blocks form one unit.  Pure; no function takes a rank, so all ranks choose the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.formatting import format_bytes

# ---- The units of a model as a printed table.

_HEADINGS = ("unit", "modules", "parameters", "bytes", "padding", "route")


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One unit.

    Attributes:
        name: paths of its modules in the model, compressed (``blocks.0-7``); "" is the model itself.
        num_modules: how many modules unshard together.
        numel: elements of its parameters, unsharded.
        num_bytes: bytes of these, in their stored dtypes.
        padding_ratio: elements that an all-gather moves divided by ``numel``; 1.0: no padding.
        route: how ranks exchange its parameters ("shared memory", "send/recv", "collectives"); "" while that is
            unknown, before the second forward, or if they do not.
    """

    name: str
    num_modules: int
    numel: int
    num_bytes: int
    padding_ratio: float
    route: str = ""


@dataclass(frozen=True, slots=True)
class UnitTable:
    """The units of a model in module order, the root unit first; ``str()`` is a table, with routes once any is known.

    ``ahead_bytes``: the limit for full parameters and staging, if units are prefetched by bytes and a step has run.
    """

    rows: tuple[UnitRow, ...]
    ahead_bytes: int | None = None

    def __str__(self) -> str:
        lines = [_HEADINGS, *(_cells(row) for row in self.rows)]
        if not any(row.route for row in self.rows):
            lines = [line[:-1] for line in lines]  # no route is known before the first step
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        text = [
            "  ".join(f"{cell:{'>' if column else '<'}{widths[column]}}" for column, cell in enumerate(line))
            for line in lines
        ]
        numel, num_bytes = sum(row.numel for row in self.rows), sum(row.num_bytes for row in self.rows)
        if len(self.rows) == 1:
            text.append("1 unit: no block is a unit of its own, so all parameters are gathered at once")
        else:
            text.append(f"{len(self.rows)} units, {numel:,} parameters, {format_bytes(num_bytes, 1024)}")
        if self.ahead_bytes is not None:
            text.append(f"gathered ahead within {format_bytes(self.ahead_bytes, 1024)}")
        return "\n".join(text)


def _cells(row: UnitRow) -> tuple[str, ...]:
    sizes = f"{row.num_modules}", f"{row.numel:,}", format_bytes(row.num_bytes, 1024), f"{row.padding_ratio:.2f}"
    return row.name or "(root)", *sizes, row.route or "-"


# ---- Compressed lists of module paths.

_NUMBERED = re.compile(r"(?P<stem>(?:.*[^0-9])?)(?P<number>0|[1-9][0-9]*)", re.DOTALL)


def compress_paths(paths: Sequence[str]) -> str:
    """Return ``paths`` as a list in which consecutive numbers form a range: ``blocks.0-7, head``.

    The empty path (the root) alone is the empty text.
    """
    if list(paths) == [""]:
        return ""
    parts: list[str] = []
    position = 0
    while position < len(paths):
        length = _count_up(paths, position)
        numbered = _split_number(paths[position])
        if length == 1 or numbered is None:
            parts.append(paths[position])
        else:
            stem, first = numbered
            parts.append(f"{stem}{first}-{first + length - 1}")
        position += length
    return ", ".join(parts)


def _count_up(paths: Sequence[str], start: int) -> int:
    """Return how many paths from ``start`` on differ only in their final number, which counts up by one."""
    numbered = _split_number(paths[start])
    if numbered is None:
        return 1
    stem, first = numbered
    length = 1
    while start + length < len(paths) and _split_number(paths[start + length]) == (stem, first + length):
        length += 1
    return length


def _split_number(path: str) -> tuple[str, int] | None:
    match = _NUMBERED.fullmatch(path)
    return None if match is None else (match["stem"], int(match["number"]))


DEFAULT_MIN_UNIT_BYTES = 3 * 2**19  # 1.5 MiB; for the reason see shardwise.shard_model


@dataclass(frozen=True, slots=True)
class Child:
    """A child module with parameters.

    Attributes:
        path: its path in the model.
        signature: equal for children of one class and parameter structure.
        num_bytes: its unsharded parameters, without those of other units.
        is_explicit: it is a unit already.
        can_be_unit: it may become one.
        kind: children of the kind of a repeated block are blocks too, alike or not; None: of no kind.
    """

    path: str
    signature: Hashable
    num_bytes: int = 0
    is_explicit: bool = False
    can_be_unit: bool = True
    kind: Hashable | None = None


def repeated_blocks(children: Sequence[Child]) -> tuple[Child, ...]:
    """Return the repeated blocks among the children of one module: two or more of one signature, and others of their kind.

    Explicit units count as repetitions, so that the user may have sharded one of two blocks.
    """
    able = [child for child in children if child.can_be_unit]
    repetitions = Counter(child.signature for child in able)
    kinds = {child.kind for child in able if repetitions[child.signature] > 1} - {None}
    return tuple(child for child in able if repetitions[child.signature] > 1 or child.kind in kinds)


def group_blocks(children: Sequence[Child], min_unit_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Return the paths of the blocks among the children of one module, one tuple for each new unit, in their order.

    A block of at least ``min_unit_bytes`` is a unit by itself.  Smaller neighbours are merged into units of at least
    that size: as many units as possible, with equally many blocks if that suffices.  A run of neighbours that is
    smaller in total is one unit. Explicit units, large blocks and children that are not blocks end a run.
    """
    blocks = {child.path for child in repeated_blocks(children)}
    groups: list[tuple[str, ...]] = []
    run: list[Child] = []
    for child in children:
        if child.path in blocks and not child.is_explicit and child.num_bytes < min_unit_bytes:
            run.append(child)
            continue
        groups += _cut(run, min_unit_bytes)
        run = []
        if child.path in blocks and not child.is_explicit:
            groups.append((child.path,))
    return (*groups, *_cut(run, min_unit_bytes))


def _cut(run: Sequence[Child], min_unit_bytes: int) -> Iterator[tuple[str, ...]]:
    if not run:
        return
    sizes = [child.num_bytes for child in run]
    lengths = _greedy_lengths(sizes, min_unit_bytes)
    equal = _equal_lengths(len(sizes), len(lengths))
    start = 0
    for length in equal if _is_enough(sizes, equal, min_unit_bytes) else lengths:
        yield tuple(child.path for child in run[start : start + length])
        start += length


def _greedy_lengths(sizes: Sequence[int], min_unit_bytes: int) -> list[int]:
    """Return the lengths of groups that end as soon as they are large enough; the rest joins the last group."""
    lengths: list[int] = []
    length = num_bytes = 0
    for size in sizes:
        length, num_bytes = length + 1, num_bytes + size
        if num_bytes >= min_unit_bytes:
            lengths.append(length)
            length = num_bytes = 0
    if not lengths:
        return [length]
    lengths[-1] += length
    return lengths


def _equal_lengths(count: int, num_groups: int) -> list[int]:
    each, rest = divmod(count, num_groups)
    return [each + 1] * rest + [each] * (num_groups - rest)


def _is_enough(sizes: Sequence[int], lengths: Sequence[int], min_unit_bytes: int) -> bool:
    start = 0
    for length in lengths:
        if sum(sizes[start : start + length]) < min_unit_bytes:
            return False
        start += length
    return True

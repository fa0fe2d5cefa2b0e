"""Choose which neighbouring blocks form one unit, and print units.  No function takes a rank: all ranks choose alike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

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
        route: how ranks exchange its parameters ("shared memory", "collectives"); "" if they do not.
    """

    name: str
    num_modules: int
    numel: int
    num_bytes: int
    padding_ratio: float
    route: str = ""


@dataclass(frozen=True, slots=True)
class UnitTable:
    """The units of a model in module order, the root unit first; ``str()`` is a table, with routes once any is known."""

    rows: tuple[UnitRow, ...]

    def __str__(self) -> str:
        lines = [_HEADINGS, *(_cells(row) for row in self.rows)]
        if not any(row.route for row in self.rows):
            lines = [line[:-1] for line in lines]  # no route is known before the first step
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        rows = [[f"{cell:{'>' if at else '<'}{widths[at]}}" for at, cell in enumerate(line)] for line in lines]
        numel, num_bytes = sum(row.numel for row in self.rows), sum(row.num_bytes for row in self.rows)
        end = f"{len(self.rows)} units, {numel:,} parameters, {format_bytes(num_bytes)}"
        if len(self.rows) == 1:
            end = "1 unit: no block is a unit of its own, so all parameters are gathered at once"
        return "\n".join([*map("  ".join, rows), end])


def _cells(row: UnitRow) -> tuple[str, ...]:
    sizes = f"{row.num_modules}", f"{row.numel:,}", format_bytes(row.num_bytes), f"{row.padding_ratio:.2f}"
    return row.name or "(root)", *sizes, row.route or "-"


# ---- Compressed lists of module paths.

_NUMBERED = re.compile(r"(?P<stem>(?:.*[^0-9])?)(?P<number>0|[1-9][0-9]*)", re.DOTALL)


def compress_paths(paths: Sequence[str]) -> str:
    """Return ``paths`` as a list in which consecutive numbers form a range: ``blocks.0-7, head``.

    The empty path (the root) alone is the empty text.
    """
    runs: list[tuple[str, str]] = []  # a first path, and the number of the last one
    following = None
    for path in paths:
        match = _NUMBERED.fullmatch(path)
        if match is not None and path == following:
            runs[-1] = runs[-1][0], match["number"]
        else:
            runs.append((path, ""))
        following = None if match is None else f"{match['stem']}{int(match['number']) + 1}"
    return ", ".join(f"{first}-{last}" if last else first for first, last in runs)


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
    blocks = {child.path for child in repeated_blocks(children) if not child.is_explicit}
    groups: list[tuple[str, ...]] = []
    for is_small, alike in groupby(children, lambda each: each.path in blocks and each.num_bytes < min_unit_bytes):
        run = [*alike]
        groups += _cut(run, min_unit_bytes) if is_small else [(each.path,) for each in run if each.path in blocks]
    return tuple(groups)


def _cut(run: Sequence[Child], min_unit_bytes: int) -> list[tuple[str, ...]]:
    """Return the paths of each unit: of equally many blocks if that suffices, else each ends as soon as it is large enough."""
    ends, num_bytes = [0], 0
    for end, child in enumerate(run, 1):
        num_bytes += child.num_bytes
        if num_bytes >= min_unit_bytes:
            ends.append(end)
            num_bytes = 0
    count = max(1, len(ends) - 1)
    ends = [*ends[:count], len(run)]  # the rest joins the last unit
    equal = [-(-len(run) * part // count) for part in range(count + 1)]
    is_enough = all(sum(child.num_bytes for child in run[a:b]) >= min_unit_bytes for a, b in pairwise(equal))
    return [tuple(child.path for child in run[a:b]) for a, b in pairwise(equal if is_enough else ends) if b > a]

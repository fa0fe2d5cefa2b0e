"""Who writes which part of which tensor, and which bytes of a part somebody needs.  Pure arithmetic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardwise.errors import CheckpointError

SMALL_BYTES = 64 * 2**10  # a replicated tensor below is the lowest rank's: counters and statistics stay together

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8, "C128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A rectangular part of a tensor: where it starts and how large it is, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def meet(self, other: Window) -> Window | None:
        """Return what both cover, None if that has no elements.

        Example:
            >>> Window((0, 0), (4, 3)).meet(Window((2, 0), (4, 3)))
            Window(offsets=(2, 0), sizes=(2, 3))
        """
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = [
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Window(starts, sizes) if all(size > 0 for size in sizes) else None


def whole(shape: Sequence[int]) -> Window:
    """Return the window that is all of a tensor."""
    return Window((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a tensor of ``shape``; ``is_lowest``: the lowest rank with the tensor writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    windows: tuple[Window, ...]
    is_lowest: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """One part of a tensor and the rank that writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    window: Window
    rank: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.window.numel * DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """What the part is called in its file: the tensor's name, with the place of the part if it is not all."""
        if self.window == whole(self.shape):
            return self.name
        return f"{self.name}@{','.join(map(str, self.window.offsets))}"


def held_to_text(held: Iterable[Held]) -> str:
    """Return what a rank holds as text, for the other ranks."""
    rows = [[h.name, h.dtype, h.shape, [[w.offsets, w.sizes] for w in h.windows], h.is_lowest] for h in held]
    return json.dumps(rows, separators=(",", ":"))


def held_from_text(text: str) -> list[Held]:
    """Return what :func:`held_to_text` wrote."""
    rows: list[Any] = json.loads(text)
    return [
        Held(name, dtype, tuple(shape), tuple(Window(tuple(o), tuple(s)) for o, s in windows), is_lowest)
        for name, dtype, shape, windows, is_lowest in rows
    ]


def share_out(held_by_rank: Sequence[Sequence[Held]]) -> tuple[Write, ...]:
    """Return who writes what: each part of each tensor once, the parts that several ranks hold shared out by bytes.

    The same on every rank, in the order in which files hold them: dtypes by size, so that all are aligned, then names.
    Cost: O(n log n) in the parts of all ranks.
    Raises: CheckpointError if ranks disagree about a tensor, or what they hold does not make it up.

    Example:
        >>> pair = [Held("a", "F32", (2,), (whole((2,)),))]
        >>> [write.rank for write in share_out([pair, pair])]
        [0]
    """
    holders: dict[str, dict[Window, list[int]]] = {}
    first: dict[str, tuple[int, Held]] = {}
    for rank, rows in enumerate(held_by_rank):
        for held in rows:
            known_rank, known = first.setdefault(held.name, (rank, held))
            if (known.dtype, known.shape) != (held.dtype, held.shape):
                raise CheckpointError(
                    f"{held.name}: rank {known_rank} has {known.dtype} {list(known.shape)}, rank {rank} {held.dtype} "
                    f"{list(held.shape)}; every rank must save the same state"
                )
            for window in held.windows:
                if window.numel or not prod(held.shape):
                    holders.setdefault(held.name, {}).setdefault(window, []).append(rank)
    loads = [0] * len(held_by_rank)
    writes: list[Write] = []
    shared: list[tuple[Held, Window, list[int]]] = []
    for name, (_, held) in first.items():
        windows = holders.get(name, {})
        _check_tiles(held, windows)
        for window, ranks in windows.items():
            num_bytes = window.numel * DTYPE_BYTES[held.dtype]
            if len(ranks) == 1 or num_bytes < SMALL_BYTES or held.is_lowest:
                writes.append(Write(name, held.dtype, held.shape, window, ranks[0]))
                loads[ranks[0]] += num_bytes
            else:
                shared.append((held, window, ranks))
    for held, window, ranks in sorted(shared, key=lambda item: (-item[1].numel * DTYPE_BYTES[item[0].dtype],)):
        rank = min(ranks, key=lambda each: (loads[each], each))
        writes.append(Write(held.name, held.dtype, held.shape, window, rank))
        loads[rank] += writes[-1].num_bytes
    return tuple(sorted(writes, key=lambda w: (-DTYPE_BYTES[w.dtype], w.name, w.window)))


def _check_tiles(held: Held, windows: Iterable[Window]) -> None:
    found = sorted(windows)
    numel = sum(window.numel for window in found)
    if numel != prod(held.shape) or overlapping(found) is not None or not found:
        raise CheckpointError(
            f"{held.name}: the ranks hold {numel} of its {prod(held.shape)} elements in {len(found)} part(s) that do not make "
            "up the tensor; save from all ranks of its mesh, with the group that they form"
        )


def overlapping(windows: Sequence[Window]) -> tuple[Window, Window] | None:
    """Return two of the sorted ``windows`` that have elements in common, None if there are none."""
    open_: list[Window] = []
    for window in windows:
        if window.offsets:
            open_ = [other for other in open_ if other.offsets[0] + other.sizes[0] > window.offsets[0]]
        clash = next((other for other in open_ if window.numel and other.meet(window)), None)
        if clash is not None:
            return clash, window
        open_.append(window)
    return None


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``begin:end`` of a part, row-major, and where their elements lie.

    ``sizes`` of the hull starting at ``offsets`` of the part; the wanted ones are ``wanted``, relative to the tensor.
    """

    begin: int
    end: int
    hull: Window
    wanted: Window

    @property
    def is_exact(self) -> bool:
        """True if all of the bytes are wanted."""
        return self.hull.numel == self.wanted.numel


def runs_of(part: Window, wanted: Window, itemsize: int, most_bytes: int) -> list[ByteRange]:
    """Return the byte ranges of ``part`` to read for ``wanted``, a window within it, in ascending order.

    Ranges hold rows of the part whole where those take up to ``most_bytes``, since files are read in blocks anyway; longer
    rows are cut.

    Example:
        >>> [(run.begin, run.end) for run in runs_of(whole((4, 3)), Window((1, 0), (2, 3)), 4, 1024)]
        [(12, 36)]
    """
    dims = len(part.sizes)
    starts = [w - p for w, p in zip(wanted.offsets, part.offsets, strict=True)]
    strides = [itemsize * prod(part.sizes[dim + 1 :]) for dim in range(dims)]
    found: list[ByteRange] = []

    def is_full(dim: int) -> bool:
        return all(wanted.sizes[d] == part.sizes[d] for d in range(dim, dims))

    def add(place: list[int], dim: int, first: int, count: int, base: int) -> None:
        offsets = (*place, part.offsets[dim] + first, *part.offsets[dim + 1 :])
        hull = Window(offsets, (*(1 for _ in place), count, *part.sizes[dim + 1 :]))
        inner = (*place, part.offsets[dim] + first, *wanted.offsets[dim + 1 :])
        window = Window(inner, (*(1 for _ in place), count, *wanted.sizes[dim + 1 :]))
        begin = base + first * strides[dim]
        found.append(ByteRange(begin, begin + count * strides[dim], hull, window))

    def walk(place: list[int], dim: int, base: int) -> None:
        first, count = starts[dim], wanted.sizes[dim]
        if is_full(dim + 1):
            add(place, dim, first, count, base)
        elif strides[dim] <= most_bytes:
            each = max(1, most_bytes // strides[dim])
            for row in range(first, first + count, each):
                add(place, dim, row, min(each, first + count - row), base)
        else:
            for row in range(first, first + count):
                walk([*place, part.offsets[dim] + row], dim + 1, base + row * strides[dim])

    if not dims:
        return [ByteRange(0, itemsize, part, wanted)]
    walk([], 0, 0)
    return found

"""Elements to owner ranks, the same number each: for optimizers that treat every element alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from shardwise.errors import ConfigError
from shardwise.layout.owners import OwnedSlice

ALIGNMENT_NUMEL = 64  # one cache line of the smallest dtype, 256 bytes of float32

RUN_NUMEL = 1 << 20  # 4 MiB of float32: what travels at once
RUN_NUMEL_PER_RANK = (
    1 << 17
)  # with very many ranks more, so that what each of them owns of a run is a message by itself


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: ``offsets`` and ``sizes`` per dim, and where it starts in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


def even_ranges(numel: int, num_ranks: int, block: int = ALIGNMENT_NUMEL, loads: Sequence[int] = ()) -> list[range]:
    """Cut ``range(numel)`` into one range per rank (indexed by rank) at multiples of ``block``.

    Ranks that own fewer elements so far (``loads``) get the remainder, so the totals stay within one block of each
    other however many spaces are cut one after the other.  The ranges tile the space; the rank that takes the last,
    incomplete block comes last, the others lie in rank order.  Cost: O(W log W).
    Raises: ConfigError if ``num_ranks`` or ``block`` is below 1.
    Example:
        >>> even_ranges(10, 3, block=2)
        [range(0, 4), range(4, 8), range(8, 10)]
    """
    if num_ranks < 1 or block < 1:
        raise ConfigError(f"num_ranks is {num_ranks} and block is {block}, expected at least 1")
    base, extra = divmod(numel // block, num_ranks)
    tail = numel % block
    totals = list(loads) if loads else [0] * num_ranks
    counts = [base * block] * num_ranks
    poorest = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
    for rank in poorest[:extra]:
        counts[rank] += block
    order = list(range(num_ranks))
    if tail:
        last = min(range(num_ranks), key=lambda rank: (totals[rank] + counts[rank], rank))
        counts[last] += tail
        order = [rank for rank in order if rank != last] + [last]
    ranges = [range(0)] * num_ranks
    start = 0
    for rank in order:
        ranges[rank] = range(start, start + counts[rank])
        start += counts[rank]
    return ranges


def even_pieces(
    numels: Sequence[int], num_ranks: int, loads: Sequence[int] = (), block: int = ALIGNMENT_NUMEL
) -> tuple[OwnedSlice, ...]:
    """Lay the tensors end to end, cut with :func:`even_ranges`, and return the pieces in that order.

    A tensor without elements is one empty piece of the rank that owns the place where it lies, so that its (empty)
    state has a home too.
    Example:
        >>> [(p.tensor, p.owner, p.start, p.stop) for p in even_pieces([3, 3], 2, block=1)]
        [(0, 0, 0, 3), (1, 1, 0, 3)]
    """
    cuts = even_ranges(sum(numels), num_ranks, block, loads)
    by_start = sorted((cut.start, cut.stop, rank) for rank, cut in enumerate(cuts) if len(cut))
    pieces: list[OwnedSlice] = []
    at = 0
    for index, end in enumerate(accumulate(numels)):
        begin = end - numels[index]
        if begin == end:
            pieces.append(OwnedSlice(index, by_start[at][2] if by_start else 0, 0, 0))
        while begin < end:
            _, stop, rank = by_start[at]
            upto = min(end, stop)
            pieces.append(OwnedSlice(index, rank, begin - end + numels[index], upto - end + numels[index]))
            begin = upto
            if upto == stop and at + 1 < len(by_start):
                at += 1
    return tuple(pieces)


def runs_of(numels: Sequence[int], num_ranks: int) -> list[range]:
    """Cut tensors, in their order, into runs of whole tensors that have about as many elements as should travel at once.

    A rest of less than half a run belongs to the last one.
    Example:
        >>> runs_of([1 << 19] * 5, 2)
        [range(0, 2), range(2, 5)]
    """
    least = max(RUN_NUMEL, RUN_NUMEL_PER_RANK * num_ranks)
    starts, held = [0], 0
    for index, numel in enumerate(numels):
        if held >= least:
            starts.append(index)
            held = 0
        held += numel
    if len(starts) > 1 and held <= least // 2:
        starts.pop()
    stops = [*starts[1:], len(numels)]
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]


def boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cut elements ``start:stop`` (row-major) of a tensor into at most ``2 * len(shape) - 1`` rectangular boxes.

    Checkpoints store boxes, not ranges.  The boxes come in element order and tile the range once.
    Example:
        >>> [(b.offsets, b.sizes) for b in boxes((3, 4), 2, 11)]
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
    """
    if not shape:
        return (Box((), (), 0),) if stop > start else ()
    row = prod(shape[1:])
    found: list[Box] = []
    while start < stop:
        first = start // row
        if start % row == 0 and stop - start >= row:
            rows = (stop - start) // row
            found.append(Box((first, *[0] * (len(shape) - 1)), (rows, *shape[1:]), start))
            start += rows * row
            continue
        upto = min(stop, (first + 1) * row)
        for inner in boxes(shape[1:], start - first * row, upto - first * row):
            found.append(Box((first, *inner.offsets), (1, *inner.sizes), first * row + inner.start))
        start = upto
    return tuple(found)

"""How one tensor is cut over the ranks of a shard axis, in closed form.

Source: ZeRO, arXiv 1910.02054, section 5.3; the cut is ``torch.chunk``'s, so it agrees with DTensor's ``Shard(dim)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import LayoutError


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a gap-free row-major tensor of ``shape``, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Move:
    """One strided copy between a full tensor and a packed buffer; all numbers count elements.

    ``shape`` is common to both sides.  ``full_*`` address the full tensor (row-major, offset 0 at its first element),
    ``packed_*`` the whole packed buffer of ``num_shards`` equal sections.
    """

    shape: tuple[int, ...]
    full_stride: tuple[int, ...]
    full_offset: int
    packed_stride: tuple[int, ...]
    packed_offset: int


@dataclass(frozen=True, slots=True)
class ChunkShard:
    """A tensor of ``shape`` cut along ``dim`` into ``num_shards`` shards like ``torch.chunk``.

    Every shard but the last ones has ``ceil(shape[dim] / num_shards)`` rows of ``dim``; late ones may be shorter or empty.
    A scalar cannot be cut: every rank holds all of it (``is_whole``).
    """

    shape: tuple[int, ...]
    dim: int
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise LayoutError(f"num_shards is {self.num_shards}; expected at least 1")
        if self.shape and not 0 <= self.dim < len(self.shape):
            raise LayoutError(
                f"dim {self.dim} is outside a tensor of shape {self.shape}; expected 0..{len(self.shape) - 1}"
            )

    @property
    def is_whole(self) -> bool:
        """True for a scalar: each rank holds the tensor itself."""
        return not self.shape

    @property
    def outer(self) -> int:
        """Product of the dims before ``dim``."""
        return math.prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        """Product of the dims after ``dim``."""
        return math.prod(self.shape[self.dim + 1 :])

    @property
    def size(self) -> int:
        """Length of ``dim`` (1 for a scalar)."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def chunk(self) -> int:
        """Rows of a full shard."""
        return -(-self.size // self.num_shards) if self.shape else 1

    @property
    def num_holders(self) -> int:
        """The number of ranks whose shard is not empty; these are the first ranks."""
        return self.num_shards if self.is_whole else -(-self.size // self.chunk) if self.numel else 0

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def section_numel(self) -> int:
        """Elements that one rank's section of a packed buffer sets aside: a full shard, padding included."""
        return self.outer * self.chunk * self.inner

    @property
    def has_padding(self) -> bool:
        """True when some section is larger than the shard in it."""
        return not self.is_whole and self.chunk * self.num_shards != self.size

    def rows(self, rank: int) -> range:
        """Return the rows of ``dim`` that ``rank`` holds; empty when there are fewer rows than ranks.

        Cost: O(1), any number of ranks.  Raises: LayoutError if ``rank`` is outside [0, num_shards).
        """
        if not 0 <= rank < self.num_shards:
            raise LayoutError(f"rank {rank} is outside 0..{self.num_shards - 1}")
        if self.is_whole:
            return range(1)
        start = min(rank * self.chunk, self.size)
        return range(start, min(start + self.chunk, self.size))

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s shard; ``dim`` has length 0 when it is empty."""
        if self.is_whole:
            return ()
        return (*self.shape[: self.dim], len(self.rows(rank)), *self.shape[self.dim + 1 :])

    def shard_numel(self, rank: int) -> int:
        """Return the elements of ``rank``'s shard."""
        return math.prod(self.shard_shape(rank))

    def moves(self, offset: int, section_stride: int, *, into_full: bool) -> tuple[Move, ...]:
        """Return the copies between the full tensor and its places in every section: at most two for any number of ranks.

        The shard of rank ``r`` starts ``r * section_stride + offset`` elements into the packed buffer, row-major and
        without gaps.  The first move carries all full shards, the second the one short shard.  ``into_full`` says which
        way: it matters for a scalar alone, which is read from one section but written to all.
        """
        if self.numel == 0:
            return ()
        if self.is_whole:
            return (Move((1 if into_full else self.num_shards,), (0,), 0, (section_stride,), offset),)
        num_full, rest = divmod(self.size, self.chunk)
        row = self.inner
        moves: list[Move] = []
        if num_full:
            moves.append(self._move(num_full, self.chunk, 0, offset, section_stride))
        if rest:
            start = num_full * self.chunk * row
            moves.append(self._move(1, rest, start, num_full * section_stride + offset, section_stride))
        return tuple(moves)

    def part(self, rank: int, offset: int) -> Move:
        """Return the copy between the full tensor and ``rank``'s shard, which starts ``offset`` elements into its section.

        Unlike in :meth:`moves`, ``packed_*`` address one section.  Shards of dim 0 are 1-D: contiguous on both sides.
        """
        rows = len(self.rows(rank)) if not self.is_whole else 1
        block = rows * self.inner
        start = self.rows(rank).start * self.inner if rows and not self.is_whole else 0
        if self.outer == 1:
            return Move((block,), (1,), start, (1,), offset)
        return Move((self.outer, block), (self.size * self.inner, 1), start, (block, 1), offset)

    def _move(self, shards: int, rows: int, full_offset: int, packed_offset: int, section_stride: int) -> Move:
        block = rows * self.inner
        if self.outer == 1:
            return Move((shards, block), (block, 1), full_offset, (section_stride, 1), packed_offset)
        return Move(
            (self.outer, shards, block),
            (self.size * self.inner, block, 1),
            full_offset,
            (block, section_stride, 1),
            packed_offset,
        )

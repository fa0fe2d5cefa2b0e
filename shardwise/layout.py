"""How one tensor is cut over the ranks of a shard axis, in closed form.

Source: ZeRO, arXiv 1910.02054, section 5.3; the cut equals ``torch.chunk``'s, and so DTensor's ``Shard(dim)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

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


@dataclass(frozen=True)
class ChunkShard:
    """A tensor of ``shape`` cut along ``dim`` into ``num_shards`` shards like ``torch.chunk``.

    A full shard has ``ceil(shape[dim] / num_shards)`` rows of ``dim``; the last shards may be shorter or empty. A
    scalar cannot be cut: every rank has it (``is_whole``).
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

    @cached_property
    def is_whole(self) -> bool:
        """True for a scalar: each rank has the tensor itself."""
        return not self.shape

    @cached_property
    def outer(self) -> int:
        """Product of the dims before ``dim``."""
        return math.prod(self.shape[: self.dim])

    @cached_property
    def inner(self) -> int:
        """Product of the dims after ``dim``."""
        return math.prod(self.shape[self.dim + 1 :])

    @cached_property
    def size(self) -> int:
        """Length of ``dim`` (1 for a scalar)."""
        return self.shape[self.dim] if self.shape else 1

    @cached_property
    def chunk(self) -> int:
        """Rows of a full shard."""
        return -(-self.size // self.num_shards) if self.shape else 1

    @cached_property
    def num_holders(self) -> int:
        """The number of ranks whose shard is not empty; these are the first ranks."""
        return self.num_shards if self.is_whole else -(-self.size // self.chunk) if self.numel else 0

    @cached_property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @cached_property
    def section_numel(self) -> int:
        """Elements of one rank's section of a packed buffer: a full shard, padding included."""
        return self.outer * self.chunk * self.inner

    @cached_property
    def has_padding(self) -> bool:
        """True if some section is larger than its shard."""
        return not self.is_whole and self.chunk * self.num_shards != self.size

    def rows(self, rank: int) -> range:
        """Return the rows of ``dim`` in the shard of ``rank``; empty for late ranks if there are fewer rows than ranks.

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
        without gaps.  The first move copies all full shards, the second the one short shard.  ``into_full`` is the
        direction; it matters only for a scalar, which is read from one section but written to all.
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

        Unlike in :meth:`moves`, ``packed_*`` address one section.  Shards along dim 0 are 1-D: contiguous on both
        sides.
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


# Equal cuts are one object, whose numbers are computed once: a model has many tensors of few shapes.
cut_of = lru_cache(maxsize=4096)(ChunkShard)


# ---- Many tensors of one dtype in one flat buffer: the offset of each.

LARGE_NUMEL = 16_384  # a shard of this many elements is worth a part of its own


def batches(sizes: Sequence[int], most: int) -> list[range]:
    """Return consecutive ranges of indices; their ``sizes`` sum to ``most`` or less, except where one alone is larger.

    Example:
        >>> batches([3, 4, 9, 1], 8)
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    starts, total = [0] if sizes else list[int](), 0
    for index, size in enumerate(sizes):
        total += size
        if total > most and index > starts[-1]:
            starts.append(index)
            total = size
    return [range(start, stop) for start, stop in pairwise([*starts, len(sizes)])]


def align(numel: int, alignment: int) -> int:
    """Return ``numel`` rounded up to a multiple of ``alignment``."""
    return -(-numel // alignment) * alignment


@dataclass(frozen=True)
class Bucket:
    """The layout of tensors in one collective: ``num_shards`` equal sections, each with one shard of every tensor.

    Attributes:
        shards: how each tensor is cut.
        offsets: elements from the start of a section to the shard of each tensor.
        section_numel: elements of one section, padding included.
        full_offsets: elements from the start of the unsharded buffer to each full tensor.
        full_numel: elements of the unsharded buffer; padding included if :attr:`is_one_tensor`.
    """

    shards: tuple[ChunkShard, ...]
    offsets: tuple[int, ...]
    section_numel: int
    full_offsets: tuple[int, ...]
    full_numel: int

    @cached_property
    def has_padding(self) -> bool:
        """True when a packed buffer has elements that no tensor owns."""
        return any(shard.has_padding for shard in self.shards) or self.section_numel != sum(
            shard.section_numel for shard in self.shards
        )

    @cached_property
    def num_even(self) -> int:
        """Number of leading sections that consist of dim-0 rows of all tensors, equally many each, without gaps; or 0.

        All other sections are then padding: a few rows were cut for many ranks.  A packed buffer viewed as (num_shards,
        section_numel) then has in its first ``num_even`` rows each tensor, viewed as (num_even, -1), as columns.
        """
        if self.section_numel != sum(shard.section_numel for shard in self.shards) or not self.section_numel:
            return 0
        if any(shard.is_whole or shard.outer != 1 or shard.size % max(shard.chunk, 1) for shard in self.shards):
            return 0
        found = {shard.size // max(shard.chunk, 1) for shard in self.shards}
        return found.pop() if len(found) == 1 else 0

    @cached_property
    def are_rows(self) -> bool:
        """True if every tensor is cut along dimension 0; rows of :attr:`num_even` may also follow dimensions of size one."""
        return all(shard.dim == 0 for shard in self.shards)

    @cached_property
    def is_one_tensor(self) -> bool:
        """True if a packed buffer is the full tensor, then padding of less than one shard: gathering it copies nothing.

        One tensor, whose shards are adjacent in memory and not empty.  With several, the shards of one lie a section apart.
        """
        if len(self.shards) != 1 or self.section_numel != self.shards[0].section_numel:
            return False
        shard = self.shards[0]
        return shard.outer == 1 and not shard.is_whole and shard.num_holders == shard.num_shards

    @cached_property
    def num_large(self) -> int:
        """Number of large shards at the start of a section: all of them if :func:`by_size` has put them first."""
        count = 0
        while count < len(self.shards) and self.shards[count].section_numel >= LARGE_NUMEL:
            count += 1
        return count

    @cached_property
    def tail_start(self) -> int:
        """Elements from the start of a section to its tail: everything after the large shards."""
        large = self.num_large
        return self.offsets[large] if large < len(self.offsets) else self.section_numel

    def parts(self, rank: int) -> tuple[Move, ...]:
        """Return, for every tensor, the copy between it and ``rank``'s section; full offsets count from its own start."""
        return tuple(shard.part(rank, offset) for shard, offset in zip(self.shards, self.offsets, strict=True))

    def moves(
        self, index: int, *, into_full: bool, section_offset: int = 0, section_stride: int | None = None
    ) -> tuple[Move, ...]:
        """Return the copies of tensor ``index`` between its full form and a packed buffer.

        ``section_offset``: where this bucket starts in a section.  ``section_stride``: elements from one section to the
        next.  They differ from 0 and ``section_numel`` if several buckets share a packed buffer.
        """
        stride = self.section_numel if section_stride is None else section_stride
        return self.shards[index].moves(section_offset + self.offsets[index], stride, into_full=into_full)


def by_size(shards: Sequence[ChunkShard]) -> list[int]:
    """Return the indices of ``shards``, large ones first and otherwise in order, so that the small ones form one block."""
    return sorted(range(len(shards)), key=lambda index: shards[index].section_numel < LARGE_NUMEL)


def build_bucket(shards: Sequence[ChunkShard], alignment: int = 1, full_alignment: int = 1) -> Bucket:
    """Lay ``shards`` out one after another.

    Args:
        shards: the tensors in layout order, all with the same ``num_shards``.
        alignment: every shard starts at a multiple of this many elements in its section.
        full_alignment: the same for the full tensors in the unsharded buffer.
    """
    offsets: list[int] = []
    full_offsets: list[int] = []
    section_numel = full_numel = 0
    for shard in shards:
        offsets.append(align(section_numel, alignment))
        full_offsets.append(align(full_numel, full_alignment))
        section_numel, full_numel = offsets[-1] + shard.section_numel, full_offsets[-1] + shard.numel
    if shards and shards[0].num_shards > 1:  # another section follows
        section_numel = align(section_numel, alignment)
    bucket = Bucket(tuple(shards), tuple(offsets), section_numel, tuple(full_offsets), full_numel)
    return replace(bucket, full_numel=section_numel * shards[0].num_shards) if bucket.is_one_tensor else bucket

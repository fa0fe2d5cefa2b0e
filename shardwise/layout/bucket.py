"""Many tensors of one dtype in one flat buffer: where each of them starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.layout.shard import ChunkShard, Move

LARGE_NUMEL = 16_384  # a shard of this many elements is worth a message of its own


def align(numel: int, alignment: int) -> int:
    """Return ``numel`` rounded up to a multiple of ``alignment``."""
    return -(-numel // alignment) * alignment


@dataclass(frozen=True)
class Bucket:
    """The layout of tensors that travel together: ``num_shards`` equal sections, each with one shard of every tensor.

    Attributes:
        shards: how each tensor is cut.
        offsets: elements from the start of a section to the shard of each tensor.
        section_numel: elements of one section, padding included.
        full_offsets: elements from the start of the unsharded buffer to each full tensor.
        full_numel: elements of the unsharded buffer.
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

    @property
    def padding_ratio(self) -> float:
        """Elements that an all-gather moves, divided by the elements that the tensors have (1.0: no padding)."""
        true_numel = sum(shard.numel for shard in self.shards)
        if not self.shards or not true_numel:
            return 1.0
        return self.section_numel * self.shards[0].num_shards / true_numel

    @cached_property
    def num_even(self) -> int:
        """How many sections, the first ones, are the dim-0 rows of all tensors, equally many on every rank, without gaps.

        All other sections are padding, as where a few rows are cut for many ranks.  Then a packed buffer viewed as (num_shards,
        section_numel) has in its first ``num_even`` rows each tensor, viewed as (num_even, -1), as columns.  0: it is not so.
        """
        if self.section_numel != sum(shard.section_numel for shard in self.shards) or not self.section_numel:
            return 0
        if any(shard.is_whole or shard.outer != 1 or shard.size % max(shard.chunk, 1) for shard in self.shards):
            return 0
        found = {shard.size // max(shard.chunk, 1) for shard in self.shards}
        return found.pop() if len(found) == 1 else 0

    @cached_property
    def num_large(self) -> int:
        """How many shards at the start of a section are large: with :func:`by_size` first, all that are."""
        count = 0
        while count < len(self.shards) and self.shards[count].section_numel >= LARGE_NUMEL:
            count += 1
        return count

    @cached_property
    def tail_start(self) -> int:
        """Elements from the start of a section to its tail: everything behind the large shards."""
        large = self.num_large
        return self.offsets[large] if large < len(self.offsets) else self.section_numel

    @cached_property
    def tail_numel(self) -> int:
        """Elements of the tail, which travels as one message."""
        return self.section_numel - self.tail_start

    def parts(self, rank: int) -> tuple[Move, ...]:
        """Return, for every tensor, the copy between it and ``rank``'s section; full offsets count from its own start."""
        return tuple(shard.part(rank, offset) for shard, offset in zip(self.shards, self.offsets, strict=True))

    def moves(
        self, index: int, *, into_full: bool, section_offset: int = 0, section_stride: int | None = None
    ) -> tuple[Move, ...]:
        """Return the copies of tensor ``index`` between its full form and a packed buffer.

        ``section_offset`` is where this bucket starts in a section and ``section_stride`` the elements from one section
        to the next; they differ from 0 and ``section_numel`` when several buckets share a packed buffer.
        """
        stride = self.section_numel if section_stride is None else section_stride
        return self.shards[index].moves(section_offset + self.offsets[index], stride, into_full=into_full)


def by_size(shards: Sequence[ChunkShard]) -> list[int]:
    """Return the indices of ``shards`` with the large ones first, otherwise in order: then the small ones are one block."""
    return sorted(range(len(shards)), key=lambda index: shards[index].section_numel < LARGE_NUMEL)


def build_bucket(shards: Sequence[ChunkShard], alignment: int = 1, full_alignment: int = 1) -> Bucket:
    """Lay ``shards`` out one after another.

    Args:
        shards: the tensors, in the order in which they will lie; all with the same ``num_shards``.
        alignment: every shard starts at a multiple of this many elements in its section.
        full_alignment: the same for the full tensors in the unsharded buffer.
    """
    offsets: list[int] = []
    full_offsets: list[int] = []
    section_numel = full_numel = 0
    for shard in shards:
        offsets.append(section_numel)
        full_offsets.append(full_numel)
        section_numel = align(section_numel + shard.section_numel, alignment)
        full_numel = align(full_numel + shard.numel, full_alignment)
    return Bucket(tuple(shards), tuple(offsets), section_numel, tuple(full_offsets), full_numel)

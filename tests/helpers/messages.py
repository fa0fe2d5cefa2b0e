"""Gathers and reductions of one small bucket over messages, without a model: what tests of a link's ends are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwise.comm.buffers import BufferPool
from shardwise.comm.links.send_recv import PeerLink
from shardwise.layout.bucket import Bucket, build_bucket
from shardwise.layout.shard import ChunkShard
from shardwise.units.shards import FullBuffer, full_window

# A large parameter cut along its rows, one cut along its columns (its parts have gaps), and a small one.
SHAPES = (((12, 5), 0), ((5, 8), 1), ((3,), 0))


def layout_for(size: int) -> Bucket:
    return build_bucket([ChunkShard(shape, dim, size) for shape, dim in SHAPES])


@dataclass(eq=False)
class Ends:
    """One bucket's end of an all-gather: rank r's section is full of ``base + r``."""

    link: PeerLink
    base: float
    dtype: torch.dtype = torch.float32
    full_dtype: torch.dtype = torch.float32
    number: int | None = None
    lost: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = layout_for(self.link.size)
        self.local = torch.full((self.layout.section_numel,), self.base + self.link.rank)
        self.buffer = FullBuffer(self.layout, self.dtype, torch.device("cpu"), False)

    def section(self) -> torch.Tensor:
        return self.local.to(self.full_dtype)

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        full = self.buffer.hold(self.link.pool)
        moves = zip(self.layout.parts(rank), self.layout.full_offsets, strict=True)
        return [full_window(full, move, base) for move, base in moves]

    def lose_full(self) -> object:
        self.lost.append(self.buffer.lose())
        return self.lost[-1]

    def buckets(self) -> Sequence[Ends]:
        return (self,)

    def shard(self) -> torch.Tensor:
        return self.section()

    def deliver(self, packed: torch.Tensor) -> None:
        raise AssertionError("messages do not deliver packed buffers")

    def is_right(self) -> bool:
        parts = [(rank, part) for rank in range(self.link.size) for part in self.full_parts(rank)]
        return all(bool((part == self.base + rank).all()) for rank, part in parts)


@dataclass(eq=False)
class Gradients:
    """The end of a reduce-scatter: every element of rank r's gradients is ``base + r``."""

    link: PeerLink
    base: float
    dtype: torch.dtype = torch.float32
    label: str = "gradients"
    section: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.layout = layout_for(self.link.size)
        self.tensors = [torch.full(shape, self.base + self.link.rank) for shape, _ in SHAPES]

    @property
    def section_numel(self) -> int:
        return self.layout.section_numel

    def fill(self, packed: torch.Tensor) -> None:
        raise AssertionError("messages are not packed")

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        return [
            tensor.as_strided(move.shape, move.full_stride, move.full_offset)
            for tensor, move in zip(self.tensors, self.layout.parts(rank), strict=True)
        ]

    def target(self) -> torch.Tensor:
        return torch.empty(self.section_numel, dtype=self.dtype)

    def drop(self) -> None:
        self.tensors = []

    def deliver(self, section: torch.Tensor) -> None:
        self.section = section

    def is_right(self) -> bool:
        assert self.section is not None
        mean = self.base + (self.link.size - 1) / 2
        windows = [
            self.section.narrow(0, start, shard.shard_numel(self.link.rank))
            for start, shard in zip(self.layout.offsets, self.layout.shards, strict=True)
        ]
        return all(bool((window == mean).all()) for window in windows)


def make_link(group: torch.distributed.ProcessGroup) -> PeerLink:
    return PeerLink(group, BufferPool(torch.device("cpu")))

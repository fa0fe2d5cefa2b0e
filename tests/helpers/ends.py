"""The ends of gathers and reductions of one small bucket, without a model: for tests of communicators and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.collectives.local_peers import take_shareable
from shardwise.collectives.routes import section_parts
from shardwise.collectives.streams import BufferPool
from shardwise.fsdp.flat_buffer import full_window
from shardwise.fsdp.full_buffer import FullBuffer
from shardwise.layout import Bucket, ChunkShard, build_bucket

Shapes = tuple[tuple[tuple[int, ...], int], ...]  # of each tensor: its shape, and the dim along which it is cut
# A large parameter cut along its rows, one cut along its columns (its parts have gaps), and a small one.
SHAPES: Shapes = (((12, 5), 0), ((5, 8), 1), ((3,), 0))


class Place(Protocol):
    """Where an end is: which rank of how many, and whose memory it borrows."""

    rank: int
    size: int
    pool: BufferPool


def layout_for(size: int, shapes: Shapes = SHAPES) -> Bucket:
    return build_bucket([ChunkShard(shape, dim, size) for shape, dim in shapes])


def whole(shape: tuple[int, ...], base: float) -> torch.Tensor:
    """Return a tensor of whole numbers, other ones at every place; ``base`` and all of them are exact in any dtype."""
    return base + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).remainder(64).view(shape)


def part(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """Return what ``rank`` holds of ``tensor``, as ``torch.chunk`` says it; a scalar is everybody's."""
    if not tensor.dim():
        return tensor
    chunks = tensor.chunk(size, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


@dataclass(eq=False)
class Ends:
    """One bucket's end of an all-gather, of tensors that :func:`whole` makes.

    ``shares``: the section lies where other processes of the host can read it.
    """

    at: Place
    base: float
    shapes: Shapes = SHAPES
    dtype: torch.dtype = torch.float32
    full_dtype: torch.dtype = torch.float32
    number: int | None = None
    shares: bool = False
    num_delivered: int = 0
    take_over: None = None

    def __post_init__(self) -> None:
        self.layout = layout_for(self.at.size, self.shapes)
        num_bytes = self.layout.section_numel * self.dtype.itemsize
        shared = take_shareable(num_bytes) if self.shares else None
        self.arena = shared[1] if shared is not None else None
        memory = shared[0] if shared is not None else torch.zeros(num_bytes, dtype=torch.uint8)
        self.local = memory.view(self.dtype)
        for (shape, dim), start in zip(self.shapes, self.layout.offsets, strict=True):
            mine = part(whole(shape, self.base), dim, self.at.rank, self.at.size).reshape(-1)
            self.local[start : start + mine.numel()] = mine
        self.buffer = FullBuffer(self.layout.full_numel, self.full_dtype, torch.device("cpu"), False)

    def section(self) -> torch.Tensor:
        return self.local.to(self.full_dtype)

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        full = self.buffer.hold(self.at.pool)
        moves = zip(self.layout.parts(rank), self.layout.full_offsets, strict=True)
        return [full_window(full, move, base) for move, base in moves]

    def buckets(self) -> Sequence[Ends]:
        return (self,)

    def shard(self) -> torch.Tensor:
        return self.section()

    def deliver(self, packed: torch.Tensor) -> None:
        self.num_delivered += 1
        for rank, section in enumerate(packed.chunk(self.at.size)):
            pairs = zip(self.full_parts(rank), section_parts(self.layout, section, rank), strict=True)
            for target, source in pairs:
                target.copy_(source)

    def is_right(self) -> bool:
        """True if the full tensors are there, to the bit."""
        full = self.buffer.hold(self.at.pool)
        wholes = [whole(shape, self.base).to(self.full_dtype) for shape, _ in self.shapes]
        starts = zip(wholes, self.layout.full_offsets, strict=True)
        return all(torch.equal(full[start : start + each.numel()].view(each.shape), each) for each, start in starts)


@dataclass(eq=False)
class Gradients:
    """The end of a reduce-scatter: rank r's gradients are ``whole(shape, base + r)``."""

    at: Place
    base: float
    shapes: Shapes = SHAPES
    dtype: torch.dtype = torch.float32
    label: str = "gradients"
    section: torch.Tensor | None = None
    num_delivered: int = 0

    def __post_init__(self) -> None:
        self.layout = layout_for(self.at.size, self.shapes)
        self.tensors = [whole(shape, self.base + self.at.rank).to(self.dtype) for shape, _ in self.shapes]
        self._target = torch.full((self.section_numel,), -1.0, dtype=self.dtype)

    @property
    def section_numel(self) -> int:
        return self.layout.section_numel

    def fill(self, packed: torch.Tensor) -> None:
        for rank, section in enumerate(packed.chunk(self.at.size)):
            pairs = zip(section_parts(self.layout, section, rank), self.full_parts(rank), strict=True)
            for target, source in pairs:
                target.copy_(source)

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        return [
            tensor.as_strided(move.shape, move.full_stride, move.full_offset)
            for tensor, move in zip(self.tensors, self.layout.parts(rank), strict=True)
        ]

    def target(self) -> torch.Tensor:
        return self._target

    def drop(self) -> None:
        self.tensors = []

    def deliver(self, section: torch.Tensor) -> None:
        self.num_delivered += 1
        self.section = section.clone()

    def is_right(self, divisor: float | None = None) -> bool:
        """True if the sums over ranks, divided by ``divisor`` (None: their number), are there, to the bit."""
        assert self.section is not None
        size, rank = self.at.size, self.at.rank
        by = float(size) if divisor is None else divisor
        for (shape, dim), start in zip(self.shapes, self.layout.offsets, strict=True):
            total = sum((whole(shape, self.base + other) for other in range(size)), torch.zeros(shape))
            expected = part(total.to(self.dtype) / by, dim, rank, size).reshape(-1)
            if not torch.equal(self.section[start : start + expected.numel()], expected):
                return False
        return True

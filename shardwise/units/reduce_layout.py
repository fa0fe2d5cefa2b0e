"""Where the gradients of some parameters lie while they are reduced, and after."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import torch_private
from shardwise.layout.bucket import build_bucket
from shardwise.layout.shard import Move, row_major
from shardwise.units.gradient_memory import KEPT_BYTES, GradientMemory, GradientPlaces, GradientSection
from shardwise.units.param import UnitParam
from shardwise.units.shards import packed_window


class ReduceLayout:
    """Where the gradients of some parameters lie in a packed buffer and in this rank's section of it.

    ``num_spare``: elements behind the section that are none of it.  ``kept_bytes``: sections up to there are used again.
    """

    def __init__(
        self, params: list[UnitParam], alignment: int, rank: int, num_spare: int = 0, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.params = params
        self.bucket = build_bucket([param.shard for param in params], alignment)
        self.names = ", ".join(param.fqn for param in params[:3]) + (f" and {len(params) - 3} more" * (len(params) > 3))
        self._moves = [self.bucket.moves(index, into_full=False) for index in range(len(params))]
        self._parts: dict[int, tuple[Move, ...]] = {}
        self._packed_windows: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of buffers, while somebody has them
        shapes = [shard.shard_shape(rank) for shard in self.bucket.shards]
        places = tuple(zip(self.bucket.offsets, shapes, strict=True))
        self.places = GradientPlaces(tuple(params), places, self.bucket.section_numel, num_spare)
        self.memory = GradientMemory(self.places, kept_bytes)
        self._windows = [(offset, row_major(shape), shape) for offset, shape in places]

    def pack(self, gradients: list[torch.Tensor], packed: torch.Tensor) -> None:
        """Write every rank's part of every gradient to its place; padding becomes zero."""
        num_even = self.bucket.num_even
        if num_even and {gradient.dtype for gradient in gradients} == {packed.dtype}:
            rows = packed.view(-1, self.bucket.section_numel)
            if num_even < len(rows):
                rows[num_even:].zero_()
                rows = rows[:num_even]
            torch.cat([gradient.reshape(num_even, -1) for gradient in gradients], dim=1, out=rows)
            return
        if self.bucket.has_padding:
            packed.zero_()
        targets = self._packed_windows.get(packed)
        if targets is None:
            targets = [packed_window(packed, move) for moves in self._moves for move in moves]
            self._packed_windows[packed] = targets
        sources: list[torch.Tensor] = []
        for gradient, moves in zip(gradients, self._moves, strict=True):
            dense = gradient.contiguous()
            start = dense.storage_offset()
            sources += [dense.as_strided(move.shape, move.full_stride, start + move.full_offset) for move in moves]
        torch_private.copy_all(targets, sources)

    def pack_whole(self, gradients: list[torch.Tensor], section: GradientSection) -> None:
        """Write ``gradients`` to ``section``, where this rank has all shards; gaps become zero."""
        if self.bucket.has_padding:
            section.flat.zero_()
        torch_private.copy_all(section.windows, gradients)

    def full_parts(self, gradients: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Return the windows of ``gradients`` (row-major) that belong to ``rank``."""
        parts = self._parts.get(rank)
        if parts is None:
            parts = self._parts[rank] = self.bucket.parts(rank)
        return [
            gradient.as_strided(move.shape, move.full_stride, gradient.storage_offset() + move.full_offset)
            for gradient, move in zip(gradients, parts, strict=True)
        ]

    def windows(self, section: torch.Tensor) -> list[torch.Tensor]:
        """Return the shards in this rank's section."""
        start = section.storage_offset()
        return [section.as_strided(shape, stride, start + offset) for offset, stride, shape in self._windows]

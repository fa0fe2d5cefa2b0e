"""Memory for shards that other ranks of this host can map.

Shards are made in it, so that they need not move when the ranks have found out that they share memory: whoever holds a
tensor of them holds the memory that training goes on in.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import weakref
from dataclasses import dataclass

import torch

from shardwise.comm.links.segment import HEADER_BYTES, Segment
from shardwise.layout.bucket import align

_SEGMENT_BYTES = 1 << 28  # of addresses: pages take memory when they are first written
_PAGE_BYTES = 4096
_LINE_BYTES = 64
_ORDERED_STORES = ("x86_64", "AMD64")  # architectures whose stores other cores see in order


def can_share_memory() -> str:
    """Return "" if processes of this host could share memory as shardwise needs it, else the reason why not."""
    if platform.machine() not in _ORDERED_STORES:
        return f"the order of stores is not defined on {platform.machine()}"
    return ""


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Where some memory lies for other processes: ``offset`` bytes into a segment."""

    segment: Segment
    offset: int


class Arena:
    """Hands out memory of segments; what is no longer used goes back to the system page by page."""

    def __init__(self) -> None:
        self._segment: weakref.ref[Segment] | None = None
        self._used = 0
        self._pid = os.getpid()

    def take(self, num_bytes: int) -> tuple[torch.Tensor, ArenaPlace] | None:
        """Return ``num_bytes`` zeros as a 1-D tensor of bytes and where they lie; None where memory cannot be shared."""
        grain = _PAGE_BYTES if num_bytes >= _PAGE_BYTES else _LINE_BYTES
        segment = self._segment() if self._segment is not None and self._pid == os.getpid() else None
        start = align(self._used, grain)
        if segment is None or start + num_bytes > segment.num_bytes:
            try:
                segment = Segment.create(max(_SEGMENT_BYTES, align(HEADER_BYTES + num_bytes, _PAGE_BYTES)))
            except (OSError, AttributeError):
                return None
            self._segment, self._pid = weakref.ref(segment), os.getpid()
            start = HEADER_BYTES
        self._used = align(start + num_bytes, grain)
        array = segment.array(start, num_bytes)
        if grain == _PAGE_BYTES:
            weakref.finalize(array, _give_back, segment.mapping, start, self._used - start).atexit = False
        return torch.from_numpy(array), ArenaPlace(segment, start)


_of_process = Arena()  # it holds no memory: the tensors made in it do


def take_shareable(num_bytes: int) -> tuple[torch.Tensor, ArenaPlace] | None:
    """Return ``num_bytes`` zeros as a 1-D tensor of bytes and where they lie; None where memory cannot be shared."""
    return None if can_share_memory() else _of_process.take(num_bytes)


def _give_back(mapping: mmap.mmap, start: int, num_bytes: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # a forked child has a private mapping, which cannot give back
        mapping.madvise(mmap.MADV_REMOVE, start, num_bytes)

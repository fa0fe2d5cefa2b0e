"""Inboxes: where in the memory of a host the sections of other hosts are received, for all ranks of the host to copy from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise import torch_private
from shardwise.comm.communicator import BucketEnds, GatherEnds
from shardwise.comm.links.host import HostLink
from shardwise.comm.links.parts import section_parts
from shardwise.layout.bucket import Bucket, align

NUM_INBOXES = 3  # all-gathers whose sections may be on their way at once
_ALIGNMENT = 64  # bytes


def padded_bytes(num_bytes: int) -> int:
    """Return what a section of ``num_bytes`` takes in an inbox."""
    return align(num_bytes, _ALIGNMENT)


def _section_bytes(bucket: BucketEnds) -> int:
    return padded_bytes(bucket.layout.section_numel * bucket.full_dtype.itemsize)


class Inboxes:
    """``NUM_INBOXES`` in every segment of a host, used in turns by all-gathers number 0, 1, 2, ... of a span.

    A rank receives there the sections of its column: for each bucket, those of the other hosts in their order.

    Args:
        inside: the ranks of the host.
        start: byte offset of the first inbox in a segment.  slot_bytes: of one.
    """

    def __init__(self, inside: HostLink, start: int, slot_bytes: int) -> None:
        self._inside, self._first, self._slot_bytes = inside, start, slot_bytes
        per_host = len(inside.ranks)
        columns = [range(place, inside.num_ranks, per_host) for place in range(per_host)]
        self._others = [[rank for rank in column if rank not in inside.ranks] for column in columns]
        self._parts: dict[tuple[int, int], tuple[Bucket, list[torch.Tensor]]] = {}

    def takes(self, pieces: GatherEnds) -> bool:
        """True if all sections of this all-gather have room; the same on every rank."""
        return sum(_section_bytes(each) for each in pieces.buckets()) * len(self._others[0]) <= self._slot_bytes

    def windows(self, index: int, buckets: Sequence[BucketEnds]) -> list[dict[int, torch.Tensor]]:
        """Return where in this rank's inbox each bucket's sections come to, by the rank that sends them."""
        start, place = self._start(index), self._inside.place
        found: list[dict[int, torch.Tensor]] = []
        for bucket in buckets:
            windows: dict[int, torch.Tensor] = {}
            for rank in self._others[place]:
                windows[rank] = self._section(place, start, bucket)
                start += _section_bytes(bucket)
            found.append(windows)
        return found

    def copy_out(self, index: int, buckets: Sequence[BucketEnds]) -> None:
        """Copy what all ranks of this host have received to the full parameters."""
        start = self._start(index)
        for bucket in buckets:
            size = _section_bytes(bucket)
            for place, ranks in enumerate(self._others):
                for number, rank in enumerate(ranks):
                    torch_private.copy_all(
                        bucket.full_parts(rank), self._received(place, start + number * size, bucket, rank)
                    )
            start += len(self._others[0]) * size

    def _start(self, index: int) -> int:
        return self._first + index % NUM_INBOXES * self._slot_bytes

    def _section(self, place: int, start: int, bucket: BucketEnds) -> torch.Tensor:
        return self._inside.segments[place].tensor(start, bucket.layout.section_numel, bucket.full_dtype)

    def _received(self, place: int, start: int, bucket: BucketEnds, rank: int) -> list[torch.Tensor]:
        known = self._parts.get((start, rank))
        if known is None or known[0] is not bucket.layout or known[1][0].dtype is not bucket.full_dtype:
            parts = section_parts(bucket.layout, self._section(place, start, bucket), rank)
            known = self._parts[start, rank] = bucket.layout, parts
        return known[1]

"""Ranks of one host that read each other's shards and gradients in shared memory.

An all-gather copies every rank's section from where it is stored, without its owner's help: in a span nobody changes
shards.  A reduce-scatter copies each rank's parts of the gradients to the sender's outbox, from where that rank adds them.

Ranks order their accesses by words in the headers of their segments.  That needs stores to be seen in the order they were
made, which x86-64 guarantees and others do not.
"""

from __future__ import annotations

import os
import select
import time
import zlib
from collections.abc import Sequence

import torch

from shardwise import torch_private
from shardwise.comm.buffers import BufferPool
from shardwise.comm.parts import can_sum_in_parts, pack_parts, section_parts, sum_sections
from shardwise.comm.protocol import GatherEnds, GatherPieces, Pending, Scale, ScatterPieces
from shardwise.comm.segment import NUM_WORDS, Segment
from shardwise.errors import DesyncError
from shardwise.layout.bucket import Bucket, align

# Words of a segment's header: written by its owner, polled by the others.
_OPEN = 0  # 2 * the span entered last, + 1 if this rank wants the backend's collectives in it
_CLOSED = 1  # the last span in which this rank reads no peer's memory any more
_ABORTED = 2  # the last span that this rank left by an exception
_POSTED = 3  # the last reduction whose parts are in the outbox
_CONSUMED = 4  # the last reduction that this rank has read from all outboxes
_LABELS = 8  # from here on: what is in each slot of the outbox

NUM_SLOTS = 4
_ALIGNMENT = 64  # bytes
_REDUCTIONS_PER_SPAN = 1 << 24
_YIELDS = 200
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_LIVENESS_S = 0.2


def slot_bytes(section_bytes: int, num_ranks: int) -> int:
    """Return what a reduction whose sections have ``section_bytes`` takes in an outbox."""
    return num_ranks * align(section_bytes, _ALIGNMENT)


def outbox_bytes(slot: int) -> int:
    """Return the bytes of an outbox whose slots have ``slot`` bytes."""
    return NUM_SLOTS * slot


class HostLink:
    """The segments of a group whose ranks are processes of one host.

    Args:
        segments: one per rank; this rank's own at index ``rank``.
        pids: process ids, for telling a rank that is gone from one that is late.
        rank: in the group.
        outbox: byte offset of the outbox in every segment.  slot_bytes: bytes of one of its slots.
        timeout_s: how long to wait for a rank that is alive.
        pool: memory for staging.

    Attributes:
        gathers: those launched in this span and not waited for yet.
    """

    name = "shared memory"

    def __init__(
        self,
        segments: Sequence[Segment],
        pids: Sequence[int],
        rank: int,
        outbox: int,
        slot_bytes: int,
        timeout_s: float,
        pool: BufferPool,
    ) -> None:
        assert len(segments) == len(pids)
        assert NUM_SLOTS + _LABELS <= NUM_WORDS
        self.segments = tuple(segments)
        self.rank = rank
        self.size = len(segments)
        self._pool = pool
        self._peers = tuple(other for other in range(self.size) if other != rank)
        self._words = tuple(segment.words for segment in segments)
        self._mine = self._words[rank]
        self._alive = {peer: _Liveness(pids[peer]) for peer in self._peers}
        self._outbox = outbox
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._span = 0
        self._index = 0
        self.gathers: list[_Gather] = []
        self._parts: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._sections: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    # ---- spans ----

    def open(self, wants_collectives: bool) -> bool:
        self._span += 1
        self._index = 0
        self._mine[_OPEN] = 2 * self._span + wants_collectives
        self._wait(_OPEN, 2 * self._span, "the start of a forward or backward")
        return not (wants_collectives or any(self._words[peer][_OPEN] & 1 for peer in self._peers))

    def close(self) -> None:
        for gather in list(self.gathers):
            gather.wait()
        self._mine[_CLOSED] = self._span
        self._wait(_CLOSED, self._span, "the end of a forward or backward")

    def abort(self) -> None:
        for gather in self.gathers:
            gather.forget()
        self.gathers.clear()
        self._mine[_ABORTED] = self._span
        self._mine[_CLOSED] = self._span

    # ---- collectives ----

    def takes_gather(self, pieces: GatherPieces) -> bool:
        buckets = pieces.buckets()
        return bool(buckets) and all(bucket.home is not None for bucket in buckets)

    def takes_scatter(self, pieces: ScatterPieces, scale: Scale) -> bool:
        num_bytes = pieces.section_numel * pieces.dtype.itemsize
        return slot_bytes(num_bytes, self.size) <= self._slot_bytes and can_sum_in_parts(scale, self.size)

    def gather_staging(self, layout: Bucket, itemsize: int) -> tuple[int, bool]:
        return 0, False

    def scatter_staging(self, layout: Bucket, itemsize: int) -> int:
        return layout.tail_numel * itemsize

    def all_gather(self, pieces: GatherPieces) -> Pending:
        gather = _Gather(self, pieces)
        self.gathers.append(gather)
        return gather

    def read_sections(self, pieces: GatherPieces) -> None:
        """Copy every rank's sections to the full parameters."""
        for bucket in pieces.buckets():
            for rank in range(self.size):
                torch_private.copy_all(bucket.full_parts(rank), self._section_parts(bucket, rank))

    def _section_parts(self, bucket: GatherEnds, rank: int) -> list[torch.Tensor]:
        assert bucket.home is not None
        key = (bucket.home, rank)
        parts = self._parts.get(key)
        if parts is None:
            section = self.segments[rank].tensor(bucket.home, bucket.layout.section_numel, bucket.dtype)
            parts = self._parts[key] = section_parts(bucket.layout, section, rank)
        return parts

    def reduce_scatter(self, pieces: ScatterPieces, scale: Scale) -> Pending:
        index = self._index
        self._index += 1
        if index >= NUM_SLOTS:
            self._wait(_CONSUMED, self._key(index - NUM_SLOTS), f"gradients of {pieces.label}")
        layout = pieces.layout
        for peer in self._peers:
            pack_parts(layout, pieces.full_parts(peer), self._outgoing(self.rank, peer, index, pieces), peer)
        self._mine[_LABELS + index % NUM_SLOTS] = _digest(pieces)
        self._mine[_POSTED] = self._key(index)
        return _Scatter(self, pieces, scale, index)

    def read_outboxes(self, pieces: ScatterPieces, scale: Scale, index: int) -> torch.Tensor:
        """Wait for every rank's parts of reduction ``index`` and return this rank's section of the result."""
        self._wait(_POSTED, self._key(index), f"gradients of {pieces.label}")
        self._compare_labels(pieces, index)
        layout, own = pieces.layout, pieces.full_parts(self.rank)
        sections = [
            None if rank == self.rank else self._outgoing(rank, self.rank, index, pieces) for rank in range(self.size)
        ]
        out = torch.empty(layout.section_numel, dtype=pieces.dtype)
        lease = self._pool.lease(layout.tail_numel * pieces.dtype.itemsize)
        tail = lease.tensor(pieces.dtype)
        pack_parts(layout, own, tail, self.rank, layout.num_large)
        sum_sections(layout, own, tail, sections, scale, self.rank, out)
        lease.release()
        self._mine[_CONSUMED] = self._key(index)
        return out

    def _outgoing(self, sender: int, receiver: int, index: int, pieces: ScatterPieces) -> torch.Tensor:
        slot, numel = index % NUM_SLOTS, pieces.section_numel
        start = self._outbox + slot * self._slot_bytes + receiver * align(numel * pieces.dtype.itemsize, _ALIGNMENT)
        key = (sender, start, numel, pieces.dtype)
        section = self._sections.get(key)
        if section is None:
            section = self._sections[key] = self.segments[sender].tensor(start, numel, pieces.dtype)
        return section

    def _key(self, index: int) -> int:
        return self._span * _REDUCTIONS_PER_SPAN + index + 1

    def _compare_labels(self, pieces: ScatterPieces, index: int) -> None:
        expected = _digest(pieces)
        for peer in self._peers:
            if self._words[peer][_LABELS + index % NUM_SLOTS] != expected:
                raise DesyncError(
                    f"rank {self.rank} reduces gradients of {pieces.label} ({pieces.section_numel} elements of "
                    f"{pieces.dtype} per rank) as number {index} of this backward, rank {peer} reduces something else. "
                    "Every rank must run the same units in the same order and get gradients for the same parameters."
                )

    # ---- waiting ----

    def _wait(self, word: int, at_least: int, what: str) -> None:
        for peer in self._peers:
            if self._words[peer][word] < at_least:
                self._wait_for(peer, word, at_least, what)

    def _wait_for(self, peer: int, word: int, at_least: int, what: str) -> None:
        words = self._words[peer]
        for _ in range(_YIELDS):
            if words[word] >= at_least:
                return
            os.sched_yield()
        start = time.monotonic()
        sleep_s, look_s = _FIRST_SLEEP_S, _LIVENESS_S
        while words[word] < at_least:
            if words[_ABORTED] >= self._span and words[word] < at_least:
                raise DesyncError(
                    f"rank {peer} left the forward or backward by an exception while rank {self.rank} waited for it at "
                    f"{what}; see the error of rank {peer}"
                )
            waited_s = time.monotonic() - start
            if waited_s > look_s:
                look_s = waited_s + _LIVENESS_S
                if not self._alive[peer].is_alive() and words[word] < at_least:
                    raise DesyncError(f"rank {peer} is gone; rank {self.rank} waited for it at {what}")
                if waited_s > self._timeout_s:
                    raise DesyncError(
                        f"rank {self.rank} waited {self._timeout_s:g} s for rank {peer} at {what}; every rank must make the "
                        "same calls in the same order"
                    )
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)


class _Gather:
    """An all-gather that copies when it is waited for, at the latest when its span closes."""

    __slots__ = ("_link", "_pieces")

    def __init__(self, link: HostLink, pieces: GatherPieces) -> None:
        self._link = link
        self._pieces: GatherPieces | None = pieces

    def wait(self) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            self._link.gathers.remove(self)
            self._link.read_sections(pieces)

    def cancel(self) -> None:
        if self._pieces is not None:
            self._pieces = None
            self._link.gathers.remove(self)

    def forget(self) -> None:
        self._pieces = None


class _Scatter:
    __slots__ = ("_index", "_link", "_pieces", "_scale")

    def __init__(self, link: HostLink, pieces: ScatterPieces, scale: Scale, index: int) -> None:
        self._link = link
        self._pieces: ScatterPieces | None = pieces
        self._scale = scale
        self._index = index

    def wait(self) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            pieces.deliver(self._link.read_outboxes(pieces, self._scale, self._index))

    def cancel(self) -> None:
        self._pieces = None


class _Liveness:
    """Whether a process is there: by a handle, because its number may come back as another's."""

    def __init__(self, pid: int) -> None:
        self._poll = select.poll()
        self._fd = os.pidfd_open(pid)
        self._poll.register(self._fd, select.POLLIN)

    def is_alive(self) -> bool:
        return not self._poll.poll(0)

    def __del__(self) -> None:
        os.close(self._fd)


def _digest(pieces: ScatterPieces) -> int:
    return zlib.crc32(f"{pieces.label} {pieces.section_numel} {pieces.dtype}".encode())

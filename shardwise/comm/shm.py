"""Ranks of one host that read each other's shards and gradients in shared memory.

An all-gather copies every rank's section from where it is stored, without its owner's help: in a span nobody changes
shards.  A reduce-scatter copies each rank's parts of the gradients to the sender's outbox, from where that rank adds them.

Ranks order their accesses by words in the headers of their segments.  That needs stores to be seen in the order they were
made, which x86-64 guarantees and others do not.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence

import torch

from shardwise import torch_private
from shardwise.comm.alive import Liveness
from shardwise.comm.link import SpanKind
from shardwise.comm.parts import can_sum_in_parts, pack_parts, section_parts, sum_sections
from shardwise.comm.protocol import GatherEnds, GatherPieces, Pending, Scale, ScatterPieces
from shardwise.comm.segment import NUM_WORDS, Segment
from shardwise.errors import TransportError
from shardwise.layout.bucket import Bucket, align

# Words of a segment's header: written by its owner, polled by the others.
_OPEN = 0  # 4 * the span entered last, + 2 in a backward, + 1 if this rank wants the backend's collectives in it
_CLOSED = 1  # the last span that this rank has left
_ABORTED = 2  # the last span that this rank left by an exception
_READ = 3  # the last all-gather for which this rank has read all sections
_POSTED = 4  # the last reduction whose parts are in the outbox
_CONSUMED = 5  # the last reduction that this rank has read from all outboxes
_LABELS = 8  # from here on: what is in each slot of the outbox

NUM_SLOTS = 3  # reductions that a rank may be ahead of the slowest
_ALIGNMENT = 64  # bytes
_CALLS_PER_SPAN = 1 << 24
_YIELDS = 200
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_LIVENESS_S = 0.2


def slot_bytes(section_bytes: int, num_ranks: int) -> int:
    """Return what a reduction whose sections have ``section_bytes`` takes in an outbox."""
    return align(num_ranks * section_bytes, _ALIGNMENT)


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
    ) -> None:
        assert len(segments) == len(pids)
        assert NUM_SLOTS + _LABELS <= NUM_WORDS
        self.segments = tuple(segments)
        self.rank = rank
        self.size = len(segments)
        self._peers = tuple(other for other in range(self.size) if other != rank)
        self._words = tuple(segment.words for segment in segments)
        self._mine = self._words[rank]
        self._alive = {peer: Liveness(pids[peer]) for peer in self._peers}
        self._outbox = outbox
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._span = 0
        self._alarm = 1  # the first span that no other rank may have left by an exception, as far as this rank knows
        self._num_gathers = self._num_reductions = 0
        self.gathers: list[_Gather] = []
        self._scatters: deque[_Scatter] = deque()
        self._parts: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    # ---- spans ----

    def open(self, kind: SpanKind, wants_collectives: bool) -> bool:
        what = f"the start of a {kind}"
        for peer in self._peers:
            self._check_left(peer, what)
        before = self._mine[_OPEN]
        self._span += 1
        self._num_gathers = self._num_reductions = 0
        word = 4 * self._span + 2 * (kind == "backward")
        self._mine[_OPEN] = word + wants_collectives
        try:
            self._wait_for_all(word, what)
            self._check_kind(word, kind, what)
        except TransportError:
            if any(self._words[peer][_ABORTED] == self._span - 1 for peer in self._peers):
                self._span -= 1  # that rank does not know of this span: the next one has its number
                self._mine[_OPEN] = before
            else:
                self.abort()
            raise
        self._alarm = self._span
        return not (wants_collectives or any(self._open_word(peer) & 1 for peer in self._peers))

    def _open_word(self, peer: int) -> int:
        """Return what ``peer`` entered this span with; 0 if it has left it by an exception and waits in the next one."""
        word = self._words[peer][_OPEN]
        return word if word >> 2 == self._span else 0

    def _wait_for_all(self, word: int, what: str) -> None:
        """Wait until every rank has entered this span, with the same kind unless it means another.

        One that has not noticed yet that this rank left the last span by an exception will, and take back what it began.
        """
        has_left = self._mine[_ABORTED] == self._span - 1
        for peer in self._peers:
            words = self._words[peer]

            def has_come(words: memoryview = words) -> bool:
                theirs = words[_OPEN]
                if theirs >> 2 != self._span:
                    return theirs >> 2 > self._span
                return theirs >> 1 == word >> 1 or not has_left or words[_ABORTED] >= self._span - 1

            self._wait_until(has_come, peer, what)

    def _check_kind(self, word: int, kind: SpanKind, what: str) -> None:
        for peer in self._peers:
            theirs = self._open_word(peer)
            if theirs and theirs >> 1 != word >> 1:
                self._check_left(peer, what)  # it left the last span by an exception and starts again
                other = "forward" if kind == "backward" else "backward"
                raise TransportError(
                    f"rank {peer} starts a {other} where rank {self.rank} starts a {kind}; every rank must make the same "
                    "calls in the same order"
                )

    def close(self) -> None:
        for gather in list(self.gathers):
            gather.wait()
        last = self._key(self._num_gathers - 1)
        for peer in (
            self._peers if self._num_gathers else ()
        ):  # a rank that has made fewer all-gathers has left the span, or will
            words = self._words[peer]
            if words[_READ] < last and words[_CLOSED] < self._span:
                self._wait_for(peer, _READ, last, "the end of a forward or backward", _CLOSED, self._span)
        self._mine[_CLOSED] = self._span

    def abort(self) -> None:
        for gather in self.gathers:
            gather.forget()
        self.gathers.clear()
        self._scatters.clear()
        self._mine[_ABORTED] = self._span
        self._mine[_CLOSED] = self._span
        self._alarm = self._span + 1

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
        return 0

    def all_gather(self, pieces: GatherPieces) -> Pending:
        gather = _Gather(self, pieces)
        self._num_gathers += 1
        self.gathers.append(gather)
        return gather

    def read_sections(self, pieces: GatherPieces) -> None:
        """Copy every rank's sections to the full parameters."""
        for bucket in pieces.buckets():
            for rank in range(self.size):
                torch_private.copy_all(bucket.full_parts(rank), self._section_parts(bucket, rank))
        self._mine[_READ] = self._key(self._num_gathers - len(self.gathers) - 1)

    def _section_parts(self, bucket: GatherEnds, rank: int) -> list[torch.Tensor]:
        assert bucket.home is not None
        key = (bucket.home, rank)
        parts = self._parts.get(key)
        if parts is None:
            section = self.segments[rank].tensor(bucket.home, bucket.layout.section_numel, bucket.dtype)
            parts = self._parts[key] = section_parts(bucket.layout, section, rank)
        return parts

    def reduce_scatter(self, pieces: ScatterPieces, scale: Scale) -> Pending:
        index = self._num_reductions
        self._num_reductions += 1
        if index >= NUM_SLOTS:
            # Both sides of the slot must be free: this rank's own parts may still be in it, too.
            while self._scatters and self._scatters[0].index <= index - NUM_SLOTS:
                self._scatters[0].wait()
            self._wait(_CONSUMED, self._key(index - NUM_SLOTS), f"gradients of {pieces.label}")
        own = self._fill_outbox(pieces, index)
        self._mine[_LABELS + index % NUM_SLOTS] = _digest(pieces)
        self._mine[_POSTED] = self._key(index)
        scatter = _Scatter(self, pieces, scale, index, own)
        self._scatters.append(scatter)
        return scatter

    def forget_scatter(self, scatter: _Scatter) -> None:
        """Take note that ``scatter`` is delivered or cancelled."""
        if scatter in self._scatters:
            self._scatters.remove(scatter)

    def _fill_outbox(self, pieces: ScatterPieces, index: int) -> torch.Tensor:
        """Copy the gradients to the outbox and let go of them; return this rank's own section."""
        layout, numel = pieces.layout, pieces.section_numel
        if not layout.num_large:  # one copy of everything costs less than many of parts
            pieces.fill(self._view(self.rank, self._slot_start(index), self.size * numel, pieces.dtype))
            return self._outgoing(self.rank, self.rank, index, pieces)
        for peer in self._peers:
            pack_parts(layout, pieces.full_parts(peer), self._outgoing(self.rank, peer, index, pieces), peer)
        own = torch.empty(numel, dtype=pieces.dtype)
        pack_parts(layout, pieces.full_parts(self.rank), own, self.rank)
        pieces.drop()
        return own

    def is_posted(self, index: int) -> bool:
        """True if every rank's parts of reduction ``index`` can be read."""
        key = self._key(index)
        return all(self._words[peer][_POSTED] >= key for peer in self._peers)

    def read_outboxes(self, pieces: ScatterPieces, scale: Scale, index: int, own: torch.Tensor) -> torch.Tensor:
        """Wait for every rank's parts of reduction ``index``; return their sum with ``own``, this rank's own section."""
        self._wait(_POSTED, self._key(index), f"gradients of {pieces.label}")
        self._compare_labels(pieces, index)
        sections = [
            own if rank == self.rank else self._outgoing(rank, self.rank, index, pieces) for rank in range(self.size)
        ]
        out = own if pieces.layout.num_large else torch.empty_like(own)  # the outbox must be free again
        sum_sections(pieces.layout, sections, scale, self.rank, out)
        self._mine[_CONSUMED] = self._key(index)
        return out

    def _outgoing(self, sender: int, receiver: int, index: int, pieces: ScatterPieces) -> torch.Tensor:
        numel = pieces.section_numel
        start = self._slot_start(index) + receiver * numel * pieces.dtype.itemsize
        return self._view(sender, start, numel, pieces.dtype)

    def _slot_start(self, index: int) -> int:
        return self._outbox + index % NUM_SLOTS * self._slot_bytes

    def _view(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        key = (rank, start, numel, dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self.segments[rank].tensor(start, numel, dtype)
        return view

    def _key(self, index: int) -> int:
        return self._span * _CALLS_PER_SPAN + index + 1

    def _compare_labels(self, pieces: ScatterPieces, index: int) -> None:
        expected = _digest(pieces)
        for peer in self._peers:
            if self._words[peer][_LABELS + index % NUM_SLOTS] != expected:
                raise TransportError(
                    f"rank {self.rank} reduces gradients of {pieces.label} ({pieces.section_numel} elements of "
                    f"{pieces.dtype} per rank) as number {index} of this backward, rank {peer} reduces something else. "
                    "Every rank must run the same units in the same order and get gradients for the same parameters."
                )

    # ---- waiting ----

    def _wait(self, word: int, at_least: int, what: str) -> None:
        for peer in self._peers:
            if self._words[peer][word] < at_least:
                self._wait_for(peer, word, at_least, what)

    def _wait_for(
        self, peer: int, word: int, at_least: int, what: str, other: int | None = None, other_at_least: int = 0
    ) -> None:
        """Wait until one word of ``peer`` (or the ``other`` one) is large enough."""
        words = self._words[peer]

        def is_there() -> bool:
            return words[word] >= at_least or (other is not None and words[other] >= other_at_least)

        self._wait_until(is_there, peer, what)

    def _wait_until(self, is_there: Callable[[], bool], peer: int, what: str) -> None:
        for _ in range(_YIELDS):
            if is_there():
                return
            os.sched_yield()
        start = time.monotonic()
        sleep_s, look_s = _FIRST_SLEEP_S, _LIVENESS_S
        while not is_there():
            if self._words[peer][_ABORTED] >= self._alarm and not is_there():  # it may have come and left since
                self._check_left(peer, what)
            waited_s = time.monotonic() - start
            if waited_s > look_s:
                look_s = waited_s + _LIVENESS_S
                if not self._alive[peer].is_alive() and not is_there():
                    raise TransportError(f"rank {peer} is gone; rank {self.rank} waited for it at {what}")
                if waited_s > self._timeout_s:
                    raise TransportError(
                        f"rank {self.rank} waited {self._timeout_s:g} s for rank {peer} at {what}; every rank must make the "
                        "same calls in the same order"
                    )
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _check_left(self, peer: int, what: str) -> None:
        if self._words[peer][_ABORTED] >= self._alarm:
            alarm, self._alarm = self._alarm, self._words[peer][_ABORTED] + 1
            gone = [p for p in self._peers if self._words[p][_ABORTED] < alarm and not self._alive[p].is_alive()]
            if gone:  # why the other one has left
                raise TransportError(f"rank {gone[0]} is gone; rank {self.rank} was on its way to {what}")
            raise TransportError(
                f"rank {peer} left the forward or backward by an exception while rank {self.rank} was on its way to {what}; "
                f"see the error of rank {peer}"
            )


class _Gather:
    """An all-gather that copies when it is waited for, at the latest when its span closes."""

    __slots__ = ("_link", "_pieces")
    holds_input = False

    def __init__(self, link: HostLink, pieces: GatherPieces) -> None:
        self._link = link
        self._pieces: GatherPieces | None = pieces

    def is_done(self) -> bool:
        return True

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
    """A reduction whose parts are in the outbox; the others' are read when they are there.

    This rank's own parts are copied too, so that gradients are not held for late ranks.
    """

    __slots__ = ("_link", "_own", "_pieces", "_scale", "index")
    holds_input = False

    def __init__(self, link: HostLink, pieces: ScatterPieces, scale: Scale, index: int, own: torch.Tensor) -> None:
        self._link = link
        self._pieces: ScatterPieces | None = pieces
        self._scale = scale
        self.index = index
        self._own = own

    def is_done(self) -> bool:
        return self._pieces is None or self._link.is_posted(self.index)

    def wait(self) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            self._link.forget_scatter(self)
            pieces.deliver(self._link.read_outboxes(pieces, self._scale, self.index, self._own))

    def cancel(self) -> None:
        if self._pieces is not None:
            self._pieces = None
            self._link.forget_scatter(self)


def _digest(pieces: ScatterPieces) -> int:
    return zlib.crc32(f"{pieces.label} {pieces.section_numel} {pieces.dtype}".encode())

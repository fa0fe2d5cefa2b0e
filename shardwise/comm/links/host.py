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
from dataclasses import dataclass

import torch

from shardwise import torch_private
from shardwise.black_box import WAITS, note
from shardwise.comm import alarm
from shardwise.comm.alive import Liveness
from shardwise.comm.communicator import BucketEnds, GatherEnds, Pending, Scale, ScatterEnds
from shardwise.comm.last_words import LOOK_NEXT, cited, gone_in_words, store_of_job
from shardwise.comm.links.arena import ArenaPlace
from shardwise.comm.links.link import SpanKind
from shardwise.comm.links.parts import can_sum_in_parts, pack_parts, section_parts, sum_sections
from shardwise.comm.links.segment import NUM_WORDS, Segment
from shardwise.errors import TransportError
from shardwise.layout.bucket import Bucket, align

# Words of a segment's header: written by its owner, polled by the others.  All but the first are stamps, see _stamp.
_EPOCH = 0  # one more whenever this rank, or one that it has heard of, has left a span by an exception
_OPEN = 1  # the span entered last, with the flags below
_CLOSED = 2  # the last span that this rank has done its part of
_READ = 3  # the last all-gather for which this rank has read all sections
_POSTED = 4  # the last reduction whose parts are in the outbox
_CONSUMED = 5  # the last reduction that this rank has read from all outboxes
_LEFT = 6  # the last span that this rank has left by an exception
_SECTIONS = 7  # how often this rank has said where its sections lie; no stamp
_LABELS = 8  # from here on: what is in each slot of the outbox

NUM_SLOTS = 3  # reductions that a rank may be ahead of the slowest
_LATE = _LABELS + NUM_SLOTS  # the epoch that this rank left because a peer was late, and, in the low bits, 1 + which
_ALIGNMENT = 64  # bytes
_WANTS_COLLECTIVES, _IN_BACKWARD = 1, 2  # flags of _OPEN
_CALL_BITS, _SPAN_BITS = 20, 24
_YIELDS = 200
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_LIVENESS_S = 0.2


def _stamp(epoch: int, span: int, call: int = 0) -> int:
    """Return a number that grows with the epoch, then with the span in it, then with the call in that."""
    return (epoch << _SPAN_BITS | span) << _CALL_BITS | call


def slot_bytes(section_bytes: int, num_ranks: int) -> int:
    """Return what a reduction whose sections have ``section_bytes`` takes in an outbox."""
    return align(num_ranks * section_bytes, _ALIGNMENT)


def outbox_bytes(slot: int) -> int:
    """Return the bytes of an outbox whose slots have ``slot`` bytes."""
    return NUM_SLOTS * slot


@dataclass(frozen=True, slots=True)
class Host:
    """The ranks of a group that are processes of one host.

    Attributes:
        segments: one per rank, in the order of the group: header and outbox.
        pids: process ids, for telling a rank that is gone from one that is late.
        rank: this one's place in the group.
        members: their global ranks, as errors name them.
        places_of: ``places_of(rank, number)`` returns where the sections of ``rank`` lie, as it has said for the ``number``-th
            time: for each bucket of the link, in order.
    """

    segments: tuple[Segment, ...]
    pids: tuple[int, ...]
    rank: int
    members: tuple[int, ...]
    places_of: Callable[[int, int], Sequence[ArenaPlace]]


class HostLink:
    """A group whose ranks are processes of one host.

    Spans are counted from the last exception on: a rank that leaves a span by one enters a new epoch, the others follow with
    an error when they next look at it, and all meet in the first span of that epoch.  A backward ends for nobody before all
    ranks have done their part of it: then either every rank sets its gradients or none does.

    Args:
        host: the ranks.
        outbox: byte offset of the outbox in every segment.  slot_bytes: bytes of one of its slots.
        timeout_s: how long to wait for a rank that is alive.

    Attributes:
        gathers: those launched in this span and not waited for yet.
    """

    name = "shared memory"
    compares_contents = True

    def __init__(self, host: Host, outbox: int, slot_bytes: int, timeout_s: float) -> None:
        assert len(host.segments) == len(host.pids)
        assert _LATE < NUM_WORDS
        self.segments = host.segments
        self.rank = rank = host.rank
        self.size = len(host.segments)
        self._peers = tuple(other for other in range(self.size) if other != rank)
        self._words = tuple(segment.words for segment in host.segments)
        self._mine = self._words[rank]
        self._alive = {peer: Liveness(host.pids[peer]) for peer in self._peers}
        self._places_of, self._pids, self._names = host.places_of, host.pids, host.members
        self._places: dict[int, tuple[int, Sequence[ArenaPlace]]] = {}
        self._outbox = outbox
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._epoch = self._span = 0
        self._kind: SpanKind = "forward"
        self._num_gathers = self._num_reductions = 0
        self.gathers: list[_Gather] = []
        self._scatters: deque[_Scatter] = deque()
        self._parts: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    # ---- spans ----

    def open(self, kind: SpanKind, wants_collectives: bool) -> bool:
        what = f"the start of a {kind}"
        try:
            self._check_epochs(what)
            self._span += 1
            self._kind = kind
            self._num_gathers = self._num_reductions = 0
            start = _stamp(self._epoch, self._span)
            flags = _IN_BACKWARD * (kind == "backward")
            self._mine[_OPEN] = start | flags | wants_collectives
            self._wait(_OPEN, start, what)
            for peer in self._peers:
                self._check_entered(peer, start | flags, what)
            self._find_sections()
        except BaseException:
            self.abort()
            raise
        return not (wants_collectives or any(self._words[peer][_OPEN] & _WANTS_COLLECTIVES for peer in self._peers))

    def say_where(self, number: int) -> None:
        """Let the others know that this rank has said for the ``number``-th time where its sections lie."""
        self._mine[_SECTIONS] = number
        self._places.pop(self.rank, None)

    def _find_sections(self) -> None:
        for rank in range(self.size):
            number = self._words[rank][_SECTIONS]
            known = self._places.get(rank)
            if known is None or known[0] != number:
                self._places[rank] = number, self._places_of(rank, number)
                self._parts = {key: parts for key, parts in self._parts.items() if key[1] != rank}

    def _check_entered(self, peer: int, word: int, what: str) -> None:
        words = self._words[peer]
        if words[_LEFT] >> _CALL_BITS == word >> _CALL_BITS:
            return  # it was there: this rank may come to the same exception, and hears of the other's when it needs that rank
        found = words[_OPEN] & ~_WANTS_COLLECTIVES
        if found >> (_CALL_BITS + _SPAN_BITS) != self._epoch:
            self._check_epoch(peer, what)
        if found != word:
            other = "forward" if word & _IN_BACKWARD else "backward"
            raise TransportError(
                f"rank {self._names[peer]} starts a {other} where rank {self._names[self.rank]} starts a {self._kind}; every "
                "rank must make the same calls in the same order"
            )

    def close(self) -> None:
        for gather in list(self.gathers):
            gather.wait()
        last, start, what = (
            self._key(self._num_gathers - 1),
            _stamp(self._epoch, self._span),
            f"the end of a {self._kind}",
        )
        self._mine[_READ] = last
        if self._kind == "backward":
            self._mine[_CLOSED] = start
            self._wait(_CLOSED, start, what)
        elif self._num_gathers:
            for peer in self._peers:  # a rank that has made fewer all-gathers has left the span, or will
                words = self._words[peer]
                if words[_READ] < last and words[_CLOSED] < start:
                    self._wait_for(peer, _READ, last, what, _CLOSED, start)
        self._check_epochs(what)
        self._mine[_CLOSED] = start

    def abort(self) -> None:
        for gather in self.gathers:
            gather.forget()
        self.gathers.clear()
        self._scatters.clear()
        # One epoch for all that leave because of each other.
        newest = max(self._words[peer][_EPOCH] for peer in self._peers)
        self._mine[_LEFT] = _stamp(self._epoch, self._span)
        self._epoch = newest if newest > self._epoch else self._epoch + 1
        self._span = 0
        self._mine[_EPOCH] = self._epoch

    # ---- collectives ----

    def takes_gather(self, pieces: GatherEnds) -> bool:
        buckets = pieces.buckets()
        return bool(buckets) and all(bucket.number is not None for bucket in buckets)

    def takes_scatter(self, pieces: ScatterEnds, scale: Scale) -> bool:
        num_bytes = pieces.section_numel * pieces.dtype.itemsize
        return slot_bytes(num_bytes, self.size) <= self._slot_bytes and can_sum_in_parts(scale, self.size)

    def gather_staging(self, layout: Bucket, itemsize: int) -> tuple[int, bool]:
        return 0, False

    def scatter_staging(self, layout: Bucket, itemsize: int) -> int:
        return 0

    def all_gather(self, pieces: GatherEnds) -> Pending:
        gather = _Gather(self, pieces)
        self._num_gathers += 1
        self.gathers.append(gather)
        return gather

    def read_sections(self, pieces: GatherEnds) -> None:
        """Copy every rank's sections to the full parameters."""
        for bucket in pieces.buckets():
            for rank in range(self.size):
                torch_private.copy_all(bucket.full_parts(rank), self._section_parts(bucket, rank))
        self._mine[_READ] = self._key(self._num_gathers - len(self.gathers) - 1)

    def _section_parts(self, bucket: BucketEnds, rank: int) -> list[torch.Tensor]:
        assert bucket.number is not None
        key = (bucket.number, rank)
        parts = self._parts.get(key)
        if parts is None:
            place = self._places[rank][1][bucket.number]
            section = place.segment.tensor(place.offset, bucket.layout.section_numel, bucket.dtype)
            parts = self._parts[key] = section_parts(bucket.layout, section, rank)
        return parts

    def reduce_scatter(self, pieces: ScatterEnds, scale: Scale) -> Pending:
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

    def _fill_outbox(self, pieces: ScatterEnds, index: int) -> torch.Tensor:
        """Copy the gradients to the outbox and let go of them; return this rank's own section."""
        layout, numel = pieces.layout, pieces.section_numel
        if not layout.num_large:  # one copy of everything costs less than many of parts
            pieces.fill(self._view(self.rank, self._slot_start(index), self.size * numel, pieces.dtype))
            return self._outgoing(self.rank, self.rank, index, pieces)
        for peer in self._peers:
            pack_parts(layout, pieces.full_parts(peer), self._outgoing(self.rank, peer, index, pieces), peer)
        own = pieces.target()
        pack_parts(layout, pieces.full_parts(self.rank), own, self.rank)
        pieces.drop()
        return own

    def is_posted(self, index: int) -> bool:
        """True if every rank's parts of reduction ``index`` can be read."""
        key = self._key(index)
        return all(self._words[peer][_POSTED] >= key for peer in self._peers)

    def read_outboxes(self, pieces: ScatterEnds, scale: Scale, index: int, own: torch.Tensor) -> torch.Tensor:
        """Wait for every rank's parts of reduction ``index``; return their sum with ``own``, this rank's own section."""
        self._wait(_POSTED, self._key(index), f"gradients of {pieces.label}")
        self._compare_labels(pieces, index)
        sections = [
            own if rank == self.rank else self._outgoing(rank, self.rank, index, pieces) for rank in range(self.size)
        ]
        out = pieces.target()  # where ``own`` is not in the outbox, which must be free again, it is this
        sum_sections(pieces.layout, sections, scale, self.rank, out)
        self._mine[_CONSUMED] = self._key(index)
        return out

    def _outgoing(self, sender: int, receiver: int, index: int, pieces: ScatterEnds) -> torch.Tensor:
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
        return _stamp(self._epoch, self._span, index + 1)

    def _compare_labels(self, pieces: ScatterEnds, index: int) -> None:
        expected = _digest(pieces)
        for peer in self._peers:
            if self._words[peer][_LABELS + index % NUM_SLOTS] != expected:
                raise TransportError(
                    f"rank {self._names[self.rank]} reduces gradients of {pieces.label} ({pieces.section_numel} elements of "
                    f"{pieces.dtype} per rank) as number {index} of this backward, rank {self._names[peer]} reduces something "
                    "else. Every rank must run the same units in the same order and get gradients for the same parameters."
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

        for _ in range(_YIELDS):
            if is_there():
                return
            os.sched_yield()
        note(f"{WAITS}process {self._pids[peer]}", what)
        start = time.monotonic()
        sleep_s, look_s = _FIRST_SLEEP_S, _LIVENESS_S
        while not is_there():
            alarm.look()
            self._check_epochs(what)
            waited_s = time.monotonic() - start
            if waited_s > look_s:
                look_s = waited_s + _LIVENESS_S
                if not self._alive[peer].is_alive() and not is_there():
                    raise self._lost(peer, f"rank {self._names[self.rank]} waited {waited_s:.1f} s for it at {what}")
                if waited_s > self._timeout_s:
                    self._mine[_LATE] = self._epoch << _CALL_BITS | peer + 1
                    raise TransportError(
                        f"rank {self._names[self.rank]} waited {self._timeout_s:g} s for rank {self._names[peer]} at {what}: "
                        f"{self._last_sign(peer)}; every rank must make the same calls in the same order"
                    )
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _check_epochs(self, what: str) -> None:
        for peer in self._peers:
            self._check_epoch(peer, what)

    def _check_epoch(self, peer: int, what: str) -> None:
        if self._words[peer][_EPOCH] <= self._epoch:
            return
        gone = [p for p in self._peers if self._words[p][_EPOCH] <= self._epoch and not self._alive[p].is_alive()]
        mine, its = self._names[self.rank], self._names[peer]
        if gone:  # why the other one has left
            raise self._lost(gone[0], f"rank {mine} was on its way to {what}")
        for other in self._peers:
            epoch, late = divmod(self._words[other][_LATE], 1 << _CALL_BITS)
            if late and epoch == self._epoch < self._words[other][_EPOCH]:
                raise TransportError(
                    f"rank {self._names[other]} waited {self._timeout_s:g} s for rank {self._names[late - 1]} while rank "
                    f"{mine} was on its way to {what}; every rank must make the same calls in the same order"
                )
        raise TransportError(
            f"rank {its} left the forward or backward by an exception while rank {mine} was on its way to {what}; "
            f"see the error of rank {its}{cited(store_of_job(), [its])}"
        )

    def _last_sign(self, peer: int) -> str:
        """Say what the words of ``peer`` show that it has done last."""
        words, name = self._words[peer], self._names[peer]
        span, mine = words[_OPEN] >> _CALL_BITS, self._mine[_OPEN] >> _CALL_BITS
        if not span:
            return f"rank {name} had come to no forward yet"
        which = "the same" if span == mine else "an earlier" if span < mine else "a later"
        kind = "backward" if words[_OPEN] & _IN_BACKWARD else "forward"
        done = [
            f", {words[word] & (1 << _CALL_BITS) - 1} {what}"
            for word, what in ((_READ, "all-gathers read"), (_POSTED, "reductions begun"))
            if words[word] >> _CALL_BITS == span
        ]
        ended = ", done with its part" if words[_CLOSED] >> _CALL_BITS == span else ""
        return f"rank {name} was in {which} {kind} as rank {self._names[self.rank]}{''.join(done)}{ended}"

    def _lost(self, peer: int, where: str) -> TransportError:
        """Return the error for ``peer``, whose process has ended: what it did last, and what it said."""
        text = gone_in_words(store_of_job(), [self._names[peer]])
        return TransportError(f"{text}; {where}: {self._last_sign(peer)}. {LOOK_NEXT}")


class _Gather:
    """An all-gather that copies when it is waited for, at the latest when its span closes."""

    __slots__ = ("_link", "_pieces")
    holds_input = False

    def __init__(self, link: HostLink, pieces: GatherEnds) -> None:
        self._link = link
        self._pieces: GatherEnds | None = pieces

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

    def __init__(self, link: HostLink, pieces: ScatterEnds, scale: Scale, index: int, own: torch.Tensor) -> None:
        self._link = link
        self._pieces: ScatterEnds | None = pieces
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


def _digest(pieces: ScatterEnds) -> int:
    return zlib.crc32(f"{pieces.label} {pieces.section_numel} {pieces.dtype}".encode())

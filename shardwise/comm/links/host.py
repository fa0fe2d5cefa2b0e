"""Ranks of one host that read each other's shards and gradients in shared memory.

An all-gather copies every rank's section from where it is stored, without its owner's help: in a span nobody changes
shards.  A reduce-scatter copies each rank's parts of the gradients to the sender's outbox, from where that rank adds them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise import torch_private
from shardwise.comm.communicator import BucketEnds, GatherEnds, Pending, Scale, ScatterEnds
from shardwise.comm.links.arena import ArenaPlace
from shardwise.comm.links.in_place_sums import NUM_SUM_WORDS, Sums, SumSlots
from shardwise.comm.links.link import SpanKind
from shardwise.comm.links.mates import CLOSED, FIRST_FREE, HostGroup, Mates
from shardwise.comm.links.parts import can_sum_in_parts, pack_parts, section_parts, sum_sections
from shardwise.comm.links.segment import NUM_WORDS
from shardwise.errors import TransportError
from shardwise.layout.bucket import Bucket, align

_SECTIONS = FIRST_FREE  # how often this rank has said where its sections lie; no stamp
_READ = FIRST_FREE + 1  # the last all-gather for which this rank has read all sections
_POSTED = FIRST_FREE + 2  # the last reduction whose parts are in the outbox
_CONSUMED = FIRST_FREE + 3  # the last reduction that this rank has read from all outboxes
_LABELS = FIRST_FREE + 4  # from here on: what is in each slot of the outbox

NUM_SLOTS = 3  # reductions that a rank may be ahead of the slowest
_SUMS = _LABELS + NUM_SLOTS  # from here on: words of sums in place
NEXT_FREE = _SUMS + NUM_SUM_WORDS
_ALIGNMENT = 64  # bytes


def slot_bytes(section_bytes: int, num_ranks: int) -> int:
    """Return what a reduction whose sections have ``section_bytes`` takes in an outbox."""
    return align(num_ranks * section_bytes, _ALIGNMENT)


def outbox_bytes(slot: int) -> int:
    """Return the bytes of an outbox whose slots have ``slot`` bytes."""
    return NUM_SLOTS * slot


@dataclass(frozen=True, slots=True)
class Posted:
    """A reduction whose parts are in the outbox: which of its span, and this rank's own section."""

    index: int
    own: torch.Tensor


class HostLink:
    """A group whose ranks are processes of one host, or those of its ranks that are (for :mod:`tiers` on top of it).

    Args:
        host: the ranks.
        outbox: byte offset of the outbox in every segment.  slot_bytes: bytes of one of its slots.
        timeout_s: how long to wait for a rank that is alive.
        sum_slot_bytes: bytes of a slot for sums in place, behind the outbox; 0: there are none.

    Attributes:
        mates: the ranks of this host.  ranks: their numbers in the group.  place: this rank's among them.
        num_ranks: of the group.  members: the global rank of each of them, as errors name them.
        rank: this rank's number in the group.
        gathers: those launched in this span and not waited for yet.
        sums: of tensors of the ranks of this host alone.
    """

    name = "shared memory"
    compares_contents = True

    def __init__(
        self, host: HostGroup, outbox: int, slot_bytes: int, timeout_s: float, sum_slot_bytes: int = 0
    ) -> None:
        assert NEXT_FREE < NUM_WORDS
        self.mates = Mates(host, timeout_s, ((_READ, "all-gathers read"), (_POSTED, "reductions begun")))
        self.segments = host.segments
        self.rank = host.ranks[host.place]
        self.place, self.ranks, self.num_ranks, self.members = host.place, host.ranks, len(host.members), host.members
        self._places_of = host.places_of
        self._places: dict[int, tuple[int, Sequence[ArenaPlace]]] = {}
        self._outbox = outbox
        self._slot_bytes = slot_bytes
        self._num_gathers = self._num_reductions = 0
        self.gathers: list[_HostGather] = []
        self._scatters: deque[_HostScatter] = deque()
        self._parts: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        behind = outbox + outbox_bytes(slot_bytes)
        self.sums = Sums(self.mates, self.place, SumSlots(_SUMS, behind, sum_slot_bytes), self._view)

    # ---- spans ----

    def open(self, kind: SpanKind, wants_collectives: bool) -> bool:
        try:
            is_agreed = self.mates.open(kind, wants_collectives)
            self._num_gathers = self._num_reductions = 0
            self._find_sections()
        except BaseException:
            self.abort()
            raise
        return is_agreed

    def say_where(self, number: int) -> None:
        """Let the others know that this rank has said for the ``number``-th time where its sections lie."""
        self.mates.say(_SECTIONS, number)
        self._places.pop(self.place, None)

    def _find_sections(self) -> None:
        for place, rank in enumerate(self.ranks):
            number = self.mates.hear(place, _SECTIONS)
            known = self._places.get(place)
            if known is None or known[0] != number:
                self._places[place] = number, self._places_of(rank, number)
                self._parts = {key: parts for key, parts in self._parts.items() if key[1] != place}

    def close(self) -> None:
        for gather in list(self.gathers):
            gather.wait()
        self.mates.say(_READ, self.mates.stamp(self._num_gathers - 1))
        self.mates.close(self._wait_for_readers)

    def _wait_for_readers(self, what: str) -> None:
        mates, start, last = self.mates, self.mates.start, self.mates.stamp(self._num_gathers - 1)
        for place in mates.others if self._num_gathers else ():
            # A rank that has made fewer all-gathers has left the span, or will.
            mates.wait_for(
                place,
                lambda place=place: mates.hear(place, _READ) >= last or mates.hear(place, CLOSED) >= start,
                what,
            )

    def abort(self) -> None:
        for gather in self.gathers:
            gather.forget()
        self.gathers.clear()
        self._scatters.clear()
        self.sums.forget()
        self.mates.abort()

    # ---- all-gathers ----

    def takes_gather(self, pieces: GatherEnds) -> bool:
        buckets = pieces.buckets()
        return bool(buckets) and all(bucket.number is not None for bucket in buckets)

    def gather_staging(self, layout: Bucket, itemsize: int) -> tuple[int, bool]:
        return 0, False

    def all_gather(self, pieces: GatherEnds) -> Pending:
        gather = _HostGather(self, pieces)
        self._num_gathers += 1
        self.gathers.append(gather)
        return gather

    def read_sections(self, pieces: GatherEnds) -> None:
        """Copy the sections of this host's ranks to the full parameters."""
        for bucket in pieces.buckets():
            for place, rank in enumerate(self.ranks):
                torch_private.copy_all(bucket.full_parts(rank), self._section_parts(bucket, place))
        self.mates.say(_READ, self.mates.stamp(self._num_gathers - len(self.gathers) - 1))

    def _section_parts(self, bucket: BucketEnds, place: int) -> list[torch.Tensor]:
        assert bucket.number is not None
        key = (bucket.number, place)
        parts = self._parts.get(key)
        if parts is None:
            where = self._places[place][1][bucket.number]
            section = where.segment.tensor(where.offset, bucket.layout.section_numel, bucket.dtype)
            parts = self._parts[key] = section_parts(bucket.layout, section, self.ranks[place])
        return parts

    # ---- reductions ----

    def takes_scatter(self, pieces: ScatterEnds, scale: Scale) -> bool:
        num_bytes = pieces.section_numel * pieces.dtype.itemsize
        return slot_bytes(num_bytes, self.num_ranks) <= self._slot_bytes and can_sum_in_parts(scale, self.num_ranks)

    def scatter_staging(self, layout: Bucket, itemsize: int) -> int:
        return 0

    def reduce_scatter(self, pieces: ScatterEnds, scale: Scale) -> Pending:
        # Both sides of the slot must be free: this rank's own parts may still be in it, too.
        while self._scatters and self._scatters[0].posted.index <= self._num_reductions - NUM_SLOTS:
            self._scatters[0].wait()
        scatter = _HostScatter(self, pieces, scale, self.post(pieces))
        self._scatters.append(scatter)
        return scatter

    def post(self, pieces: ScatterEnds) -> Posted:
        """Copy the gradients for every rank of the group to the outbox, and let go of them.

        Waits until the others have read what was in the slot ``NUM_SLOTS`` reductions ago; this rank must have.
        """
        index = self._num_reductions
        self._num_reductions += 1
        if index >= NUM_SLOTS:
            self.mates.wait_for_all(_CONSUMED, self.mates.stamp(index - NUM_SLOTS), f"gradients of {pieces.label}")
        own = self._fill_outbox(pieces, index)
        self.mates.say(_LABELS + index % NUM_SLOTS, _digest(pieces))
        self.mates.say(_POSTED, self.mates.stamp(index))
        return Posted(index, own)

    def forget_scatter(self, scatter: _HostScatter) -> None:
        """Take note that ``scatter`` is delivered or cancelled."""
        if scatter in self._scatters:
            self._scatters.remove(scatter)

    def _fill_outbox(self, pieces: ScatterEnds, index: int) -> torch.Tensor:
        """Copy the gradients to the outbox and let go of them; return this rank's own section."""
        layout, numel = pieces.layout, pieces.section_numel
        if not layout.num_large:  # one copy of everything costs less than many of parts
            pieces.fill(self._view(self.place, self._slot_start(index), self.num_ranks * numel, pieces.dtype))
            return self._outgoing(self.place, self.rank, index, pieces)
        for rank in range(self.num_ranks):
            if rank != self.rank:
                pack_parts(layout, pieces.full_parts(rank), self._outgoing(self.place, rank, index, pieces), rank)
        own = pieces.target()
        pack_parts(layout, pieces.full_parts(self.rank), own, self.rank)
        pieces.drop()
        return own

    def is_posted(self, index: int) -> bool:
        """True if every rank's parts of reduction ``index`` can be read."""
        return self.mates.have_said(_POSTED, self.mates.stamp(index))

    def wait_posted(self, pieces: ScatterEnds, index: int) -> None:
        """Wait for every rank's parts of reduction ``index``.  Raises: TransportError if one reduces something else."""
        self.mates.wait_for_all(_POSTED, self.mates.stamp(index), f"gradients of {pieces.label}")
        expected = _digest(pieces)
        for place in self.mates.others:
            if self.mates.hear(place, _LABELS + index % NUM_SLOTS) != expected:
                its = self.members[self.ranks[place]]
                raise TransportError(
                    f"rank {self.members[self.rank]} reduces gradients of {pieces.label} ({pieces.section_numel} elements of "
                    f"{pieces.dtype} per rank) as number {index} of this backward, rank {its} reduces "
                    "something else. Every rank must run the same units in the same order and get gradients for the same "
                    "parameters."
                )

    def sum_posted(self, pieces: ScatterEnds, posted: Posted, scale: Scale, owner: int, out: torch.Tensor) -> None:
        """Sum what the ranks of this host have for rank ``owner`` of the group into ``out``; they have all posted it."""
        sections = [
            posted.own if rank == owner == self.rank else self._outgoing(place, owner, posted.index, pieces)
            for place, rank in enumerate(self.ranks)
        ]
        sum_sections(pieces.layout, sections, scale, owner, out)

    def free_slot(self, index: int) -> None:
        """Take note that this rank has read all that it needs of reduction ``index``."""
        self.mates.say(_CONSUMED, self.mates.stamp(index))

    def _outgoing(self, place: int, receiver: int, index: int, pieces: ScatterEnds) -> torch.Tensor:
        numel = pieces.section_numel
        start = self._slot_start(index) + receiver * numel * pieces.dtype.itemsize
        return self._view(place, start, numel, pieces.dtype)

    def _slot_start(self, index: int) -> int:
        return self._outbox + index % NUM_SLOTS * self._slot_bytes

    def _view(self, place: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        key = (place, start, numel, dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self.segments[place].tensor(start, numel, dtype)
        return view


class _HostGather:
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


class _HostScatter:
    """A reduction whose parts are in the outbox; the others' are read when they are there.

    This rank's own parts are copied too, so that gradients are not held for late ranks.
    """

    __slots__ = ("_link", "_pieces", "_scale", "posted")
    holds_input = False

    def __init__(self, link: HostLink, pieces: ScatterEnds, scale: Scale, posted: Posted) -> None:
        self._link = link
        self._pieces: ScatterEnds | None = pieces
        self._scale = scale
        self.posted = posted

    def is_done(self) -> bool:
        return self._pieces is None or self._link.is_posted(self.posted.index)

    def wait(self) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            link, index = self._link, self.posted.index
            link.forget_scatter(self)
            link.wait_posted(pieces, index)
            out = pieces.target()  # where the own section is not in the outbox, which must be free again, it is this
            link.sum_posted(pieces, self.posted, self._scale, link.rank, out)
            link.free_slot(index)
            pieces.deliver(out)

    def cancel(self) -> None:
        if self._pieces is not None:
            self._pieces = None
            self._link.forget_scatter(self)


def _digest(pieces: ScatterEnds) -> int:
    return zlib.crc32(f"{pieces.label} {pieces.section_numel} {pieces.dtype}".encode())

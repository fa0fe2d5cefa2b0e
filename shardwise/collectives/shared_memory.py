"""Links that only CPU ranks use: shared memory on one host, else an all-to-all in place of gloo's reduce-scatter.

In shared memory ranks read each other's shards and gradients.

An all-gather copies every rank's section from where it is stored, without its owner's help: no rank changes its shards
during a pass.  A reduce-scatter copies each rank's gradients to its outbox, from where the rank that owns the sum adds
them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.collectives.c10d import HostWork, all_to_all_rows
from shardwise.collectives.local_peers import (
    CLOSED,
    FIRST_FREE,
    HEADER_BYTES,
    NUM_WORDS,
    ArenaPlace,
    HostGroup,
    LocalPeers,
    Segment,
    SegmentAddress,
    collect_from,
    meet,
    take_shareable,
)
from shardwise.collectives.routes import (
    BucketEnds,
    ByBackend,
    GatherEnds,
    Handle,
    Link,
    LinkedBucket,
    LinkProvider,
    LinkUsers,
    OnceHandle,
    PassKind,
    Scale,
    ScatterEnds,
    SumContents,
    Transport,
    add_up,
    can_sum_in_parts,
    link_providers,
    pack_parts,
    section_parts,
    sum_sections,
    sums_something_else,
)
from shardwise.collectives.streams import BufferPool
from shardwise.errors import TransportError
from shardwise.layout import Bucket, align

# ---- Tensors that the ranks of one host sum in place, through memory that they share.
# Every rank copies its tensor to its slots, adds up one slice over all ranks, and copies the other slices from the
# ranks that added them: two copies and one sum of the tensor's bytes, spread over the ranks. A tensor that is longer
# than a slot is summed in chunks.
#
# A launch does not wait while slots are free: replicas may arrive late, and a rank that skips a sum is found at its
# next one. To rule out deadlocks, a rank adds up its slices of all earlier chunks before it waits for one.

NUM_SUM_SLOTS = 4  # chunks that a rank may be ahead of the slowest
MOST_SLOT_BYTES = 1 << 22
_ALIGNMENT = 64  # bytes of slots; elements of slices, which therefore end on different cache lines

# Words, counted from the first one that the link reserves for sums.
_SUM_POSTED = 0  # the last chunk that this rank has copied to its slot
_SUMMED = 1  # the last chunk whose slice this rank has added up
_SUM_CONSUMED = 2  # the last chunk of which this rank has read all slices
_SUM_LABELS = 3  # the labels of what the slots hold start here
NUM_SUM_WORDS = _SUM_LABELS + NUM_SUM_SLOTS

_CHUNK_BITS = 24
_WANTS_BACKEND = 1  # flag of a label: this rank wants the backend to sum the tensor, and has not copied it

View = Callable[[int, int, int, torch.dtype], torch.Tensor]


def sum_slot_bytes(most_bytes: int) -> int:
    """Return the bytes of one slot for sums of tensors that have ``most_bytes`` together."""
    return min(align(most_bytes, _ALIGNMENT), MOST_SLOT_BYTES)


def sums_bytes(slot: int) -> int:
    """Return the bytes of all slots of ``slot`` bytes each."""
    return NUM_SUM_SLOTS * slot


class Sums:
    """In-place sums of the ranks of one host.

    Args:
        local_peers: the ranks.  place: index of this rank among them.
        start: byte offset of the slots in every segment.  slot_bytes: of one slot; 0 if there are none.
        view: ``view(place, start, numel, dtype)`` returns memory of a rank's segment.
    """

    def __init__(self, local_peers: LocalPeers, place: int, start: int, slot_bytes: int, view: View) -> None:
        self._local_peers, self._place, self._num_ranks = local_peers, place, len(local_peers.others) + 1
        self._word, self._start, self._slot_bytes, self._view = _SUMS, start, slot_bytes, view
        self._num_chunks = 0
        self._chunks: deque[_Chunk] = deque()

    def takes(self, tensor: torch.Tensor, scale: Scale) -> bool:
        """True if ``tensor`` can be summed here; the same on every rank."""
        is_fit = bool(self._slot_bytes) and tensor.numel() > 0 and tensor.is_contiguous()
        return is_fit and can_sum_in_parts(scale, self._num_ranks)

    def all_reduce(
        self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None, by_backend: ByBackend
    ) -> Handle:
        """Launch the in-place sum of the contiguous ``tensor`` over the ranks; ``wait`` or the end of the pass completes it.

        Raises: TransportError if a rank is gone, or if an earlier sum whose slots are needed differs between ranks.
        """
        flat, divisor = tensor.view(-1), scale.over(self._num_ranks)
        summed = _Sum(self, divisor, contents, by_backend, _sum_digest(flat, divisor, contents))
        most = self._slot_bytes // flat.element_size()
        for number, start in enumerate(range(0, flat.numel(), most)):
            chunk = _Chunk(summed, self._num_chunks, number, flat[start : start + most])
            self._num_chunks += 1
            summed.last = chunk.index
            self._post(chunk)
        self.progress()
        return summed

    def end(self) -> None:
        """Wait for all sums."""
        self.finish(self._num_chunks - 1)

    def forget(self) -> None:
        """Abandon all sums after an exception, and count chunks from zero."""
        for chunk in self._chunks:
            chunk.of.is_over = True
        self._chunks.clear()
        self._num_chunks = 0

    def detach(self, cancelled: _Sum) -> None:
        """Stop writing to the tensor of ``cancelled``: its chunks continue with a copy.

        The other ranks still need this rank's slices of the sum.
        """
        for chunk in self._chunks:
            if chunk.of is cancelled:
                chunk.tensor = chunk.tensor.clone()

    # ---- chunks ----

    def finish(self, index: int) -> None:
        """Wait for the sum of chunk ``index`` and of those before it."""
        chunks = self._chunks
        for chunk in chunks:
            if chunk.index > index:
                break
            if not chunk.is_summed:
                self._wait(_SUM_POSTED, chunk.index, chunk)
                self._sum(chunk)
        while chunks and chunks[0].index <= index:
            self._wait(_SUMMED, chunks[0].index, chunks[0])
            self._take(chunks.popleft())

    def progress(self) -> None:
        """Do what needs no wait."""
        chunks, local_peers = self._chunks, self._local_peers
        for chunk in chunks:
            if not chunk.is_summed:
                is_posted = local_peers.have_reached(self._word + _SUM_POSTED, local_peers.long_stamp(chunk.index))
                if not is_posted or self._goes_by_backend(chunk):  # the backend's sum waits for the other ranks
                    break
                self._sum(chunk)
        while chunks and chunks[0].is_summed:
            if not local_peers.have_reached(self._word + _SUMMED, local_peers.long_stamp(chunks[0].index)):
                break
            self._take(chunks.popleft())

    def _wait(self, word: int, index: int, chunk: _Chunk) -> None:
        what = f"the sum of gradients of {_label(chunk.of.contents)}"
        self._local_peers.wait_for_all(self._word + word, self._local_peers.long_stamp(index), what)

    def _publish(self, word: int, chunk: _Chunk) -> None:
        self._local_peers.publish(self._word + word, self._local_peers.long_stamp(chunk.index))

    def _post(self, chunk: _Chunk) -> None:
        self.progress()
        if not chunk.index:
            self._local_peers.meet_after_exception(f"the sum of gradients of {_label(chunk.of.contents)}")
        free = chunk.index - NUM_SUM_SLOTS  # the chunk that used this slot before
        if free >= 0:
            self.finish(free)
            self._wait(_SUM_CONSUMED, free, chunk)
        wants_backend = chunk.of.by_backend.is_wanted
        # this rank's own slice is added from the tensor itself
        for place in () if wants_backend else self._local_peers.others:
            start, mine = self._slice(chunk, place)
            self._slot(self._place, chunk, start, mine.numel()).copy_(mine)
        self._chunks.append(chunk)
        self._local_peers.publish(self._label_word(chunk), chunk.label | (_WANTS_BACKEND if wants_backend else 0))
        self._publish(_SUM_POSTED, chunk)

    def _goes_by_backend(self, chunk: _Chunk) -> bool:
        """True if a rank wants the backend to sum; all ranks have posted ``chunk``."""
        word, others = self._label_word(chunk), self._local_peers.others
        return chunk.of.by_backend.is_wanted or any(
            self._local_peers.latest(place, word) & _WANTS_BACKEND for place in others
        )

    def _sum(self, chunk: _Chunk) -> None:
        """Add up this rank's slice over all ranks."""
        for place in self._local_peers.others:
            if self._local_peers.latest(place, self._label_word(chunk)) & ~_WANTS_BACKEND != chunk.label:
                raise TransportError(self._mismatch_text(chunk, place))
        chunk.goes_by_backend = self._goes_by_backend(chunk)
        start, total = self._slice(chunk, self._place)
        if chunk.goes_by_backend:
            if not chunk.number:
                chunk.of.sum_by_backend()
        elif total.numel():
            terms = [
                total if place == self._place else self._slot(place, chunk, start, total.numel())
                for place in range(self._num_ranks)
            ]
            add_up(terms, chunk.of.divisor, total)
            self._slot(self._place, chunk, start, total.numel()).copy_(total)
        chunk.is_summed = True
        self._publish(_SUMMED, chunk)

    def _take(self, chunk: _Chunk) -> None:
        """Copy the slices of the sum that other ranks have added up."""
        for place in () if chunk.goes_by_backend else self._local_peers.others:
            start, its = self._slice(chunk, place)
            its.copy_(self._slot(place, chunk, start, its.numel()))
        chunk.of.is_over = chunk.index == chunk.of.last
        self._publish(_SUM_CONSUMED, chunk)

    def _slice(self, chunk: _Chunk, place: int) -> tuple[int, torch.Tensor]:
        """Return the start, in elements, of the slice that the rank at ``place`` adds up, and the slice of ``chunk``."""
        numel = chunk.tensor.numel()
        each = align(-(-numel // self._num_ranks), _ALIGNMENT)
        start = min(place * each, numel)
        return start, chunk.tensor[start : start + each]

    def _slot(self, place: int, chunk: _Chunk, start: int, numel: int) -> torch.Tensor:
        dtype = chunk.tensor.dtype
        slot = self._slot_bytes // dtype.itemsize
        slots = self._view(place, self._start, NUM_SUM_SLOTS * slot, dtype)
        return slots.narrow(0, chunk.index % NUM_SUM_SLOTS * slot + start, numel)

    def _label_word(self, chunk: _Chunk) -> int:
        return self._word + _SUM_LABELS + chunk.index % NUM_SUM_SLOTS

    def _mismatch_text(self, chunk: _Chunk, place: int) -> str:
        mine, its = self._local_peers.name_of(self._place), self._local_peers.name_of(place)
        contents = chunk.of.contents
        return sums_something_else(_label(contents), 0 if contents is None else contents.number, mine, [its])


class _Sum:
    """The sum of one tensor.  It does not reference its chunks, which reference it: a cycle would keep gradients alive.

    Attributes:
        last: index of its last launched chunk.
        is_over: the sum is complete or abandoned.
    """

    __slots__ = ("_is_cancelled", "_sums", "by_backend", "contents", "digest", "divisor", "is_over", "last")
    holds_input = False

    def __init__(
        self, sums: Sums, divisor: float, contents: SumContents | None, by_backend: ByBackend, digest: int
    ) -> None:
        self._sums, self.by_backend = sums, by_backend
        self.divisor, self.contents, self.digest = divisor, contents, digest
        self._is_cancelled = self.is_over = False
        self.last = -1

    def sum_by_backend(self) -> None:
        assert not self._is_cancelled, "sums are cancelled only when a pass is aborted"
        self.by_backend.launch().wait()

    def is_done(self) -> bool:
        if not self.is_over:
            self._sums.progress()
        return self.is_over

    def wait(self) -> None:
        if not self.is_over:
            self._sums.finish(self.last)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._sums.detach(self)


@dataclass(slots=True, eq=False)
class _Chunk:
    """A part of a tensor that is being summed.

    Attributes:
        of: the sum of the whole tensor.  index: among all chunks.  number: among the chunks of its tensor.
        tensor: 1-D; this rank's values, then the sum.
        is_summed: this rank has added up its slice.  goes_by_backend: the backend has summed the whole tensor instead.
    """

    of: _Sum
    index: int
    number: int
    tensor: torch.Tensor
    is_summed: bool = False
    goes_by_backend: bool = False

    @property
    def label(self) -> int:
        return (self.of.digest << _CHUNK_BITS | self.number) << 1


def _label(contents: SumContents | None) -> str:
    return "a tensor" if contents is None else contents.label


def _sum_digest(flat: torch.Tensor, divisor: float, contents: SumContents | None) -> int:
    number = 0 if contents is None else contents.number
    return zlib.crc32(f"{_label(contents)} {number} {flat.numel()} {flat.dtype} {divisor}".encode())


_SECTIONS = FIRST_FREE  # how often this rank has published where its sections lie; no stamp
_READ = FIRST_FREE + 1  # the last all-gather for which this rank has read all sections
_POSTED = FIRST_FREE + 2  # the last reduction whose parts are in the outbox
_CONSUMED = FIRST_FREE + 3  # the last reduction that this rank has read from all outboxes
_LABELS = FIRST_FREE + 4  # the labels of what the slots of the outbox hold start here

NUM_SLOTS = 3  # reductions that a rank may be ahead of the slowest
_SUMS = _LABELS + NUM_SLOTS  # the words of in-place sums start here
assert _SUMS + NUM_SUM_WORDS < NUM_WORDS


def slot_bytes(section_bytes: int, num_ranks: int) -> int:
    """Return the bytes that a reduction with sections of ``section_bytes`` takes in an outbox."""
    return align(num_ranks * section_bytes, _ALIGNMENT)


def outbox_bytes(slot: int) -> int:
    """Return the bytes of an outbox with slots of ``slot`` bytes."""
    return NUM_SLOTS * slot


class _Sections:
    """Where the sections of all ranks lie, and the windows of the shards in them.

    Each rank posts where its own lie whenever that has changed, and counts in one of its words how often it has.

    Attributes:
        host: the ranks.
    """

    def __init__(self, host: HostGroup, local_peers: LocalPeers) -> None:
        self.host, self._local_peers = host, local_peers
        self._mine: Sequence[ArenaPlace] = ()
        self._num_posted = 0
        self._places: dict[int, tuple[int, Sequence[ArenaPlace]]] = {}
        self._parts: dict[tuple[int, int], list[torch.Tensor]] = {}

    def publish(self, places: Sequence[ArenaPlace]) -> None:
        """Publish where this rank's sections lie now, per bucket of the link, if that has changed."""
        if places != self._mine:
            self._num_posted += 1
            rows = [(*astuple(place.segment.address), place.offset) for place in places]
            self.host.exchange.post(f"sections/{self._num_posted}", json.dumps(rows))
            self._local_peers.publish(_SECTIONS, self._num_posted)
            self._mine = places  # if a post raised, the next pass tries again

    def find(self) -> None:
        """Look where the sections of all ranks lie now."""
        for rank in range(len(self.host.segments)):
            number = self._local_peers.latest(rank, _SECTIONS)
            known = self._places.get(rank)
            if known is None or known[0] != number:
                self._places[rank] = number, self._places_of(rank, number)
                self._parts = {key: parts for key, parts in self._parts.items() if key[1] != rank}

    def _places_of(self, rank: int, number: int) -> Sequence[ArenaPlace]:
        """Return the places that ``rank`` posted for the ``number``-th time."""
        if rank == self.host.rank or number == 0:
            return self._mine if number else ()
        found: list[ArenaPlace] = []
        for *address, offset in json.loads(collect_from(self.host.exchange, f"sections/{number}", [rank])[0]):
            try:
                found.append(ArenaPlace(Segment.open(SegmentAddress(*address)), offset))
            except OSError as error:
                mine, its = self.host.members[self.host.rank], self.host.members[rank]
                raise TransportError(f"rank {mine} cannot read the shards of rank {its}: {error}") from error
        return found

    def parts_of(self, bucket: BucketEnds, rank: int) -> list[torch.Tensor]:
        """Return the shards of ``rank``."""
        assert bucket.number is not None
        key = (bucket.number, rank)
        parts = self._parts.get(key)
        if parts is None:
            where = self._places[rank][1][bucket.number]
            section = where.segment.tensor(where.offset, bucket.layout.section_numel, bucket.dtype)
            parts = self._parts[key] = section_parts(bucket.layout, section, rank)
        return parts


class _Outbox:
    """The reductions of a pass: each rank copies its gradients to its outbox, from where their owners add them.

    Args:
        start: byte offset of the outbox in every segment.  slot_bytes: bytes of one of its slots.
        view: see :class:`Sums`.
    """

    def __init__(self, local_peers: LocalPeers, rank: int, start: int, slot_bytes: int, view: View) -> None:
        self._local_peers, self._rank, self._num_ranks = local_peers, rank, len(local_peers.others) + 1
        self._start, self._slot_bytes, self._view = start, slot_bytes, view
        self._num_launched = 0
        self._scatters: deque[_HostScatter] = deque()

    def begin(self) -> None:
        """Begin a pass."""
        self._num_launched = 0

    def abort(self) -> None:
        """Leave the pass after a failure."""
        self._scatters.clear()

    def takes(self, ends: ScatterEnds, scale: Scale) -> bool:
        """Return True if this reduction fits into a slot; the same on every rank."""
        num_bytes = slot_bytes(ends.section_numel * ends.dtype.itemsize, self._num_ranks)
        return num_bytes <= self._slot_bytes and can_sum_in_parts(scale, self._num_ranks)

    def launch(self, ends: ScatterEnds, scale: Scale) -> Handle:
        """Copy the gradients to the next slot."""
        # Both sides of the slot must be free: it may still hold this rank's own parts.
        while self._scatters and self._scatters[0].index <= self._num_launched - NUM_SLOTS:
            self._scatters[0].wait()
        index, local_peers = self._num_launched, self._local_peers
        self._num_launched += 1
        if index >= NUM_SLOTS:
            local_peers.wait_for_all(_CONSUMED, local_peers.stamp(index - NUM_SLOTS), f"gradients of {ends.label}")
        scatter = _HostScatter(self, ends, scale, index, self._fill(ends, index))
        local_peers.publish(_LABELS + index % NUM_SLOTS, _digest(ends))
        local_peers.publish(_POSTED, local_peers.stamp(index))
        self._scatters.append(scatter)
        return scatter

    def forget(self, scatter: _HostScatter) -> None:
        """Remove ``scatter``, which is delivered or cancelled."""
        if scatter in self._scatters:
            self._scatters.remove(scatter)

    def _fill(self, ends: ScatterEnds, index: int) -> torch.Tensor:
        """Copy the gradients to the outbox and release them; return this rank's own section."""
        layout, numel, rank = ends.layout, ends.section_numel, self._rank
        if not layout.num_large:  # one copy of the whole is cheaper than many of small parts
            ends.fill(self._view(rank, self._slot_start(index), self._num_ranks * numel, ends.dtype))
            return self._outgoing(rank, rank, index, ends)
        for other in self._local_peers.others:
            pack_parts(layout, ends.full_parts(other), self._outgoing(rank, other, index, ends), other)
        own = ends.target()
        pack_parts(layout, ends.full_parts(rank), own, rank)
        ends.drop()
        return own

    def is_posted(self, index: int) -> bool:
        """True if every rank's parts of reduction ``index`` can be read."""
        return self._local_peers.have_reached(_POSTED, self._local_peers.stamp(index))

    def sum_posted(self, ends: ScatterEnds, index: int, own: torch.Tensor, scale: Scale) -> torch.Tensor:
        """Wait for every rank's parts of reduction ``index``; return their sum for this rank, and free the slot.

        Raises: TransportError if a rank reduces something else.
        """
        local_peers, mine = self._local_peers, self._rank
        local_peers.wait_for_all(_POSTED, local_peers.stamp(index), f"gradients of {ends.label}")
        expected = _digest(ends)
        for rank in local_peers.others:
            if local_peers.latest(rank, _LABELS + index % NUM_SLOTS) != expected:
                raise TransportError(
                    f"rank {local_peers.name_of(mine)} reduces gradients of {ends.label} ({ends.section_numel} elements of "
                    f"{ends.dtype} per rank) as number {index} of this backward, rank {local_peers.name_of(rank)} reduces "
                    "something else. Every rank must run the same units in the same order and get gradients for the same "
                    "parameters."
                )
        sections = [own if r == mine else self._outgoing(r, mine, index, ends) for r in range(self._num_ranks)]
        out = ends.target()  # if the own section was not left in the outbox, it is this target
        sum_sections(ends.layout, sections, scale, mine, out)
        local_peers.publish(_CONSUMED, local_peers.stamp(index))
        return out

    def _outgoing(self, sender: int, receiver: int, index: int, ends: ScatterEnds) -> torch.Tensor:
        numel = ends.section_numel
        start = self._slot_start(index) + receiver * numel * ends.dtype.itemsize
        return self._view(sender, start, numel, ends.dtype)

    def _slot_start(self, index: int) -> int:
        return self._start + index % NUM_SLOTS * self._slot_bytes


class HostLink(Link):
    """The link of a group whose ranks are all processes of one host.

    Args:
        host: the ranks.
        slot_bytes: bytes of one slot of the outbox, which follows the header of every segment.
        timeout_s: how long to wait for a live rank.
        sum_slot_bytes: bytes of a slot for in-place sums, after the outbox; 0 if there are none.

    Attributes:
        local_peers: the ranks of the group.  sections: where their shards lie.
        gathers: those launched in this pass and not waited for yet.
        outbox: reductions.  sums: in-place sums.
    """

    name = "shared memory"
    compares_contents = True
    is_one_sided = True

    def __init__(self, host: HostGroup, slot_bytes: int, timeout_s: float, sum_slot_bytes: int = 0) -> None:
        local_peers = self.local_peers = LocalPeers(host, timeout_s)
        self.sections = _Sections(host, local_peers)
        self._num_gathers = 0
        self.gathers: list[_HostGather] = []
        tensor_at: View = functools.lru_cache(4096)(lambda place, *at: host.segments[place].tensor(*at))
        self.outbox = _Outbox(local_peers, host.rank, HEADER_BYTES, slot_bytes, tensor_at)
        behind = HEADER_BYTES + outbox_bytes(slot_bytes)
        self.sums = self._sums = Sums(local_peers, host.rank, behind, sum_slot_bytes, tensor_at)

    # ---- passes ----

    def open(self, kind: PassKind, wants_collectives: bool) -> bool:
        try:
            is_agreed = self.local_peers.open(kind, wants_collectives)
            self._num_gathers = 0
            self.outbox.begin()
            self.sections.find()
        except BaseException:
            self.abort()
            raise
        return is_agreed

    def close(self) -> None:
        for gather in list(self.gathers):
            gather.wait()
        self.local_peers.publish(_READ, self.local_peers.stamp(self._num_gathers - 1))
        self.local_peers.close(self._wait_for_readers)

    def _wait_for_readers(self, what: str) -> None:
        peers, last = self.local_peers, self.local_peers.stamp(self._num_gathers - 1)

        def has_read(place: int) -> bool:  # a rank with fewer all-gathers has left the pass, or will leave it
            return peers.latest(place, _READ) >= last or peers.latest(place, CLOSED) >= peers.start

        for place in peers.others if self._num_gathers else ():
            peers.wait_for(place, partial(has_read, place), what)

    def abort(self) -> None:
        for gather in self.gathers:
            gather.forget()
        self.gathers.clear()
        self.outbox.abort()
        self._sums.forget()
        self.local_peers.abort()

    def rest(self) -> None:
        host = self.sections.host
        segment = host.segments[host.rank]
        segment.mapping.madvise(mmap.MADV_REMOVE, HEADER_BYTES, segment.num_bytes - HEADER_BYTES)

    # ---- collectives ----

    def takes_gather(self, ends: GatherEnds) -> bool:
        buckets = ends.buckets()
        return bool(buckets) and all(bucket.number is not None for bucket in buckets)

    def all_gather(self, ends: GatherEnds) -> Handle:
        gather = _HostGather(self, ends)
        self._num_gathers += 1
        self.gathers.append(gather)
        return gather

    def read_sections(self, ends: GatherEnds) -> None:
        """Copy the sections of all ranks to the full parameters."""
        for bucket in ends.buckets():
            for rank in range(len(self.local_peers.others) + 1):
                torch_private.copy_all(bucket.full_parts(rank), self.sections.parts_of(bucket, rank))
        self.local_peers.publish(_READ, self.local_peers.stamp(self._num_gathers - len(self.gathers) - 1))

    def takes_scatter(self, ends: ScatterEnds, scale: Scale) -> bool:
        return self.outbox.takes(ends, scale)

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        return self.outbox.launch(ends, scale)


class _HostGather(OnceHandle[GatherEnds]):
    """An all-gather that copies when it is waited for, at the latest when its pass closes."""

    __slots__ = ("_link",)
    holds_input = False

    def __init__(self, link: HostLink, ends: GatherEnds) -> None:
        super().__init__(ends)
        self._link = link

    def is_done(self) -> bool:
        return True

    def finish(self, ends: GatherEnds) -> None:
        self._link.gathers.remove(self)
        self._link.read_sections(ends)

    def drop(self, ends: GatherEnds) -> None:
        self._link.gathers.remove(self)

    def forget(self) -> None:
        self._ends = None


class _HostScatter(OnceHandle[ScatterEnds]):
    """A reduction whose parts are in the outbox; the others' parts are read once they are posted.

    This rank's own parts are copied too, so that gradients stay alive no longer than their launch when other ranks are
    late.
    """

    __slots__ = ("_outbox", "_own", "_scale", "index")
    holds_input = False

    def __init__(self, outbox: _Outbox, ends: ScatterEnds, scale: Scale, index: int, own: torch.Tensor) -> None:
        super().__init__(ends)
        self._outbox, self._scale, self.index, self._own = outbox, scale, index, own

    def is_done(self) -> bool:
        return self._ends is None or self._outbox.is_posted(self.index)

    def finish(self, ends: ScatterEnds) -> None:
        self._outbox.forget(self)
        ends.deliver(self._outbox.sum_posted(ends, self.index, self._own, self._scale))

    def drop(self, ends: ScatterEnds) -> None:
        self._outbox.forget(self)


def _digest(ends: ScatterEnds) -> int:
    return zlib.crc32(f"{ends.label} {ends.section_numel} {ends.dtype}".encode())


# ---- gloo's reduce-scatter is an all-reduce: it sends twice the bytes, and sums in an order of its own.


class ExchangeLink(Link):
    """Reduce-scatters by an all-to-all, and a sum in rank order, with the bits of shared memory; gloo gathers.

    Args:
        group: a gloo group.
        pool: memory for staging.
    """

    name = "all-to-all"

    def __init__(self, group: dist.ProcessGroup, pool: BufferPool) -> None:
        self._group, self._pool, self._size = group, pool, group.size()

    def open(self, kind: PassKind, wants_collectives: bool) -> bool:
        words = torch.tensor([wants_collectives], dtype=torch.int32, device="cpu")
        # The backend itself, since tools count the collectives of torch.distributed.
        work = torch_private.backend_of(self._group, words.device).allreduce([words], dist.ReduceOp.MAX)
        HostWork(work, lambda _: None, words, None, self._group).wait()
        return not words.item()

    def takes_gather(self, ends: GatherEnds) -> bool:
        return False

    def takes_scatter(self, ends: ScatterEnds, scale: Scale) -> bool:
        return ends.section_numel > 0 and can_sum_in_parts(scale, self._size)

    def scatter_staging(self, layout: Bucket, itemsize: int) -> int:
        return 2 * self._size * layout.section_numel * itemsize

    def all_gather(self, ends: GatherEnds) -> Handle:
        raise AssertionError("takes_gather() is False: gathers are collectives of the backend")

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        numel, size = ends.section_numel * self._size, self._size
        flat, buffer = self._pool.acquire_tensor(2 * numel, ends.dtype)
        sent, received = flat[:numel], flat[numel:]
        ends.fill(sent)
        into, out_of = (half.view(torch.uint8).view(size, -1) for half in (received, sent))

        def end(received: torch.Tensor) -> None:
            out = ends.target()
            sum_sections(ends.layout, received.view(size, -1).unbind(), scale, self._group.rank(), out)
            ends.deliver(out)

        work = all_to_all_rows(into, out_of, self._group, async_op=True)
        return HostWork(work, end, received, buffer, self._group)


# ---- The link of one group: which transport its ranks choose, and where this rank's shards lie in shared memory.


@dataclass(frozen=True, slots=True)
class _AgreedSizes:
    """The sizes that must be equal on all ranks of a group; they fix the layout of every segment.

    Attributes:
        sections: dtype and number of elements of each bucket's section.
        slot_bytes: bytes of one slot of the outbox.
        sum_slot_bytes: bytes of one slot for in-place sums.
    """

    sections: tuple[tuple[str, int], ...]
    slot_bytes: int
    sum_slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a segment."""
        return HEADER_BYTES + outbox_bytes(self.slot_bytes) + sums_bytes(self.sum_slot_bytes)

    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


class LinkSetup:
    """Agrees on the link of one process group, and makes it; the units that use the link share this object.

    Args:
        process_group: the ranks.
        users: the units that gather, reduce and sum over the link.
        transport: what this rank allows; the ranks use what all of them allow.
        pool: memory for staging.
        timeout_s: how long to wait for another rank.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        users: LinkUsers,
        transport: Transport,
        pool: BufferPool,
        timeout_s: float,
    ) -> None:
        self._process_group = process_group
        self._users = [[weakref.ref(unit) for unit in each] for each in (users.gathers, users.reduces, users.sums)]
        self._transport: Transport = transport
        self._pool = pool
        self._timeout_s = timeout_s
        self._sizes: _AgreedSizes | None = None
        self._link: Link | None = None

    def prepare(self) -> Link | None:
        """Return the link for the next pass; make a new one at first use and after the sizes of shards have changed.

        Collective when it makes one.  Raises: DesyncError if a rank does not arrive or has shards of other sizes.
        """
        if self._sizes is not None and not isinstance(self._link, HostLink):
            return self._link
        users = LinkUsers(*([unit for ref in refs if (unit := ref()) is not None] for refs in self._users))
        buckets = [bucket for unit in users.gathers for bucket in unit.main_buckets if bucket.travels]
        if self._sizes is None or any(bucket.number is None for bucket in buckets):
            sizes = _sizes_of(users, self._process_group.size())
            if sizes != self._sizes:
                self._link = self._make(sizes)
                self._sizes = sizes  # if that raised, the next pass tries again
        if isinstance(self._link, HostLink):
            self._publish_sections(buckets, self._link)
        return self._link

    def _publish_sections(self, buckets: Sequence[LinkedBucket], link: HostLink) -> None:
        places: list[ArenaPlace] = []
        for number, bucket in enumerate(buckets):
            if bucket.place is None:
                bucket.move_to_shared_memory()
            if bucket.place is None:
                raise TransportError(
                    f"no shared memory is left for {bucket.layout.section_numel * bucket.dtype.itemsize} bytes of shards; "
                    "free memory, or call set_transport('gloo') on every rank"
                )
            bucket.number = number
            places.append(cast(ArenaPlace, bucket.place))  # take_shareable made it, as registered
        link.sections.publish(places)

    def is_for(self, users: LinkUsers, transport: Transport) -> bool:
        """True if this link was made for exactly these users and this transport."""
        mine = [[ref() for ref in refs] for refs in self._users]
        return mine == [users.gathers, users.reduces, users.sums] and self._transport == transport

    def _make(self, sizes: _AgreedSizes) -> Link | None:
        found = meet(self._process_group, self._transport, sizes.num_bytes, sizes.digest())
        if isinstance(found, HostGroup):
            return HostLink(found, sizes.slot_bytes, self._timeout_s, sizes.sum_slot_bytes)
        return None if found == "collective" else ExchangeLink(self._process_group, self._pool)


def can_link(process_group: dist.ProcessGroup, devices: Collection[torch.device]) -> bool:
    """True if a group may use a link for tensors on ``devices``: it has several ranks, on CPU, over gloo."""
    is_on_cpu = all(device.type == "cpu" for device in devices)
    return is_on_cpu and process_group.size() > 1 and torch_private.is_gloo(process_group)


def _sizes_of(users: LinkUsers, num_ranks: int) -> _AgreedSizes:
    buckets = [bucket for unit in users.gathers for bucket in unit.main_buckets if bucket.travels]
    sections = tuple((str(each.dtype), each.layout.section_numel) for each in buckets)
    reduced = [numel * itemsize for unit in users.reduces for numel, itemsize in unit.largest_reductions()]
    summed = sum(numel * itemsize for unit in users.sums for numel, itemsize in unit.largest_reductions())
    slot = slot_bytes(max(reduced, default=0), num_ranks)
    return _AgreedSizes(sections, slot, sum_slot_bytes(summed))


def register_transports() -> None:
    """Register these transports for groups of CPU ranks; ``shardwise/__init__.py`` calls it once."""
    link_providers.append(LinkProvider(can_link, take_shareable, LinkSetup))

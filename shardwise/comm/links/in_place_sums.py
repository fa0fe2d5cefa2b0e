"""Tensors that the ranks of one host sum in place, through memory that they share.

Every rank copies what it has to its slots, adds up one slice of what all have, and copies the others' slices from theirs: two
copies and a sum of the tensor's bytes, spread over the ranks.  What is longer than a slot goes in chunks.

A launch waits for nobody while slots are free: replicas may come late, and one that leaves a sum out is found by its next one.
Ranks never wait for a chunk before they have added up their slices of all earlier ones, so that nobody waits for somebody who
waits for them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.comm.communicator import Pending, Scale, SumContents
from shardwise.comm.links.link import ByBackend
from shardwise.comm.links.mates import Mates
from shardwise.comm.links.parts import add_up, can_sum_in_parts
from shardwise.comm.marks import sums_something_else
from shardwise.errors import TransportError
from shardwise.layout.bucket import align

NUM_SLOTS = 4  # chunks that a rank may be ahead of the slowest
MOST_SLOT_BYTES = 1 << 22
_ALIGNMENT = 64  # bytes of slots; elements of slices, whose ends are then on other cache lines

# Words, from the first one that the link gives on.
_POSTED = 0  # the last chunk that this rank has copied to its slot
_SUMMED = 1  # the last one of which it has added up its slice
_CONSUMED = 2  # the last one of which it has read all slices
_LABELS = 3  # from here on: what is in each slot
NUM_SUM_WORDS = _LABELS + NUM_SLOTS

_CHUNK_BITS = 24
_WANTS_BACKEND = 1  # flag of a label: this rank wants the backend to sum the tensor, and has not copied it

View = Callable[[int, int, int, torch.dtype], torch.Tensor]


def sum_slot_bytes(most_bytes: int) -> int:
    """Return the bytes of a slot for sums of tensors that have ``most_bytes`` together."""
    return min(align(most_bytes, _ALIGNMENT), MOST_SLOT_BYTES)


def sums_bytes(slot: int) -> int:
    """Return the bytes of all slots that have ``slot`` bytes each."""
    return NUM_SLOTS * slot


@dataclass(frozen=True, slots=True)
class SumSlots:
    """Where sums lie in every segment.

    Attributes:
        word: the first of :data:`NUM_SUM_WORDS`.  start: byte offset of the slots.
        num_bytes: of one; 0: there are none.
    """

    word: int
    start: int
    num_bytes: int


class Sums:
    """What ranks of one host sum.

    Args:
        mates: the ranks.  place: this rank's among them.
        slots: where.
        view: ``view(place, start, numel, dtype)`` returns memory of a rank's segment.
    """

    def __init__(self, mates: Mates, place: int, slots: SumSlots, view: View) -> None:
        self._mates, self._place, self._num_ranks = mates, place, len(mates.others) + 1
        self._word, self._start, self._slot_bytes, self._view = slots.word, slots.start, slots.num_bytes, view
        self._num_chunks = 0
        self._chunks: deque[_Chunk] = deque()

    def takes(self, tensor: torch.Tensor, scale: Scale) -> bool:
        """True if ``tensor`` can be summed here; the same on every rank."""
        is_fit = bool(self._slot_bytes) and tensor.numel() > 0 and tensor.is_contiguous()
        return is_fit and can_sum_in_parts(scale, self._num_ranks)

    def all_reduce(
        self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None, by_backend: ByBackend
    ) -> Pending:
        """Launch the sum of the contiguous ``tensor`` over the ranks, in place; ``wait`` or the end of the span ends it.

        Raises: TransportError if a rank is gone, or sums something else in an earlier sum whose slots are needed.
        """
        flat, divisor = tensor.view(-1), float(self._num_ranks) if scale.divisor is None else scale.divisor
        summed = _Sum(self, divisor, contents, by_backend, _digest(flat, divisor, contents))
        most = self._slot_bytes // flat.element_size()
        for number, start in enumerate(range(0, flat.numel(), most)):
            chunk = _Chunk(summed, self._num_chunks, number, flat[start : start + most])
            self._num_chunks += 1
            summed.last = chunk.index
            self._post(chunk)
        self.go_on()
        return summed

    def end(self) -> None:
        """Wait for all sums."""
        self.finish(self._num_chunks - 1)

    def forget(self) -> None:
        """Leave all sums as they are, after an exception; the ranks count anew."""
        for chunk in self._chunks:
            chunk.of.is_over = True
        self._chunks.clear()
        self._num_chunks = 0

    def keep_apart(self, cancelled: _Sum) -> None:
        """Let ``cancelled`` write to its tensor no more.  Others still need this rank's slices of it."""
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
                self._wait(_POSTED, chunk.index, chunk)
                self._sum(chunk)
        while chunks and chunks[0].index <= index:
            self._wait(_SUMMED, chunks[0].index, chunks[0])
            self._take(chunks.popleft())

    def go_on(self) -> None:
        """Do what can be done without waiting."""
        chunks, mates = self._chunks, self._mates
        for chunk in chunks:
            if not chunk.is_summed:
                is_posted = mates.have_said(self._word + _POSTED, mates.long_stamp(chunk.index))
                if not is_posted or self._goes_by_backend(chunk):  # the backend waits
                    break
                self._sum(chunk)
        while chunks and chunks[0].is_summed:
            if not mates.have_said(self._word + _SUMMED, mates.long_stamp(chunks[0].index)):
                break
            self._take(chunks.popleft())

    def _wait(self, word: int, index: int, chunk: _Chunk) -> None:
        what = f"the sum of gradients of {_label(chunk.of.contents)}"
        self._mates.wait_for_all(self._word + word, self._mates.long_stamp(index), what)

    def _say(self, word: int, chunk: _Chunk) -> None:
        self._mates.say(self._word + word, self._mates.long_stamp(chunk.index))

    def _post(self, chunk: _Chunk) -> None:
        self.go_on()
        if not chunk.index:
            self._mates.meet_after_exception(f"the sum of gradients of {_label(chunk.of.contents)}")
        free = chunk.index - NUM_SLOTS  # the chunk that was in the slot
        if free >= 0:
            self.finish(free)
            self._wait(_CONSUMED, free, chunk)
        wants_backend = chunk.of.by_backend.is_wanted
        for place in () if wants_backend else self._mates.others:  # the own slice is added where it is
            start, mine = self._slice(chunk, place)
            self._slot(self._place, chunk, start, mine.numel()).copy_(mine)
        self._chunks.append(chunk)
        self._mates.say(self._label_word(chunk), chunk.label | (_WANTS_BACKEND if wants_backend else 0))
        self._say(_POSTED, chunk)

    def _goes_by_backend(self, chunk: _Chunk) -> bool:
        """True if a rank wants that; all have posted ``chunk``."""
        word, others = self._label_word(chunk), self._mates.others
        return chunk.of.by_backend.is_wanted or any(self._mates.hear(place, word) & _WANTS_BACKEND for place in others)

    def _sum(self, chunk: _Chunk) -> None:
        """Add up this rank's slice of what all have posted."""
        for place in self._mates.others:
            if self._mates.hear(place, self._label_word(chunk)) & ~_WANTS_BACKEND != chunk.label:
                raise TransportError(self._in_words(chunk, place))
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
        self._say(_SUMMED, chunk)

    def _take(self, chunk: _Chunk) -> None:
        """Copy the others' slices of the sum."""
        for place in () if chunk.goes_by_backend else self._mates.others:
            start, its = self._slice(chunk, place)
            its.copy_(self._slot(place, chunk, start, its.numel()))
        chunk.of.is_over = chunk.index == chunk.of.last
        self._say(_CONSUMED, chunk)

    def _slice(self, chunk: _Chunk, place: int) -> tuple[int, torch.Tensor]:
        """Return where the slice that the rank at ``place`` adds up begins, in elements, and that of ``chunk.tensor``."""
        numel = chunk.tensor.numel()
        each = align(-(-numel // self._num_ranks), _ALIGNMENT)
        start = min(place * each, numel)
        return start, chunk.tensor[start : start + each]

    def _slot(self, place: int, chunk: _Chunk, start: int, numel: int) -> torch.Tensor:
        dtype = chunk.tensor.dtype
        slot = self._slot_bytes // dtype.itemsize
        slots = self._view(place, self._start, NUM_SLOTS * slot, dtype)
        return slots.narrow(0, chunk.index % NUM_SLOTS * slot + start, numel)

    def _label_word(self, chunk: _Chunk) -> int:
        return self._word + _LABELS + chunk.index % NUM_SLOTS

    def _in_words(self, chunk: _Chunk, place: int) -> str:
        mine, its = self._mates.name_of(self._place), self._mates.name_of(place)
        contents = chunk.of.contents
        return sums_something_else(_label(contents), 0 if contents is None else contents.number, mine, [its])


class _Sum:
    """A tensor that is summed, and how.  It knows none of its chunks, which know it: a circle would keep gradients alive.

    Attributes:
        last: index of its last chunk that was launched.
        is_over: the sum is there, or nobody will bring it.
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
        assert not self._is_cancelled, "only who leaves a span cancels sums"
        self.by_backend.launch().wait()

    def is_done(self) -> bool:
        if not self.is_over:
            self._sums.go_on()
        return self.is_over

    def wait(self) -> None:
        if not self.is_over:
            self._sums.finish(self.last)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._sums.keep_apart(self)


@dataclass(slots=True, eq=False)
class _Chunk:
    """A part of a tensor on its way.

    Attributes:
        of: the whole.  index: among all chunks.  number: among those of its tensor.
        tensor: 1-D, what this rank has, then the sum.
        is_summed: this rank has added up its slice.  goes_by_backend: the whole has been summed by the backend, then.
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


def _digest(flat: torch.Tensor, divisor: float, contents: SumContents | None) -> int:
    number = 0 if contents is None else contents.number
    return zlib.crc32(f"{_label(contents)} {number} {flat.numel()} {flat.dtype} {divisor}".encode())

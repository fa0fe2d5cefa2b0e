"""Averages gradients to their owners, run of parameters by run: after backward, or while it makes them.

Which runs are sent during a backward follows from what the ranks have agreed to average in the step before, and runs are
sent in one order, the last parameters first: so every rank makes the same calls, in whatever order its gradients come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.comm.board import Board
from shardwise.comm.buffers import BufferPool
from shardwise.comm.carve import carve
from shardwise.comm.owned import Owned, PendingReduce, reduce_to_owners
from shardwise.errors import StateError
from shardwise.layout.owners import OwnedSlice
from shardwise.optim.owned_gradient import GradientOwner, OwnedGradient, make_owned
from shardwise.zero.local_pieces import LocalPiece, elements_of
from shardwise.zero.share import Share

COPY_BELOW_BYTES = 8 * 1024  # a copy of this much takes as long as a storage of its own on the same memory
MOST_ON_THE_WAY = 4  # messages, each copied once out and once in

OwnerRef = Callable[[], GradientOwner | None]
Presence = tuple[torch.dtype | None, ...]


def own_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that this rank alone has made since the last averaging."""
    gradient = param.grad
    return gradient.fresh if isinstance(gradient, OwnedGradient) else gradient


def is_whole(local_pieces: Sequence[LocalPiece]) -> bool:
    """Return True if ``local_pieces``, those of one parameter, are all of it in one."""
    return len(local_pieces) == 1 and local_pieces[0].piece.numel == local_pieces[0].param.numel()


@dataclass(frozen=True, slots=True, eq=False)
class AveragingContext:
    """What an averaging works with.

    Attributes:
        staging: gives the pool that the buffers of messages on a device come from.
        owner_ref: weak reference to the optimizer, by which gradients know it.
    """

    share: Share
    board: Board
    staging: Callable[[torch.device], BufferPool]
    owner_ref: OwnerRef


@dataclass(frozen=True, slots=True)
class _SentGradient:
    """What ``.grad`` was when its gradient was sent, and what has been there since.

    ``before``: averaged earlier, to be added to.  ``left``: None, or what says that the average is on its way.
    """

    before: OwnedGradient | None
    dtype: torch.dtype
    left: OwnedGradient | None


@dataclass(slots=True, eq=False)
class Averaging:
    """One averaging, from its first message until :meth:`end`.

    Attributes:
        averages: of this rank's pieces, as they arrive.
        early: how many runs were sent before all gradients were there.
    """

    means: AveragingContext
    what: str
    early: int = 0
    averages: dict[OwnedSlice, torch.Tensor] = field(default_factory=dict[OwnedSlice, torch.Tensor])
    _sent: dict[int, _SentGradient] = field(default_factory=dict[int, _SentGradient])
    _on_the_way: list[tuple[list[OwnedSlice], PendingReduce]] = field(
        default_factory=list[tuple[list[OwnedSlice], PendingReduce]]
    )

    def presence(self) -> Presence:
        """Return the dtype of each parameter's gradient that is sent or to be sent, None where there is none."""
        found: list[torch.dtype | None] = []
        for index, param in enumerate(self.means.share.params):
            gradient, sent = own_gradient(param), self._sent.get(index)
            found.append(gradient.dtype if gradient is not None else sent.dtype if sent is not None else None)
        return tuple(found)

    def again(self) -> tuple[int, ...]:
        """Return the parameters whose gradients are sent and that have got another one since."""
        params = self.means.share.params
        return tuple(index for index in self._sent if own_gradient(params[index]) is not None)

    def send_early(self, indices: Sequence[int]) -> None:
        """Send the gradients of a run, in a backward; ``.grad`` says from here on that they are on their way."""
        self.early += 1
        while len(self._on_the_way) >= MOST_ON_THE_WAY or (self._on_the_way and self._on_the_way[0][1].has_come):
            self._receive()
        self._send(indices, leaves_sign=True)

    def end(self) -> None:
        """Send the rest, and put averages in the place of all gradients.

        While a message is on its way the next one is packed.
        """
        for indices in _messages(self.means.share):
            if len(self._on_the_way) > 1:
                self._receive()
            self._send(indices)
        self.receive_all()
        share = self.means.share
        for index, sent in self._sent.items():
            param = share.params[index]
            if param.grad is not sent.left:
                continue  # somebody has dropped it, or put another one there
            local_pieces = share.local_by_param[index]
            parts = [self.averages[local.piece] for local in local_pieces]
            if sent.before is not None:
                parts = [old.add_(new) for old, new in zip(sent.before.parts, parts, strict=True)]
            dtype = param.grad_dtype or sent.dtype  # another one if it was converted after its forward
            parts = [part.to(dtype) for part in parts]
            param.grad = make_owned(param, parts, is_whole(local_pieces), self.means.owner_ref, dtype)

    def receive_all(self) -> None:
        """Wait for all that is on its way."""
        while self._on_the_way:
            self._receive()

    def _send(self, indices: Sequence[int], leaves_sign: bool = False) -> None:
        means = self.means
        self._forget_dropped(indices)
        pieces = means.share.pieces_of(indices)
        owned = [self._owned(piece) for piece in pieces]
        dtype, device = owned[0].tensor.dtype, owned[0].tensor.device
        pending = reduce_to_owners(owned, means.board, self.what, means.staging(device))
        del owned
        self._on_the_way.append((pieces, pending))
        for index in indices:  # sent: what is not owned here is freed while the rest is on its way
            param = means.share.params[index]
            gradient = param.grad
            if index in self._sent and isinstance(gradient, OwnedGradient):
                gradient.fresh = None  # it is sent for the second time
                continue
            before = gradient if isinstance(gradient, OwnedGradient) else None
            left = None
            if leaves_sign:
                left = (
                    before
                    if before is not None
                    else make_owned(param, [], False, means.owner_ref, param.grad_dtype or dtype)
                )
                left.is_sent = True
            if before is not None:
                before.fresh = None
            self._sent[index] = _SentGradient(before, dtype, left)
            param.grad = left

    def _forget_dropped(self, indices: Sequence[int]) -> None:
        share = self.means.share
        dropped = [
            index for index in indices if index in self._sent and self._sent[index].left is not share.params[index].grad
        ]
        if dropped:
            self.receive_all()
        for index in dropped:
            del self._sent[index]
            for local in share.local_by_param[index]:
                self.averages.pop(local.piece, None)

    def _owned(self, piece: OwnedSlice) -> Owned:
        param = self.means.share.params[piece.tensor]
        gradient = own_gradient(param)
        if gradient is None:
            raise StateError(f"{self.what}: parameter {piece.tensor} lost its gradient meanwhile")
        return Owned(piece.owner, elements_of(piece, param, gradient))

    def _receive(self) -> None:
        pieces, pending = self._on_the_way.pop(0)
        averages, start = pending.wait(), 0
        for piece in pieces:
            if piece.owner != self.means.share.rank:
                continue
            param = self.means.share.params[piece.tensor]
            shape, stride = (param.shape, param.stride()) if piece.numel == param.numel() else ((piece.numel,), (1,))
            if piece.numel * averages.element_size() < COPY_BELOW_BYTES:
                window = averages[start : start + piece.numel].clone().as_strided(shape, stride)
            else:
                window = carve(averages, start, shape, None if param.is_contiguous() else stride)
            start += piece.numel
            if piece in self.averages:
                self.averages[piece] += window
            else:
                self.averages[piece] = window.detach()


def _messages(share: Share) -> Iterator[list[int]]:
    """Yield the parameters of each message, the last run first: those of a run that have gradients of one kind."""
    for run in reversed(share.runs):
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in run:
            gradient = own_gradient(share.params[index])
            if gradient is not None:
                kinds.setdefault((gradient.dtype, gradient.device), []).append(index)
        yield from kinds.values()


class EarlySends:
    """Hears of gradients as backward makes them, and sends each run that is complete; one for an optimizer.

    ``begin`` returns the averaging that is open, or starts one; it is gone with the optimizer.

    Attributes:
        is_held: gradients of this backward are to stay where they are, for a later one to add to.
    """

    def __init__(self, begin: weakref.WeakMethod[Callable[[], Averaging]]) -> None:
        self.is_held = False
        self._begin = begin
        self._share: Share | None = None
        self._handles: dict[int, RemovableHandle] = {}
        self._expected: list[tuple[int, ...]] = []
        self._dtypes: Presence = ()
        self._place: dict[int, int] = {}
        self._missing: list[set[int]] = []
        self._next = 0

    def listen(self, share: Share) -> None:
        """Hear of the gradients of what trains of ``share``; nothing is expected before :meth:`expect`."""
        self._share = share
        self.expect(())
        for index, param in enumerate(share.params):
            if index not in self._handles and param.is_leaf and param.requires_grad:
                self._handles[index] = param.register_post_accumulate_grad_hook(_hearing(weakref.ref(self), index))

    def __del__(self) -> None:
        for handle in self._handles.values():
            handle.remove()

    def expect(self, presence: Presence) -> None:
        """Send in the next backwards what the ranks have agreed that they had in this step; (): send nothing."""
        self._dtypes = presence
        self._expected = []
        assert self._share is not None  # listen() comes first
        share = self._share
        for run in reversed(share.runs) if presence else ():
            kinds: dict[tuple[torch.dtype | None, torch.device], list[int]] = {}
            for index in run:
                if presence[index] is not None:
                    kinds.setdefault((presence[index], share.params[index].device), []).append(index)
            self._expected += map(tuple, kinds.values())
        self.expect_again()

    def expect_again(self) -> None:
        """Begin again with nothing that has come."""
        self._place = {index: place for place, indices in enumerate(self._expected) for index in indices}
        self._missing = [set(indices) for indices in self._expected]
        self._next = 0

    def arrived(self, index: int) -> None:
        """Hear that a gradient of parameter ``index`` is in ``.grad``."""
        place = self._place.get(index)
        if self.is_held or place is None or index not in self._missing[place]:
            return
        self._missing[place].discard(index)
        while self._next < len(self._expected) and not self._missing[self._next]:
            indices = self._expected[self._next]
            if not self._are_as_expected(indices):
                self._place = {}  # what is not sent now is looked at when all of them are there
                return
            begin = self._begin()
            assert begin is not None  # who has this object has it
            self._next += 1
            begin().send_early(indices)

    def _are_as_expected(self, indices: Sequence[int]) -> bool:
        assert self._share is not None
        for index in indices:
            gradient = own_gradient(self._share.params[index])
            if gradient is None or gradient.dtype != self._dtypes[index] or gradient.layout != torch.strided:
                return False
        return True


def _hearing(sends_ref: weakref.ref[EarlySends], index: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(_: torch.Tensor) -> None:
        sends = sends_ref()
        if sends is not None:
            sends.arrived(index)

    return on_gradient

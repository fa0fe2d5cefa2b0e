"""The gradients of a share: averaged to owners outside of DDP, handed to the local step, clipped by the norm of all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shardwise.comm.board import Board
from shardwise.comm.buffers import BufferPool
from shardwise.comm.carve import carve
from shardwise.comm.owned import Owned, PendingReduce, reduce_to_owners
from shardwise.errors import StateError
from shardwise.layout.owners import Piece
from shardwise.optim.clip import Limit
from shardwise.optim.owned_gradient import GradientOwner, OwnedGradient, make_owned
from shardwise.zero.local_pieces import LocalPiece, elements_of, gradient_for
from shardwise.zero.same_gradients import are_same
from shardwise.zero.share import Share

MESSAGE_BYTES = 4 * 1024 * 1024  # two messages are on their way at a time, each copied once out and once in

COPY_BELOW_BYTES = 8 * 1024  # a copy of this much takes as long as a storage of its own on the same memory

OwnerRef = Callable[[], GradientOwner | None]


@dataclass(frozen=True, slots=True, eq=False)
class OwnerReduction:
    """One averaging of gradients to their owners.

    Attributes:
        staging: gives the pool that the buffers of messages on a device come from.
        owner_ref: weak reference to the optimizer, by which gradients know it.
        averages: of this rank's pieces, as they arrive.
    """

    share: Share
    board: Board
    staging: Callable[[torch.device], BufferPool]
    owner_ref: OwnerRef
    what: str
    averages: dict[Piece, torch.Tensor] = field(default_factory=dict[Piece, torch.Tensor])


def own_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that this rank alone has made since the last averaging."""
    gradient = param.grad
    return gradient.fresh if isinstance(gradient, OwnedGradient) else gradient


def _presence_of(share: Share) -> tuple[torch.dtype | None, ...]:
    """Return the dtype of each parameter's gradient to average, None where there is none: messages follow from it."""
    gradients = (own_gradient(param) for param in share.params)
    return tuple(None if gradient is None else gradient.dtype for gradient in gradients)


def _describe_presence(share: Share, presence: Sequence[torch.dtype | None]) -> list[str]:
    """Return ``presence`` in words, one line per parameter."""
    return [
        f"parameter {index} of shape {tuple(param.shape)} has {'no gradient' if dtype is None else f'one of {dtype}'}"
        for index, (param, dtype) in enumerate(zip(share.params, presence, strict=True))
    ]


@dataclass(slots=True)
class KnownGradients:
    """What the ranks know of each other's gradients, so that they ask once and not in every step.

    Attributes:
        is_compared: gradients like those of the last step were the same on all ranks.
        presences: of which parameters there may be gradients to average: the ranks have agreed on each of them.
    """

    is_compared: bool = False
    presences: set[tuple[torch.dtype | None, ...]] = field(default_factory=set[tuple[torch.dtype | None, ...]])

    def check(self, share: Share, board: Board, what: str, *, has_inputs: bool = True, only_warn: bool = False) -> None:
        """Ask whether the gradients may be stepped on, if that is not known; options as for :func:`are_same`.

        Raises: DesyncError on every rank if they differ between ranks; StateError if only some have been averaged.
        """
        if board.size > 1 and not check_averaged(share, what) and not self.is_compared:
            self.is_compared = are_same(share, board, what, has_inputs=has_inputs, only_warn=only_warn)

    def agree_on_presence(self, share: Share, board: Board, what: str) -> None:
        """Raises: DesyncError on every rank if ranks have gradients of other parameters to average."""
        presence = _presence_of(share)
        if presence not in self.presences:
            board.agree(what, _describe_presence(share, presence))
            self.presences.add(presence)


def reduce_to_pieces(run: OwnerReduction) -> None:
    """Average all gradients, each on its owner only, and free them everywhere else, message by message.

    While a message is on its way the next one is packed.
    """
    former: dict[int, tuple[OwnedGradient | None, torch.dtype]] = {}
    on_the_way: list[tuple[list[Piece], PendingReduce]] = []
    for indices in _messages(run.share):
        on_the_way.append(_launch(run, indices, former))
        if len(on_the_way) > 1:
            _finish(run, *on_the_way.pop(0))
    for message in on_the_way:
        _finish(run, *message)
    for index, (before, dtype) in former.items():
        local_pieces = run.share.local_by_param[index]
        parts = [run.averages[local.piece] for local in local_pieces]
        if before is not None:
            parts = [old.add_(new) for old, new in zip(before.parts, parts, strict=True)]
        param = run.share.params[index]
        param.grad = make_owned(param, parts, _is_whole(local_pieces), run.owner_ref, dtype)


def _messages(share: Share) -> Iterator[list[int]]:
    """Yield the parameters of each message: of one dtype and device, about ``MESSAGE_BYTES``."""
    waiting: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    size: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, param in enumerate(share.params):
        gradient = own_gradient(param)
        if gradient is None:
            continue
        key = (gradient.dtype, gradient.device)
        waiting.setdefault(key, []).append(index)
        size[key] = size.get(key, 0) + gradient.numel() * gradient.element_size()
        if size[key] >= MESSAGE_BYTES:
            yield waiting.pop(key)
            size[key] = 0
    yield from waiting.values()


def _launch(
    run: OwnerReduction, indices: Sequence[int], former: dict[int, tuple[OwnedGradient | None, torch.dtype]]
) -> tuple[list[Piece], PendingReduce]:
    pieces = run.share.pieces_of(indices)
    owned = [_owned(run, piece) for piece in pieces]
    dtype, device = owned[0].tensor.dtype, owned[0].tensor.device
    pending = reduce_to_owners(owned, run.board, run.what, run.staging(device))
    del owned
    for index in indices:  # sent: what is not owned here is freed while the rest is on its way
        param = run.share.params[index]
        before = param.grad if isinstance(param.grad, OwnedGradient) else None
        if before is not None:
            before.fresh = None
        former[index] = (before, dtype)
        param.grad = None
    return pieces, pending


def _owned(run: OwnerReduction, piece: Piece) -> Owned:
    param = run.share.params[piece.tensor]
    gradient = own_gradient(param)
    if gradient is None:
        raise StateError(f"{run.what}: parameter {piece.tensor} lost its gradient meanwhile")
    return Owned(piece.owner, elements_of(piece, param, gradient))


def _finish(run: OwnerReduction, pieces: Sequence[Piece], pending: PendingReduce) -> None:
    averages, start = pending.wait(), 0
    for piece in pieces:
        if piece.owner != run.share.rank:
            continue
        param = run.share.params[piece.tensor]
        shape, stride = (param.shape, param.stride()) if piece.numel == param.numel() else ((piece.numel,), (1,))
        if piece.numel * averages.element_size() < COPY_BELOW_BYTES:
            window = averages[start : start + piece.numel].clone()
            run.averages[piece] = window.as_strided(shape, stride).detach()
        else:
            run.averages[piece] = carve(averages, start, shape, None if param.is_contiguous() else stride).detach()
        start += piece.numel


def _is_whole(local_pieces: Sequence[LocalPiece]) -> bool:
    return len(local_pieces) == 1 and local_pieces[0].piece.numel == local_pieces[0].param.numel()


def mark_spent(share: Share, owner_ref: OwnerRef) -> None:
    """Say of all gradients that a step in backward has used them, and free those that are not whole on this rank."""
    for index, param in enumerate(share.params):
        gradient = param.grad
        if gradient is None:
            continue
        local_pieces = share.local_by_param[index]
        is_whole = share.partition == "whole" and _is_whole(local_pieces)
        owned = make_owned(param, [gradient] if is_whole else [], is_whole, owner_ref, gradient.dtype)
        owned.is_spent = True
        param.grad = owned


@contextmanager
def attached(share: Share, received: Mapping[Piece, torch.Tensor] | None = None) -> Generator[None, None, None]:
    """Give the tensors of the local optimizer plain gradients for a while.

    ``received``: from another rank, in place of this rank's.
    """
    before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    try:
        for local in share.local_pieces:
            gradient = local.param.grad
            if received is None and local.is_param and not isinstance(gradient, OwnedGradient):
                continue
            before.append((local.tensor, local.tensor.grad))
            local.tensor.grad = received.get(local.piece) if received is not None else _plain(share, local, gradient)
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def _plain(share: Share, local: LocalPiece, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    if not isinstance(gradient, OwnedGradient):
        return gradient_for(local, gradient)
    parts = gradient.usable_parts()
    if gradient.is_whole:
        return gradient_for(local, parts[0])
    return parts[share.local_by_param[local.piece.tensor].index(local)]


def check_averaged(share: Share, what: str) -> bool:
    """Return True if gradients have been averaged to their owners, False if they are plain or there are none.

    Raises: StateError if some came after the averaging, which a step would leave out or take as if they were of all ranks.
    """
    if OwnedGradient not in {type(param.grad) for param in share.params}:
        return False
    for index, param in enumerate(share.params):
        if isinstance(param.grad, OwnedGradient):
            param.grad.usable_parts()
        elif param.grad is not None:
            raise StateError(
                f"{what}: parameter {index} of shape {tuple(param.shape)} has a gradient of this rank alone, others have "
                "been averaged to their owners; call reduce_gradients() after the last backward"
            )
    return True


def clip_gradients(share: Share, owner: GradientOwner | None, limit: Limit) -> torch.Tensor:
    """Scale all gradients to ``limit``, each rank reading its own elements only; return the norm before.

    Plain gradients must be the same on all ranks, or be this rank's alone to judge (``owner`` None: nothing is exchanged).
    """
    gradients = [param.grad for param in share.params if param.grad is not None]
    usable = {id(each): each.usable_parts() for each in gradients if isinstance(each, OwnedGradient)}
    counted: list[torch.Tensor] = gradients
    if owner is not None:
        plain = ((local, local.param.grad) for local in share.local_pieces)
        own = [gradient_for(local, each) for local, each in plain if each is not None and id(each) not in usable]
        counted = own + [part for parts in usable.values() for part in parts]
    power = limit.power(counted, share.params[0].device)
    if owner is not None:
        power = owner.sum_over_ranks(power, limit.is_max)
    scaled = [part for each in gradients for part in usable.get(id(each), [each])]
    return limit.hold(power, scaled, [gradient.dtype for gradient in gradients])

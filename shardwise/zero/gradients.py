"""The gradients of a share: compared between ranks, handed to the local step, clipped by the norm of all."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shardwise.comm.board import Board
from shardwise.errors import StateError
from shardwise.layout.owners import OwnedSlice
from shardwise.optim.clip import Limit
from shardwise.optim.owned_gradient import GradientOwner, OwnedGradient, make_owned
from shardwise.zero.averaging import Averaging, OwnerRef, Presence, is_whole
from shardwise.zero.local_pieces import LocalPiece, gradient_for
from shardwise.zero.same_gradients import are_same
from shardwise.zero.share import Share


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
        presences: of which parameters there may be gradients to average, which of them twice, and how many messages were
            sent early: the ranks have agreed on each of them.
    """

    is_compared: bool = False
    presences: set[tuple[Presence, tuple[int, ...], int]] = field(
        default_factory=set[tuple[Presence, tuple[int, ...], int]]
    )

    def check(self, share: Share, board: Board, what: str, *, has_inputs: bool = True, only_warn: bool = False) -> None:
        """Ask whether the gradients may be stepped on, if that is not known; options as for :func:`are_same`.

        Raises: DesyncError on every rank if they differ between ranks; StateError if only some have been averaged.
        """
        if board.size > 1 and not check_averaged(share, what) and not self.is_compared:
            self.is_compared = are_same(share, board, what, has_inputs=has_inputs, only_warn=only_warn)

    def agree_on_presence(self, run: Averaging, presence: Presence) -> None:
        """Raises: DesyncError on every rank if ranks have gradients of other parameters to average."""
        share, again = run.means.share, run.again()
        key = (presence, again, run.early)
        if key not in self.presences:
            facts = _describe_presence(share, presence)
            facts += [f"{run.early} messages were sent in backward", f"parameters {again} got gradients after that"]
            run.means.board.agree(run.what, facts)
            self.presences.add(key)


def mark_spent(share: Share, owner_ref: OwnerRef) -> None:
    """Say of all gradients that a step in backward has used them, and free those that are not whole on this rank."""
    for index, param in enumerate(share.params):
        gradient = param.grad
        if gradient is None:
            continue
        local_pieces = share.local_by_param[index]
        here = share.partition == "whole" and is_whole(local_pieces)
        # Of the gradient's shape, not the parameter's: whose new values may be on their way.
        owned = make_owned(gradient, [gradient] if here else [], here, owner_ref, gradient.dtype)
        owned.is_spent = True
        param.grad = owned


@contextmanager
def attached(share: Share, received: Mapping[OwnedSlice, torch.Tensor] | None = None) -> Generator[None, None, None]:
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

"""Gradients to the pieces of their owners, outside of DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.api.zero_pieces import LocalPiece, gradient_for, view_of
from shardwise.comm.owners import Owned, PendingReduce, reduce_to_owners
from shardwise.errors import StateError
from shardwise.layout.owners import Piece

if TYPE_CHECKING:
    from shardwise.api.zero import ZeroRedundancyOptimizer

MESSAGE_BYTES = 4 * 1024 * 1024  # two messages are on their way at a time, each copied once out and once in


def piece_gradient(piece: Piece, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of the parameter's ``gradient`` that belong to ``piece``, 1-D in the parameter's order."""
    return gradient_for(LocalPiece(piece, param, view_of(piece, param)), gradient).reshape(-1)


def reduce_to_pieces(zero: ZeroRedundancyOptimizer) -> None:
    """Average all gradients, each on its owner only, and free them everywhere else, message by message.

    While a message is on its way the next one is packed.
    """
    what = f"reduce_gradients() for step {zero.num_steps + 1}"
    on_the_way: list[tuple[list[LocalPiece], PendingReduce]] = []

    def send(pieces: list[Piece]) -> None:
        on_the_way.append(_launch(zero, pieces, what))
        if len(on_the_way) > 1:
            _finish(*on_the_way.pop(0))

    messages: dict[tuple[torch.dtype, torch.device], list[Piece]] = {}
    size: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, param in enumerate(zero.all_params):
        if param.grad is None:
            continue
        key = (param.grad.dtype, param.grad.device)
        messages.setdefault(key, []).extend(zero.pieces_by_param[index])
        size[key] = size.get(key, 0) + param.grad.numel() * param.grad.element_size()
        if size[key] >= MESSAGE_BYTES:
            send(messages.pop(key))
            size[key] = 0
    for pieces in messages.values():
        send(pieces)
    for message in on_the_way:
        _finish(*message)


def _launch(zero: ZeroRedundancyOptimizer, pieces: list[Piece], what: str) -> tuple[list[LocalPiece], PendingReduce]:
    owned: list[Owned] = []
    for piece in pieces:
        param = zero.all_params[piece.tensor]
        if param.grad is None:
            raise StateError(f"{what}: parameter {piece.tensor} lost its gradient meanwhile")
        owned.append(Owned(piece.owner, piece_gradient(piece, param, param.grad)))
    pending = reduce_to_owners(owned, zero.board, what, zero.staging(owned[0].tensor.device))
    del owned
    for piece in pieces:
        zero.all_params[piece.tensor].grad = None
    mine = {local.piece: local for local in zero.local_pieces}
    return [mine[piece] for piece in pieces if piece in mine], pending


def _finish(own: list[LocalPiece], pending: PendingReduce) -> None:
    for local, average in zip(own, pending.wait(), strict=True):
        local.tensor.grad = average.as_strided(local.tensor.shape, local.tensor.stride())

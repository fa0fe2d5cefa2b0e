"""Gradients to the pieces of their owners, outside of DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.api.zero_pieces import LocalPiece, gradient_for, view_of
from shardwise.comm.owners import Owned, reduce_to_owners
from shardwise.errors import StateError
from shardwise.layout.owners import Piece

if TYPE_CHECKING:
    from shardwise.api.zero import ZeroRedundancyOptimizer

MESSAGE_BYTES = 25 * 1024 * 1024  # as DDP's buckets: bounds the copies that are alive at a time


def piece_gradient(piece: Piece, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of the parameter's ``gradient`` that belong to ``piece``, 1-D in the parameter's order."""
    return gradient_for(LocalPiece(piece, param, view_of(piece, param)), gradient).reshape(-1)


def reduce_to_pieces(zero: ZeroRedundancyOptimizer) -> None:
    """Average all gradients, each on its owner only, and free them everywhere else, message by message."""
    what = f"reduce_gradients() for step {zero.num_steps + 1}"
    messages: dict[tuple[torch.dtype, torch.device], list[Piece]] = {}
    size: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, param in enumerate(zero.all_params):
        if param.grad is None:
            continue
        key = (param.grad.dtype, param.grad.device)
        messages.setdefault(key, []).extend(zero.pieces_by_param[index])
        size[key] = size.get(key, 0) + param.grad.numel() * param.grad.element_size()
        if size[key] >= MESSAGE_BYTES:
            _reduce(zero, messages.pop(key), what)
            size[key] = 0
    for pieces in messages.values():
        _reduce(zero, pieces, what)


def _reduce(zero: ZeroRedundancyOptimizer, pieces: list[Piece], what: str) -> None:
    owned: list[Owned] = []
    for piece in pieces:
        param = zero.all_params[piece.tensor]
        if param.grad is None:
            raise StateError(f"{what}: parameter {piece.tensor} lost its gradient meanwhile")
        owned.append(Owned(piece.owner, piece_gradient(piece, param, param.grad)))
    pending = reduce_to_owners(owned, zero.board, what)
    del owned
    for piece in pieces:
        zero.all_params[piece.tensor].grad = None
    mine = {local.piece: local for local in zero.local_pieces}
    own = [mine[piece] for piece in pieces if piece in mine]
    for local, average in zip(own, pending.wait(), strict=True):
        local.tensor.grad = average.clone().as_strided(local.tensor.shape, local.tensor.stride())

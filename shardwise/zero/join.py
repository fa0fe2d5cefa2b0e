"""Uneven inputs: what a ZeroRedundancyOptimizer does in torch's ``Join`` on ranks that have run out of inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.algorithms.join import JoinHook

from shardwise.comm.board import Board
from shardwise.comm.owned import ranks_that_are, receive_tensor, send_tensor
from shardwise.layout.owners import OwnedSlice
from shardwise.zero.local_pieces import elements_of, flat_view
from shardwise.zero.share import Share


class ZeroJoinHook(JoinHook):
    """Step along with the active ranks.

    ``step`` makes the step that they make now, with their gradients; ``end`` ends the exchange of gradients.
    """

    def __init__(self, step: Callable[[], object], end: Callable[[], object]) -> None:
        self._step, self._end = step, end

    def main_hook(self) -> None:
        """Update this rank's share and pass it on."""
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out of inputs."""
        self._end()


def share_gradients(share: Share, board: Board, is_active: bool, what: str) -> dict[OwnedSlice, torch.Tensor] | None:
    """Give ranks that have joined the gradients of their pieces, from the first active rank.  Collective.

    Returns what this rank has received; None on active ranks, which have gradients of their own.  DDP leaves a joined
    rank with the gradients of its own last input; stepping on those, as torch's class does, would make its share of the
    parameters drift.
    """
    active = ranks_that_are(is_active, board, share.params[0].device, what)
    if not active:
        return None
    received: dict[OwnedSlice, torch.Tensor] | None = None
    for rank in range(board.size):
        if rank in active:
            continue
        if board.rank == active[0]:
            _send(share, rank, board, what)
        elif board.rank == rank:
            received = _receive(share, active[0], board, what)
    return received


def _send(share: Share, to: int, board: Board, what: str) -> None:
    theirs = [piece for piece in share.pieces if piece.owner == to]
    if not theirs:
        return
    gradients = [share.params[piece.tensor].grad for piece in theirs]
    is_present = [gradient is not None for gradient in gradients]
    send_tensor(torch.tensor(is_present, dtype=torch.uint8, device=share.params[0].device), to, board, what)
    for piece, gradient in zip(theirs, gradients, strict=True):
        if gradient is not None:
            param = share.params[piece.tensor]
            elements = elements_of(piece, param, gradient).to(param.grad_dtype or param.dtype)
            send_tensor(elements.contiguous(), to, board, what)


def _receive(share: Share, source: int, board: Board, what: str) -> dict[OwnedSlice, torch.Tensor]:
    received: dict[OwnedSlice, torch.Tensor] = {}
    if not share.local_pieces:
        return received
    mask = torch.zeros(len(share.local_pieces), dtype=torch.uint8, device=share.params[0].device)
    receive_tensor(mask, source, board, what)
    for local, is_present in zip(share.local_pieces, mask.tolist(), strict=True):
        if is_present:
            # Fused optimizers pair parameter and gradient by memory order: equal shapes are not enough.
            gradient = torch.empty_like(local.tensor, dtype=local.param.grad_dtype, requires_grad=False)
            receive_tensor(flat_view(gradient), source, board, what)
            received[local.piece] = gradient
    return received

"""Uneven inputs: what a ZeroRedundancyOptimizer does in torch's ``Join`` on ranks that have run out of inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms.join import JoinHook

from shardwise.comm.owned import ranks_that_are, receive_tensor, send_tensor
from shardwise.layout.owners import Piece
from shardwise.zero.pieces import gradient_for, make_local

if TYPE_CHECKING:
    from shardwise.api.zero import ZeroRedundancyOptimizer


class ZeroJoinHook(JoinHook):
    """Step along with the active ranks: update this rank's share and pass it on."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self.zero = zero

    def main_hook(self) -> None:
        """Make the step that the active ranks make now (in backward, when overlapped: then DDP's hook makes it)."""
        if not self.zero.overlap_with_ddp:
            self.zero.step_as(False, None, {})

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the exchange of gradients with joined ranks."""
        self.zero.is_joining = False


def share_gradients(zero: ZeroRedundancyOptimizer, is_active: bool, what: str) -> dict[Piece, torch.Tensor] | None:
    """Give ranks that have joined the gradients of their pieces, from the first active rank.  Collective.

    Returns what this rank has received; None on active ranks, which have gradients of their own.  DDP leaves a joined
    rank with the gradients of its own last input; stepping on those, as torch's class does, would make its share of the
    parameters drift.
    """
    active = ranks_that_are(is_active, zero.board, zero.join_device, what)
    if not active:
        return None
    received: dict[Piece, torch.Tensor] | None = None
    for rank in range(zero.world_size):
        if rank in active:
            continue
        if zero.rank == active[0]:
            _send(zero, rank, what)
        elif zero.rank == rank:
            received = _receive(zero, active[0], what)
    return received


def _send(zero: ZeroRedundancyOptimizer, to: int, what: str) -> None:
    theirs = [piece for piece in zero.pieces if piece.owner == to]
    if not theirs:
        return
    gradients = [zero.all_params[piece.tensor].grad for piece in theirs]
    mask = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8, device=zero.join_device)
    send_tensor(mask, to, zero.board, what)
    for piece, gradient in zip(theirs, gradients, strict=True):
        if gradient is not None:
            local = make_local(piece, zero.all_params[piece.tensor], zero.partition)
            send_tensor(gradient_for(local, gradient).contiguous(), to, zero.board, what)


def _receive(zero: ZeroRedundancyOptimizer, source: int, what: str) -> dict[Piece, torch.Tensor]:
    mine = zero.local_pieces
    received: dict[Piece, torch.Tensor] = {}
    if not mine:
        return received
    mask = torch.zeros(len(mine), dtype=torch.uint8, device=zero.join_device)
    receive_tensor(mask, source, zero.board, what)
    for local, is_present in zip(mine, mask.tolist(), strict=True):
        if is_present:
            gradient = torch.empty(local.tensor.shape, dtype=local.param.dtype, device=local.param.device)
            receive_tensor(gradient, source, zero.board, what)
            received[local.piece] = gradient
    return received

"""Uneven inputs: what a ZeroRedundancyOptimizer does in torch's ``Join`` on ranks that have run out of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms.join import JoinHook

from shardwise.api.zero_pieces import LocalPiece, gradient_for, make_local
from shardwise.comm.owners import ranks_that_are, receive_tensor, send_tensor

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


def share_gradients(zero: ZeroRedundancyOptimizer, is_active: bool, what: str) -> None:
    """Give ranks that have joined the gradients of their pieces, from the first active rank.  Collective.

    DDP leaves a joined rank with the gradients of its own last input; stepping on those, as torch's class does, would
    make its share of the parameters drift.
    """
    active = ranks_that_are(is_active, zero.board, zero.join_device, what)
    joined = [rank for rank in range(zero.world_size) if rank not in active]
    if not active:
        return
    for rank in joined:
        if zero.rank == active[0]:
            _send(zero, rank, what)
        elif zero.rank == rank:
            _receive(zero, active[0], what)


def _send(zero: ZeroRedundancyOptimizer, to: int, what: str) -> None:
    theirs = [piece for piece in zero.pieces if piece.owner == to]
    present: list[tuple[LocalPiece, torch.Tensor]] = []
    mask = torch.zeros(len(theirs), dtype=torch.uint8, device=zero.join_device)
    for index, piece in enumerate(theirs):
        param = zero.all_params[piece.tensor]
        if param.grad is not None:
            mask[index] = 1
            present.append((make_local(piece, param, zero.partition), param.grad))
    if not theirs:
        return
    send_tensor(mask, to, zero.board, what)
    for local, gradient in present:
        send_tensor(gradient_for(local, gradient).contiguous(), to, zero.board, what)


def _receive(zero: ZeroRedundancyOptimizer, source: int, what: str) -> None:
    mine: Sequence[LocalPiece] = zero.local_pieces
    if not mine:
        return
    mask = torch.zeros(len(mine), dtype=torch.uint8, device=zero.join_device)
    receive_tensor(mask, source, zero.board, what)
    for local, is_present in zip(mine, mask.tolist(), strict=True):
        local.param.grad = None
        local.tensor.grad = None
        if is_present:
            gradient = torch.empty(local.tensor.shape, dtype=local.param.dtype, device=local.param.device)
            receive_tensor(gradient, source, zero.board, what)
            local.tensor.grad = gradient

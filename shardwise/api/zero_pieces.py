"""The pieces a rank updates: views of parameters in memory order, their gradients, and flat buffers under them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.api.zero_checks import Partition
from shardwise.comm.owners import Owned
from shardwise.errors import LayoutError
from shardwise.layout.even import even_pieces
from shardwise.layout.owners import Piece, add_loads, whole_pieces


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A piece that this rank updates.

    ``tensor`` is what the local optimizer holds: the parameter itself when the piece is all of it and the partition is
    "whole", else a 1-D leaf view of its memory (0-D for a 0-D parameter).
    """

    piece: Piece
    param: torch.Tensor
    tensor: torch.Tensor

    @property
    def is_param(self) -> bool:
        """True if the local optimizer holds the parameter itself."""
        return self.tensor is self.param


def partition_groups(
    groups: Sequence[Mapping[str, Any]], kind: Partition, num_ranks: int
) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of each group; ``Piece.tensor`` counts over all groups.

    Groups are dealt one after the other onto the loads of those before, so a group added later moves nothing.
    """
    loads: tuple[int, ...] = (0,) * num_ranks
    offset = 0
    found: list[tuple[Piece, ...]] = []
    for group in groups:
        numels = [tensor.numel() for tensor in group["params"]]
        pieces = (whole_pieces if kind == "whole" else even_pieces)(numels, num_ranks, loads)
        loads = add_loads(loads, pieces)
        found.append(tuple(Piece(p.tensor + offset, p.owner, p.start, p.stop) for p in pieces))
        offset += len(numels)
    return tuple(found)


def make_local(piece: Piece, param: torch.Tensor, kind: Partition) -> LocalPiece:
    """Return the piece with the tensor that the local optimizer updates."""
    return LocalPiece(piece, param, param if kind == "whole" else view_of(piece, param))


def view_of(piece: Piece, param: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``piece`` as a detached view of ``param``'s memory, 1-D (0-D for a 0-D parameter)."""
    return param.detach() if param.dim() == 0 else flat_view(param.detach())[piece.start : piece.stop]


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a 1-D view in memory order (channels-last and transposed included).

    Raises: LayoutError if it has gaps or overlaps in memory.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    ordered = tensor.permute(memory_order(tensor))
    if not ordered.is_contiguous():
        raise LayoutError(
            f"a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}, which leave gaps or overlap; "
            "pass parameters made with .contiguous()"
        )
    return ordered.view(-1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` has neither gaps nor overlaps in memory, in whatever order its elements lie."""
    return tensor.is_contiguous() or tensor.permute(memory_order(tensor)).is_contiguous()


def flat_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (shape of ``param``) as 1-D in the memory order of ``param``; a copy only if strides differ."""
    if param.is_contiguous():
        return tensor.reshape(-1)
    return tensor.permute(memory_order(param)).reshape(-1)


def gradient_for(local: LocalPiece, gradient: torch.Tensor) -> torch.Tensor:
    """Return the part of the parameter's ``gradient`` that belongs to the piece, shaped like its tensor."""
    if local.is_param or local.param.dim() == 0:
        return gradient
    return flat_like(gradient, local.param)[local.piece.start : local.piece.stop]


def owned_views(pieces: Iterable[Piece], params: Sequence[torch.Tensor]) -> list[Owned]:
    """Return 1-D views of the trainable pieces, neighbours of one owner next to each other."""
    found = [
        Owned(piece.owner, view_of(piece, params[piece.tensor]).view(-1))
        for piece in pieces
        if params[piece.tensor].requires_grad
    ]
    return sorted(found, key=lambda item: (item.owner, str(item.tensor.dtype), str(item.tensor.device)))


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Copy all options of parameter groups but the parameters, group by group."""
    for source, target in zip(sources, targets, strict=True):
        target.update((key, value) for key, value in source.items() if key != "params")


@contextmanager
def narrowed(groups: Sequence[dict[str, Any]], chosen: set[int]) -> Generator[None, None, None]:
    """Leave only the tensors with these ids in ``groups`` for a while; the dicts stay the same objects."""
    full = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [tensor for tensor in group["params"] if id(tensor) in chosen]
        yield
    finally:
        for group, tensors in zip(groups, full, strict=True):
            group["params"] = tensors


def pack_params(pieces_of_groups: Sequence[Sequence[Piece]], params: Sequence[torch.Tensor], kind: Partition) -> None:
    """Move trainable parameters into flat buffers, so that a rank's pieces are neighbours in memory.

    One buffer per owner (whole) or group (even), dtype and device.  Frozen parameters get memory of their own, so that
    no earlier buffer lives on for their sake.
    """
    buckets: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
    seen: set[int] = set()
    for number, pieces in enumerate(pieces_of_groups):
        for piece in pieces:
            param = params[piece.tensor]
            if piece.tensor in seen:
                continue
            seen.add(piece.tensor)
            if not param.requires_grad:
                param.data = param.data.detach().clone()
                continue
            key = (piece.owner if kind == "whole" else number, param.dtype, param.device)
            buckets.setdefault(key, []).append(param)
    for members in buckets.values():
        _pack(members)


def _pack(members: Sequence[torch.Tensor]) -> None:
    buffer = members[0].new_empty(sum(param.numel() for param in members), requires_grad=False)
    offset = 0
    for param in members:
        flat_view(param.detach())  # refuses memory with gaps before anything is moved
        view = buffer.as_strided(param.shape, param.stride(), offset)
        view.copy_(param.detach())
        param.data = view
        offset += param.numel()


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims of ``tensor`` from the one that moves furthest in memory to the one that moves least."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))

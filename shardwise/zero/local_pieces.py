"""The pieces a rank updates: views of parameters in memory order, their gradients, and flat buffers under them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise import torch_private
from shardwise.comm.carve import are_neighbours, carve, is_own
from shardwise.comm.owned import BufferOffset, Owned
from shardwise.errors import LayoutError
from shardwise.layout.even import even_pieces, runs_of
from shardwise.layout.owners import OwnedSlice, add_loads, whole_pieces
from shardwise.zero.checks import Partition


@dataclass(frozen=True, slots=True, eq=False)
class LocalPiece:
    """A piece that this rank updates.

    ``tensor`` is what the local optimizer holds: the parameter itself when the piece is all of it and the partition is
    "whole", else a 1-D leaf view of its memory (0-D for a 0-D parameter).
    """

    piece: OwnedSlice
    param: torch.Tensor
    tensor: torch.Tensor

    @property
    def is_param(self) -> bool:
        """True if the local optimizer holds the parameter itself."""
        return self.tensor is self.param


def partition_groups(
    groups: Sequence[Mapping[str, Any]], kind: Partition, num_ranks: int
) -> tuple[tuple[OwnedSlice, ...], ...]:
    """Return the pieces of each group; ``OwnedSlice.tensor`` counts over all groups.

    Groups are dealt one after the other onto the loads of those before, so a group added later moves nothing.  What is
    cut evenly is cut run by run: all ranks have some of what travels at once, so that all of them send at all times.
    """
    loads: tuple[int, ...] = (0,) * num_ranks
    offset = 0
    found: list[tuple[OwnedSlice, ...]] = []
    for group in groups:
        numels = [tensor.numel() for tensor in group["params"]]
        of_group: list[OwnedSlice] = []
        for run in [range(len(numels))] if kind == "whole" else runs_of(numels, num_ranks):
            own = [numels[index] for index in run]
            pieces = (whole_pieces if kind == "whole" else even_pieces)(own, num_ranks, loads)
            loads = add_loads(loads, pieces)
            first = offset + run.start
            of_group += [OwnedSlice(p.tensor + first, p.owner, p.start, p.stop) for p in pieces]
        found.append(tuple(of_group))
        offset += len(numels)
    return tuple(found)


def runs_of_groups(groups: Sequence[Mapping[str, Any]], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the parameters that travel together, by number, in the order of the groups; no run is of two groups."""
    runs: list[tuple[int, ...]] = []
    offset = 0
    for group in groups:
        numels = [tensor.numel() for tensor in group["params"]]
        runs += [tuple(offset + index for index in run) for run in runs_of(numels, num_ranks) if len(run)]
        offset += len(numels)
    return tuple(runs)


def make_local(piece: OwnedSlice, param: torch.Tensor, kind: Partition) -> LocalPiece:
    """Return the piece with the tensor that the local optimizer updates."""
    if kind == "whole":
        return LocalPiece(piece, param, param)
    view = view_of(piece, param)
    torch_private.give_attributes(torch_private.attributes_of(param), view)
    return LocalPiece(piece, param, view)


def view_of(piece: OwnedSlice, param: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``piece`` as a tensor on ``param``'s memory, 1-D (0-D for a 0-D parameter)."""
    if param.dim() == 0:
        return param.detach()
    return flat_view(param.detach())[piece.start : piece.stop].detach()  # without the base that a view keeps for ever


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


def elements_of(piece: OwnedSlice, param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` (shape of ``param``) that belong to ``piece``, 1-D in the order of ``param``."""
    return flat_like(tensor, param)[piece.start : piece.stop]


def gradient_for(local: LocalPiece, gradient: torch.Tensor) -> torch.Tensor:
    """Return the part of the parameter's ``gradient`` that belongs to the piece, shaped like its tensor."""
    if local.is_param or local.param.dim() == 0:
        return gradient
    return elements_of(local.piece, local.param, gradient)


def owned_views(
    pieces: Iterable[OwnedSlice],
    params: Sequence[torch.Tensor],
    places: Mapping[int, BufferOffset] | None = None,
    moving: Sequence[bool] | None = None,
) -> list[Owned]:
    """Return 1-D views of the moving pieces (default: those that train), neighbours of one owner next to each other.

    ``places``: where :func:`pack_params` meant the parameters to lie; None: they lie alike on all ranks.
    """
    moving = [param.requires_grad for param in params] if moving is None else moving
    found = [
        Owned(piece.owner, view_of(piece, params[piece.tensor]).view(-1), _place(piece, places))
        for piece in pieces
        if moving[piece.tensor]
    ]
    return sorted(found, key=lambda item: (item.owner, str(item.tensor.dtype), str(item.tensor.device)))


def _place(piece: OwnedSlice, places: Mapping[int, BufferOffset] | None) -> BufferOffset | None:
    if places is None:
        return None
    place = places.get(piece.tensor, BufferOffset(-1 - piece.tensor, 0))  # not packed: next to nothing
    return BufferOffset(place.buffer, place.offset + piece.start)


def pack_params(
    pieces_of_groups: Sequence[Sequence[OwnedSlice]],
    params: Sequence[torch.Tensor],
    kind: Partition,
    moving: Sequence[bool] | None = None,
    packed: Container[int] = (),
) -> dict[int, BufferOffset]:
    """Lay parameters one after the other, so that a rank's pieces are neighbours; return where each is to lie.

    One buffer per owner (whole) or group (even), dtype and device.  A parameter whose memory somebody else may hold
    (an alias, a state dict, another process) stays where it is: the places are the same on every rank all the same.
    ``moving``: which parameters to lay out (default: those that train).  ``packed``: those that lie in buffers of an
    earlier call; of them the others get memory of their own, so that no earlier buffer lives on for their sake.
    """
    moving = [param.requires_grad for param in params] if moving is None else moving
    buffers: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for number, pieces in enumerate(pieces_of_groups):
        for piece in pieces:
            param = params[piece.tensor]
            if not moving[piece.tensor]:
                if piece.tensor in packed and not is_held(param):
                    param.data = param.detach().clone()
                continue
            key = (piece.owner if kind == "whole" else number, param.dtype, param.device)
            members = buffers.setdefault(key, [])
            if piece.tensor not in members[-1:]:  # the pieces of one tensor come one after the other
                members.append(piece.tensor)
    places: dict[int, BufferOffset] = {}
    for number, members in enumerate(buffers.values()):
        offset = 0
        for index in members:
            places[index] = BufferOffset(number, offset)
            offset += params[index].numel()
        _pack([params[index] for index in members])
    return places


def is_held(param: torch.Tensor) -> bool:
    """Return True if others than ``param`` may read or write its memory, and would lose sight of it if it moved."""
    storage = param.untyped_storage()
    return torch_private.storage_use_count(storage) > 1 or (param.device.type == "cpu" and storage.is_shared())


def _pack(members: Sequence[torch.Tensor]) -> None:
    for param in members:
        flat_view(param.detach())  # refuses memory with gaps before anything is moved
    movable = [param for param in members if not is_held(param)]
    if are_neighbours([flat_view(param.detach()) for param in movable]) and all(is_own(param) for param in movable):
        return
    buffer = movable[0].new_empty(sum(param.numel() for param in movable), requires_grad=False)
    offset = 0
    for param in movable:
        place = carve(buffer, offset, param.shape, param.stride())
        place.copy_(param.detach())
        param.data = place
        offset += param.numel()


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims of ``tensor`` from the one that moves furthest in memory to the one that moves least."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))

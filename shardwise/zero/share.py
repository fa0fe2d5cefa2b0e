"""Which rank updates which elements, where parameters lie in memory, and the broadcasts that follow from both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm.owned import Broadcast, plan_broadcasts
from shardwise.layout.owners import OwnedSlice
from shardwise.zero.checks import Partition, flatten_groups
from shardwise.zero.local_pieces import (
    LocalPiece,
    make_local,
    owned_views,
    pack_params,
    partition_groups,
    runs_of_groups,
    view_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The parameters of all ranks in pieces, and the pieces that are this rank's.

    Attributes:
        params: in the order of the groups; ``OwnedSlice.tensor`` is an index into them.
        by_param: the pieces of each parameter.
        runs: the numbers of the parameters that travel together, in their order.
    """

    params: tuple[torch.Tensor, ...]
    partition: Partition
    num_ranks: int
    rank: int
    pieces_of_groups: tuple[tuple[OwnedSlice, ...], ...]
    local_pieces: tuple[LocalPiece, ...]
    by_param: tuple[tuple[OwnedSlice, ...], ...]
    local_by_param: tuple[tuple[LocalPiece, ...], ...]
    runs: tuple[tuple[int, ...], ...]

    @property
    def pieces(self) -> list[OwnedSlice]:
        """All ranks' pieces, in the order of the groups."""
        return [piece for pieces in self.pieces_of_groups for piece in pieces]

    def pieces_of(self, indices: Iterable[int]) -> list[OwnedSlice]:
        """Return all ranks' pieces of these parameters, in the order of :attr:`params`."""
        return [piece for index in sorted(indices) for piece in self.by_param[index]]

    def local_pieces_of(self, indices: Iterable[int]) -> list[LocalPiece]:
        """Return this rank's pieces of these parameters, in the same order."""
        return [local for index in sorted(indices) for local in self.local_by_param[index]]

    def tensors_of_group(self, number: int) -> list[torch.Tensor]:
        """Return what the local optimizer updates of a group, in the order of :attr:`local_pieces`."""
        members = set(self.pieces_of_groups[number])
        return [local.tensor for local in self.local_pieces if local.piece in members]


def make_share(
    groups: Sequence[Mapping[str, Any]], partition: Partition, num_ranks: int, rank: int, former: Share | None = None
) -> Share:
    """Return the share of ``rank``; pieces that it had in ``former`` keep their tensors, which have state."""
    params = flatten_groups(groups)
    pieces_of_groups = partition_groups(groups, partition, num_ranks)
    known = {local.piece: local for local in former.local_pieces} if former is not None else {}
    by_param: list[list[OwnedSlice]] = [[] for _ in params]
    local_by_param: list[list[LocalPiece]] = [[] for _ in params]
    local_pieces: list[LocalPiece] = []
    for piece in (piece for pieces in pieces_of_groups for piece in pieces):
        by_param[piece.tensor].append(piece)
        if piece.owner == rank:
            local = known.get(piece) or make_local(piece, params[piece.tensor], partition)
            local_pieces.append(local)
            local_by_param[piece.tensor].append(local)
    return Share(
        tuple(params),
        partition,
        num_ranks,
        rank,
        pieces_of_groups,
        tuple(local_pieces),
        tuple(map(tuple, by_param)),
        tuple(map(tuple, local_by_param)),
        runs_of_groups(groups, num_ranks),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the parameters of a share lay, and which of them were to be sent, when it was made.

    Attributes:
        trainable: which parameters required gradients.
        moving: which a step may change: those that train, and frozen ones that still have a gradient.
        packed: those that lie in buffers of ours.
        broadcasts: of all of them; the same calls on every rank, wherever a rank's parameters lie.
    """

    share: Share
    trainable: tuple[bool, ...]
    moving: tuple[bool, ...]
    addresses: tuple[int, ...]
    places: Mapping[int, Any]
    packed: frozenset[int]
    broadcasts: tuple[Broadcast, ...]
    by_indices: dict[tuple[int, ...], tuple[Broadcast, ...]] = field(default_factory=dict)

    def broadcasts_of(self, indices: Sequence[int]) -> tuple[Broadcast, ...]:
        """Return the broadcasts of these parameters; planned once."""
        key = tuple(indices)
        if key not in self.by_indices:
            self.by_indices[key] = _plan(self.share, self.share.pieces_of(key), self.moving, self.places)
        return self.by_indices[key]


def trainable_of(params: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    """Return which parameters require gradients."""
    return tuple(param.requires_grad for param in params)


def moving_of(params: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    """Return which parameters a step may change: a plain optimizer updates frozen ones too that have a gradient."""
    return tuple(param.requires_grad or param.grad is not None for param in params)


def addresses_of(params: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return where the parameters start in memory."""
    return tuple(param.data_ptr() for param in params)


def make_layout(share: Share, packs: bool, packed: frozenset[int] = frozenset()) -> Layout:
    """Plan the broadcasts, and put memory and views in order, for the parameters as they are now.

    ``packs``: keep them in buffers, so that a rank's pieces are neighbours.  ``packed``: those that an earlier layout has
    moved; that layout must be gone, since its views would count as somebody who holds the memory.
    """
    params = share.params
    moving = moving_of(params)
    places: Mapping[int, Any] = {}
    if packs:
        for local in share.local_pieces:
            if not local.is_param:
                local.tensor.data = local.param.new_empty(local.tensor.shape)
        places = pack_params(share.pieces_of_groups, params, share.partition, moving, packed)
    for local in share.local_pieces:
        if not local.is_param:
            local.tensor.data = view_of(local.piece, local.param)
    broadcasts = _plan(share, share.pieces, moving, places) if share.num_ranks > 1 else ()
    trainable, addresses = trainable_of(params), addresses_of(params)
    return Layout(share, trainable, moving, addresses, places, packed | frozenset(places), broadcasts)


def _plan(
    share: Share, pieces: Iterable[OwnedSlice], moving: Sequence[bool], places: Mapping[int, Any]
) -> tuple[Broadcast, ...]:
    return plan_broadcasts(owned_views(pieces, share.params, places, moving))

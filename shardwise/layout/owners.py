"""Whole tensors to owner ranks (ZeRO-1): which rank updates which elements of which tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OwnedSlice:
    """Elements ``start:stop`` (in memory order) of tensor number ``tensor``, updated by rank ``owner``."""

    tensor: int
    owner: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def assign_owners(numels: Sequence[int], num_ranks: int, loads: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the owner rank of each tensor: largest first, to the least loaded, ties to the lower rank.

    ``loads`` are the elements that each rank owns already (default: none), so that tensors which come later do not
    move the earlier ones.  Cost: O(n log n + n log W).
    Raises: ConfigError if ``num_ranks`` < 1 or ``loads`` has another length.
    Example:
        >>> assign_owners([9, 7, 5, 3], 2)
        (0, 1, 1, 0)
    """
    import heapq

    heap = [(load, rank) for rank, load in enumerate(_checked_loads(num_ranks, loads))]
    heapq.heapify(heap)
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        load, rank = heap[0]
        owners[index] = rank
        heapq.heapreplace(heap, (load + numels[index], rank))
    return tuple(owners)


def whole_pieces(numels: Sequence[int], num_ranks: int, loads: Sequence[int] = ()) -> tuple[OwnedSlice, ...]:
    """Return one piece per tensor, in tensor order, with the owners of :func:`assign_owners`.

    Example:
        >>> whole_pieces([4, 6], 2)[0]
        Piece(tensor=0, owner=1, start=0, stop=4)
    """
    owners = assign_owners(numels, num_ranks, loads)
    return tuple(OwnedSlice(index, owner, 0, numels[index]) for index, owner in enumerate(owners))


def add_loads(loads: Sequence[int], pieces: Sequence[OwnedSlice]) -> tuple[int, ...]:
    """Return ``loads`` (elements per rank) with the elements of ``pieces`` added to their owners."""
    total = list(loads)
    for piece in pieces:
        total[piece.owner] += piece.numel
    return tuple(total)


def _checked_loads(num_ranks: int, loads: Sequence[int]) -> Sequence[int]:
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}, expected at least 1")
    if loads and len(loads) != num_ranks:
        raise ConfigError(f"loads has {len(loads)} entries, expected one per rank ({num_ranks})")
    return loads or [0] * num_ranks

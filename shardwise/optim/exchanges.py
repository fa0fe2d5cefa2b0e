"""Exchanges of whole matrices that say, where they fail, which rank is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shardwise import torch_private
from shardwise.comm import matrices
from shardwise.comm.alive import is_gone
from shardwise.comm.matrices import Expected, Ranks
from shardwise.errors import TransportError

_T = TypeVar("_T")
_GRACE_S = 2.0  # a connection is closed before its process has ended


def exchange(
    sends: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Expected]], ranks: Ranks, device: torch.device
) -> list[list[torch.Tensor]]:
    """Do as :func:`shardwise.comm.matrices.exchange`.

    Raises: TransportError that names the ranks whose processes are gone, or all that it may be.
    """
    return _named(lambda: matrices.exchange(sends, expected, ranks, device), ranks)


def exchange_objects(sends: Sequence[Any], ranks: Ranks, device: torch.device) -> list[Any]:
    """Do as :func:`shardwise.comm.matrices.exchange_objects`.  Raises: TransportError as :func:`exchange`."""
    return _named(lambda: matrices.exchange_objects(sends, ranks, device), ranks)


def _named(act: Callable[[], _T], ranks: Ranks) -> _T:
    try:
        return act()
    except RuntimeError as error:
        mine = ranks.members[ranks.rank]
        others = tuple(rank for rank in ranks.members if rank != mine)
        gone = _gone(others)
        if gone:
            who = f"{_listed(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        else:
            who = f"{_listed(others)} did not all come, or left by an exception: see their errors"
        first = str(error).split("\n")[0]
        raise TransportError(
            f"whole matrices cannot go to their owners or back: {who}; rank {mine} waited. Every rank must make the same calls "
            f"in the same order; first error: {first}"
        ) from error


def _gone(others: Sequence[int]) -> tuple[int, ...]:
    store = torch_private.default_store()
    if store is None:
        return ()
    end = time.monotonic() + _GRACE_S
    while True:
        found = tuple(rank for rank in others if is_gone(store, rank))
        if found or time.monotonic() >= end:
            return found
        time.sleep(0.05)


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"

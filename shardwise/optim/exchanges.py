"""Exchanges of whole matrices that say, where they fail, which rank is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shardwise import torch_private
from shardwise.comm import matrices
from shardwise.comm.last_words import in_short, leave
from shardwise.comm.lost_peers import naming_lost_peers
from shardwise.comm.matrices import Expected, Ranks
from shardwise.comm.mending import break_off

_T = TypeVar("_T")
_WHAT = "whole matrices cannot go to their owners or back"


def exchange(
    sends: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Expected]], ranks: Ranks, device: torch.device
) -> list[list[torch.Tensor]]:
    """Do as :func:`shardwise.comm.matrices.exchange`.

    Raises: TransportError that names the ranks whose processes are gone, or all that it may be.  Whatever else leaves it (an
        interrupt, a MemoryError) breaks off, so that nobody waits for this rank until the timeout of the group.
    """
    return _together(lambda: matrices.exchange(sends, expected, ranks, device), ranks)


def exchange_objects(sends: Sequence[Any], ranks: Ranks, device: torch.device) -> list[Any]:
    """Do as :func:`shardwise.comm.matrices.exchange_objects`.  Raises: TransportError as :func:`exchange`."""
    return _together(lambda: matrices.exchange_objects(sends, ranks, device), ranks)


def _together(act: Callable[[], _T], ranks: Ranks) -> _T:
    try:
        return naming_lost_peers(act, _WHAT, ranks.members, ranks.members[ranks.rank])
    except RuntimeError:  # of the backend, or ours: the others have it, too
        raise
    except BaseException as error:
        leave(f"{type(error).__name__}: {in_short(error)}")
        if ranks.group is not None and torch_private.is_gloo(ranks.group):
            break_off(ranks.group)
        raise

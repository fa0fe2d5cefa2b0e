"""Exchanges of whole matrices that say, where they fail, which rank is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import matrices
from shardwise.comm.lost_peers import naming_lost_peers
from shardwise.comm.matrices import Expected, Ranks

_WHAT = "whole matrices cannot go to their owners or back"


def exchange(
    sends: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Expected]], ranks: Ranks, device: torch.device
) -> list[list[torch.Tensor]]:
    """Do as :func:`shardwise.comm.matrices.exchange`.

    Raises: TransportError that names the ranks whose processes are gone, or all that it may be.
    """
    mine = ranks.members[ranks.rank]
    return naming_lost_peers(lambda: matrices.exchange(sends, expected, ranks, device), _WHAT, ranks.members, mine)


def exchange_objects(sends: Sequence[Any], ranks: Ranks, device: torch.device) -> list[Any]:
    """Do as :func:`shardwise.comm.matrices.exchange_objects`.  Raises: TransportError as :func:`exchange`."""
    mine = ranks.members[ranks.rank]
    return naming_lost_peers(lambda: matrices.exchange_objects(sends, ranks, device), _WHAT, ranks.members, mine)

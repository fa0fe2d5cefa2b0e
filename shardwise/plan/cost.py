"""Fold a plan into seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.events import Call, Op


@dataclass(frozen=True, slots=True)
class Wire:
    """What a collective costs: ``latency_s`` to start, then bytes at ``bytes_per_s``."""

    latency_s: float
    bytes_per_s: float


def communication_s(calls: Iterable[Call], link: Wire, num_shards: int) -> float:
    """Return the seconds that the collectives of ``calls`` take back to back on ``link`` (ring algorithm).

    A rank sends ``(num_shards - 1) / num_shards`` of each packed buffer.  Source: Chan et al., Collective
    communication: theory, practice, and experience, 2007, section 7.
    """
    share = (num_shards - 1) / num_shards
    collectives = [call for call in calls if call.op in (Op.UNSHARD, Op.REDUCE) and call.num_bytes]
    return sum(link.latency_s + share * call.num_bytes / link.bytes_per_s for call in collectives)

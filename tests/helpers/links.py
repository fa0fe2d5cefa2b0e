"""Links through shared memory whose ranks all live in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from shardwise.collectives.local_peers import HEADER_BYTES, HostGroup, Segment
from shardwise.collectives.shared_memory import HostLink
from shardwise.consistency.agreement import StoreExchange
from shardwise.consistency.store import JobStore

SEGMENT_BYTES = HEADER_BYTES + 4096
SUM_SLOT_BYTES = 256


def make_links(
    num_ranks: int = 2, pids: Sequence[int] | None = None, timeout_s: float = 60.0, members: Sequence[int] = ()
) -> list[HostLink]:
    """Return each rank's link.

    ``pids``: of the processes that they say they are, this one by default.  ``members``: their global ranks, from 0 by default.
    """
    found = tuple(pids or [os.getpid()] * num_ranks)
    segments = tuple(Segment.create(SEGMENT_BYTES) for _ in found)
    named = tuple(members or range(len(found)))
    exchange = StoreExchange(
        JobStore(dist.HashStore(), timeout_s), "links", named, 0, timeout_s
    )  # nothing is posted there
    hosts = [HostGroup(segments, found, rank, named, exchange) for rank in range(len(found))]
    return [HostLink(host, 64, timeout_s, SUM_SLOT_BYTES) for host in hosts]

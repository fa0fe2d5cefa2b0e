"""A link of shared memory whose ranks all live in this process: whom its errors name."""

from __future__ import annotations

import os

import pytest
from helpers.store_exchanges import gone_process

from shardwise import TransportError
from shardwise.collectives.host.local_peers import HEADER_BYTES, HostGroup, Segment
from shardwise.collectives.host.shared_memory import HostLink


def test_a_link_of_some_ranks_names_them_as_the_job_does() -> None:
    pids, members = (os.getpid(), gone_process()), (2, 3)
    segments = tuple(Segment.create(HEADER_BYTES + 4096) for _ in pids)
    host = HostGroup(segments, pids, 0, members, lambda rank, number: [])
    link = HostLink(host, HEADER_BYTES, 64, 60.0, 256)
    with pytest.raises(TransportError, match="rank 3 is gone .*; rank 2 waited .* s for it at the start of a forward"):
        link.open("forward", False)

"""How the ranks of a group talk."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.comm.lanes import Lanes
from shardwise.comm.links.routes import RoutedCommunicator


@dataclass(slots=True)
class GroupComm:
    """How a group talks: along the shard axis, along the replica axis, and along the smaller mesh after forward.

    Attributes:
        copies: lanes on which shards come from the host; None where they do not live there.
    """

    shards: RoutedCommunicator | None
    reduce: RoutedCommunicator | None
    replicas: RoutedCommunicator | None
    sub: RoutedCommunicator | None = None
    copies: Lanes | None = None

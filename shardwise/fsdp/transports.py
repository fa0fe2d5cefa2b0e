"""What an engine moves tensors with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardwise.collectives.buffer_pool import BufferPool, HeapTop
from shardwise.collectives.compressed import CodedSums
from shardwise.collectives.routes import LinkSource, PassTracker, Transport
from shardwise.collectives.streams import CommStreams, device_of


@dataclass(slots=True)
class CommContext:
    """The device of an engine and the ways to other ranks.

    Attributes:
        streams, pool: where collectives run and where their memory comes from.
        heap: what keeps the memory of a step for the next one.
        transport: which links this rank wants.
        pass_tracker: when links between ranks may be used.  links: those links, by name of their process group.
        coded_sums: sums over replicas that are on their way, coded.
    """

    device: torch.device
    streams: CommStreams
    pool: BufferPool
    heap: HeapTop
    transport: Transport = "auto"
    pass_tracker: PassTracker = field(default_factory=PassTracker)
    coded_sums: CodedSums = field(default_factory=CodedSums)
    links: dict[str, LinkSource] = field(default_factory=dict[str, LinkSource])

    @classmethod
    def on(cls, device: torch.device, transport: Transport) -> CommContext:
        """Return new ones for ``device``."""
        return cls(device, CommStreams.on(device_of(device)), BufferPool(device), HeapTop(device), transport)

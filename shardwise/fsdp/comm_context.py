"""The communication context of an engine: streams, buffer pool and links.

All units of an engine share one, so that a buffer that one unit has freed serves the next, and collectives of one kind run in
one order.  Stages of a pipeline share it across engines (``share_comm_ctx``).  Source: FSDP2's ``FSDPCommContext``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.collectives.c10d import GroupCommunicator
from shardwise.collectives.routes import LinkSource, PassTracker, Transport
from shardwise.collectives.streams import BufferPool, CommStreams, device_of, keep_heap


@dataclass(slots=True)
class UnitComm:
    """The communicators of a unit; None for an axis that takes no collective.

    Attributes:
        shards: for all-gathers along the shard axis.
        reduce: for reduce-scatters along the shard axis.
        replicas: for all-reduces along the replica axis.
        pool: the buffer pool of full parameters and staging buffers.
        streams: the streams of the collectives, and of copies of offloaded shards.
        sub: for all-gathers along the smaller mesh of ``reshard_after_forward``.
    """

    shards: GroupCommunicator | None
    reduce: GroupCommunicator | None
    replicas: GroupCommunicator | None
    pool: BufferPool
    streams: CommStreams
    sub: GroupCommunicator | None = None


class CommContext:
    """The device of an engine and its communication resources.

    Attributes:
        device: the device.
        transport: the transport that this rank wants.
        streams: the streams of collectives.
        pool: the buffer pool of collectives and full parameters.
        pass_tracker: tracks passes, in which links may be used.
        links: the sources of links, by name of their process group.
    """

    def __init__(self, device: torch.device, transport: Transport) -> None:
        # Written by the thread that runs forwards and setters; autograd's threads read them in a pass, in which nothing writes.
        self.device = device
        self.transport: Transport = transport
        self.streams, self.pool = CommStreams.on(device_of(device)), BufferPool(device)
        keep_heap(self.pool, device)
        self.pass_tracker, self.links = PassTracker(), dict[str, LinkSource]()

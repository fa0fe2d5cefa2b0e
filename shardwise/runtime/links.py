"""Links for the groups of an engine: which one its ranks can use, and the shards in the memory that they share."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from shardwise import torch_private
from shardwise.comm.buffers import BufferPool
from shardwise.comm.link import Link, Transport
from shardwise.comm.meet import Offer, meet
from shardwise.comm.peers import MAX_RANKS, PeerLink
from shardwise.comm.segment import HEADER_BYTES
from shardwise.comm.shm import HostLink, outbox_bytes, slot_bytes
from shardwise.layout.bucket import align
from shardwise.runtime.group import ShardGroup

_ALIGNMENT = 64  # bytes, of every section in a segment


@dataclass(frozen=True, slots=True)
class _Map:
    """Where sections and the outbox lie in a segment: the same on every rank."""

    sections: tuple[tuple[str, int, int], ...]  # dtype, elements, byte offset
    outbox: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.outbox + outbox_bytes(self.slot_bytes)

    def digest(self) -> str:
        return hashlib.sha256(repr((self.sections, self.slot_bytes)).encode()).hexdigest()


class GroupLink:
    """The link of one process group, for the parameter groups that gather and reduce over it.

    Args:
        process_group: whose ranks talk.
        gathers: the parameter groups that gather over it, in the order of the units.  reduces: those that reduce over it.
        transport: what this rank wants; the ranks agree on what all of them allow.
        pool: memory for staging.
        timeout_s: how long to wait for another rank.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        gathers: Sequence[ShardGroup],
        reduces: Sequence[ShardGroup],
        transport: Transport,
        pool: BufferPool,
        timeout_s: float,
    ) -> None:
        self._process_group = process_group
        self._gathers = [weakref.ref(group) for group in gathers]
        self._reduces = [weakref.ref(group) for group in reduces]
        self._transport: Transport = transport
        self._pool = pool
        self._timeout_s = timeout_s
        self._map: _Map | None = None
        self._link: Link | None = None

    def prepare(self) -> Link | None:
        """Return the link for the next span, made at the first and whenever the sizes of shards have changed.

        Collective when it makes one.  Raises: DesyncError if a rank does not come, or its shards have other sizes.
        """
        gathers = [group for ref in self._gathers if (group := ref()) is not None]
        is_shared = isinstance(self._link, HostLink)
        if self._map is not None and not is_shared:
            return self._link
        wanted = self._map
        if wanted is None or any(bucket.home is None for group in gathers for bucket in group.main_buckets):
            reduces = [group for ref in self._reduces if (group := ref()) is not None]
            wanted = _map_of(gathers, reduces, self._process_group.size())
        if wanted != self._map:
            self._map = wanted
            self._link = self._make(wanted)
            for group in gathers:
                group.forget_homes()
        if isinstance(self._link, HostLink):
            _move_in(gathers, wanted, self._link)
        return self._link

    def is_for(self, gathers: Sequence[ShardGroup], reduces: Sequence[ShardGroup], transport: Transport) -> bool:
        """True if this link was made for just these."""
        mine = [ref() for ref in self._gathers], [ref() for ref in self._reduces], self._transport
        return mine == (list(gathers), list(reduces), transport)

    def _make(self, wanted: _Map) -> Link | None:
        store = torch_private.default_store()
        if store is None:
            return None
        offer = Offer(self._transport, wanted.num_bytes, wanted.digest())
        meeting = meet(self._process_group, store, offer, self._timeout_s)
        if meeting.segments is not None:
            rank = self._process_group.rank()
            return HostLink(meeting.segments, meeting.pids, rank, wanted.outbox, wanted.slot_bytes, self._timeout_s)
        if meeting.transport == "collective" or self._process_group.size() > MAX_RANKS:
            return None
        return PeerLink(self._process_group, self._pool)


def can_link(group: ShardGroup, process_group: dist.ProcessGroup) -> bool:
    """True if the ranks of ``process_group`` may find a link for ``group``: tensors on CPU, several ranks, gloo."""
    if group.device.type != "cpu" or group.storage_device.type != "cpu" or process_group.size() == 1:
        return False
    return torch_private.is_gloo(process_group)


def _map_of(gathers: Sequence[ShardGroup], reduces: Sequence[ShardGroup], num_ranks: int) -> _Map:
    sections: list[tuple[str, int, int]] = []
    offset = HEADER_BYTES
    for bucket in (bucket for group in gathers for bucket in group.main_buckets):
        offset = align(offset, _ALIGNMENT)
        sections.append((str(bucket.dtype), bucket.layout.section_numel, offset))
        offset += bucket.layout.section_numel * bucket.dtype.itemsize
    sizes = [numel * itemsize for group in reduces for numel, itemsize in group.largest_reductions()]
    return _Map(tuple(sections), align(offset, 4096), slot_bytes(max(sizes, default=0), num_ranks))


def _move_in(groups: Sequence[ShardGroup], wanted: _Map, link: HostLink) -> None:
    homes = iter(wanted.sections)
    segment = link.segments[link.rank]
    for group in groups:
        for bucket in group.main_buckets:
            _, numel, offset = next(homes)
            if bucket.home is None:
                bucket.move_home(segment.tensor(offset, numel, bucket.dtype), offset)

"""Transports that only CPU ranks use: shared memory on one host, sends and receives, and both in a hierarchy."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from typing import cast

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.collectives.buffer_pool import BufferPool
from shardwise.collectives.host.hierarchy import TieredLink, column_of
from shardwise.collectives.host.local_peers import (
    HEADER_BYTES,
    ArenaPlace,
    HostGroup,
    Outcome,
    Segment,
    SegmentAddress,
    collect_from,
    meet,
    take_shareable,
)
from shardwise.collectives.host.send_recv import MAX_RANKS, NUM_INBOXES, Inboxes, PeerLink, padded_bytes
from shardwise.collectives.host.shared_memory import HostLink, outbox_bytes, slot_bytes, sum_slot_bytes, sums_bytes
from shardwise.collectives.routes import (
    Link,
    LinkedBucket,
    LinkProvider,
    LinkUsers,
    Transport,
    link_providers,
)
from shardwise.consistency.agreement import StoreExchange
from shardwise.errors import TransportError

# ---- The link of one group: which transport its ranks choose, and where this rank's shards lie in shared memory.


@dataclass(frozen=True, slots=True)
class _AgreedSizes:
    """The sizes that must be equal on all ranks of a group; they fix the layout of every segment.

    Attributes:
        sections: dtype and number of elements of each bucket's section.
        slot_bytes: bytes of one slot of the outbox.
        sum_slot_bytes: bytes of one slot for in-place sums.
        gather_bytes: bytes of the sections of the largest all-gather, with padding.
        num_ranks: size of the group.
    """

    sections: tuple[tuple[str, int], ...]
    slot_bytes: int
    sum_slot_bytes: int
    gather_bytes: int
    num_ranks: int

    @property
    def inboxes_start(self) -> int:
        return HEADER_BYTES + outbox_bytes(self.slot_bytes) + sums_bytes(self.sum_slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of a segment, for any number of hosts; pages that are never written take no memory."""
        return self.inboxes_start + NUM_INBOXES * self.num_ranks * self.gather_bytes

    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


class GroupLink:
    """The link of one process group, shared by the parameter groups that use it.

    Args:
        process_group: the ranks.
        users: the parameter groups that gather, reduce and sum over the link.
        transport: what this rank allows; the ranks use what all of them allow.
        pool: memory for staging.
        timeout_s: how long to wait for another rank.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        users: LinkUsers,
        transport: Transport,
        pool: BufferPool,
        timeout_s: float,
    ) -> None:
        self._process_group = process_group
        self._users = [[weakref.ref(group) for group in each] for each in (users.gathers, users.reduces, users.sums)]
        self._transport: Transport = transport
        self._pool = pool
        self._timeout_s = timeout_s
        self._sizes: _AgreedSizes | None = None
        self._link: Link | None = None
        self._inside: HostLink | None = None  # the part of the link that shares memory
        self._exchange: StoreExchange | None = None
        self._published: list[ArenaPlace] = []
        self._num_published = 0

    def prepare(self) -> Link | None:
        """Return the link for the next pass; make a new one at first use and after the sizes of shards have changed.

        Collective when it makes one.  Raises: DesyncError if a rank does not arrive or has shards of other sizes.
        """
        if self._sizes is not None and self._inside is None:
            return self._link
        users = LinkUsers(*([group for ref in refs if (group := ref()) is not None] for refs in self._users))
        buckets = [bucket for group in users.gathers for bucket in group.main_buckets if bucket.travels]
        if self._sizes is None or any(bucket.number is None for bucket in buckets):
            sizes = _sizes_of(users, self._process_group.size())
            if sizes != self._sizes:
                self._sizes = sizes
                self._link = self._make(sizes)
                self._published = []
        if self._inside is not None:
            self._publish_sections(buckets, self._inside)
        return self._link

    def _publish_sections(self, buckets: Sequence[LinkedBucket], link: HostLink) -> None:
        """Publish where this rank's sections lie now, if that has changed."""
        places: list[ArenaPlace] = []
        for number, bucket in enumerate(buckets):
            if bucket.place is None:
                bucket.move_to_shared_memory()
            if bucket.place is None:
                raise TransportError(
                    f"no shared memory is left for {bucket.layout.section_numel * bucket.dtype.itemsize} bytes of shards; "
                    "free memory, or call set_transport('gloo') on every rank"
                )
            bucket.number = number
            places.append(cast(ArenaPlace, bucket.place))  # take_shareable made it, as registered
        if places != self._published:
            assert self._exchange is not None
            self._published = places
            self._num_published += 1
            rows = [(*astuple(place.segment.address), place.offset) for place in places]
            self._exchange.post(f"sections/{self._num_published}", json.dumps(rows))
            link.publish_sections(self._num_published)

    def _places_of(self, rank: int, number: int) -> Sequence[ArenaPlace]:
        assert self._exchange is not None
        if rank == self._process_group.rank() or number == 0:
            return self._published if number else []
        found: list[ArenaPlace] = []
        for *address, offset in json.loads(collect_from(self._exchange, f"sections/{number}", [rank])[0]):
            try:
                found.append(ArenaPlace(Segment.open(SegmentAddress(*address)), offset))
            except OSError as error:
                mine, its = self._exchange.members[self._exchange.rank], self._exchange.members[rank]
                raise TransportError(f"rank {mine} cannot read the shards of rank {its}: {error}") from error
        return found

    def is_for(self, users: LinkUsers, transport: Transport) -> bool:
        """True if this link was made for exactly these users and this transport."""
        mine = [[ref() for ref in refs] for refs in self._users]
        return mine == [users.gathers, users.reduces, users.sums] and self._transport == transport

    def _make(self, sizes: _AgreedSizes) -> Link | None:
        meeting = meet(self._process_group, self._transport, sizes.num_bytes, sizes.digest())
        self._inside = None
        if meeting.local_peers:
            return self._make_shared(sizes, meeting)
        if meeting.transport == "collective" or self._process_group.size() > MAX_RANKS:
            return None
        link = PeerLink(self._process_group, self._pool)
        link.is_on_one_host = meeting.are_on_one_host
        return link

    def _make_shared(self, sizes: _AgreedSizes, meeting: Outcome) -> Link:
        self._exchange = meeting.exchange
        ref, rank, local_peers = weakref.ref(self), self._process_group.rank(), meeting.local_peers

        def places_of(rank: int, number: int) -> Sequence[ArenaPlace]:
            owner = ref()
            assert owner is not None  # the GroupLink owns the link, so it outlives it
            return owner._places_of(rank, number)

        host = HostGroup(
            meeting.segments, meeting.pids, local_peers.index(rank), local_peers, meeting.exchange.members, places_of
        )
        self._inside = inside = HostLink(host, HEADER_BYTES, sizes.slot_bytes, self._timeout_s, sizes.sum_slot_bytes)
        if len(local_peers) == sizes.num_ranks:
            return inside
        column = column_of(rank, len(local_peers), sizes.num_ranks)
        between = PeerLink(self._process_group, self._pool, column)
        return TieredLink(
            inside, between, Inboxes(inside, sizes.inboxes_start, len(between.peers) * sizes.gather_bytes)
        )


def can_link(process_group: dist.ProcessGroup, devices: Collection[torch.device]) -> bool:
    """True if a group may use a link for tensors on ``devices``: it has several ranks, on CPU, over gloo."""
    is_on_cpu = all(device.type == "cpu" for device in devices)
    return is_on_cpu and process_group.size() > 1 and torch_private.is_gloo(process_group)


def _sizes_of(users: LinkUsers, num_ranks: int) -> _AgreedSizes:
    travelling = [[bucket for bucket in group.main_buckets if bucket.travels] for group in users.gathers]
    sections = tuple((str(each.dtype), each.layout.section_numel) for buckets in travelling for each in buckets)
    gathered = [sum(padded_bytes(b.layout.section_numel * b.full_dtype.itemsize) for b in each) for each in travelling]
    reduced = [numel * itemsize for group in users.reduces for numel, itemsize in group.largest_reductions()]
    summed = sum(numel * itemsize for group in users.sums for numel, itemsize in group.largest_reductions())
    slot = slot_bytes(max(reduced, default=0), num_ranks)
    return _AgreedSizes(sections, slot, sum_slot_bytes(summed), max(gathered, default=0), num_ranks)


def register_transports() -> None:
    """Register these transports for groups of CPU ranks; ``shardwise/__init__.py`` calls it once."""
    link_providers.append(LinkProvider(can_link, take_shareable, GroupLink))

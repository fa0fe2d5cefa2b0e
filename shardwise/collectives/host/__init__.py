"""Transports that only CPU ranks use: shared memory on one host, else an all-to-all in place of gloo's reduce-scatter."""

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
from shardwise.collectives.c10d import HostWork, all_to_all_rows
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
from shardwise.collectives.host.shared_memory import HostLink, outbox_bytes, slot_bytes, sum_slot_bytes, sums_bytes
from shardwise.collectives.protocol import GatherEnds, Handle, Scale, ScatterEnds
from shardwise.collectives.routes import (
    Link,
    LinkedBucket,
    LinkProvider,
    LinkUsers,
    PassKind,
    Transport,
    can_sum_in_parts,
    link_providers,
    sum_sections,
)
from shardwise.consistency.agreement import StoreExchange
from shardwise.errors import TransportError
from shardwise.layout import Bucket

# ---- gloo's reduce-scatter is an all-reduce: it sends twice the bytes, and sums in an order of its own.


class ExchangeLink(Link):
    """Reduce-scatters by an all-to-all, and a sum in rank order, with the bits of shared memory; gloo gathers.

    Args:
        group: a gloo group.
        pool: memory for staging.
    """

    name = "all-to-all"

    def __init__(self, group: dist.ProcessGroup, pool: BufferPool) -> None:
        self._group, self._pool, self._size = group, pool, group.size()

    def open(self, kind: PassKind, wants_collectives: bool) -> bool:
        words = torch.tensor([wants_collectives], dtype=torch.int32, device="cpu")
        # The backend itself, since tools count the collectives of torch.distributed.
        work = torch_private.backend_of(self._group, words.device).allreduce([words], dist.ReduceOp.MAX)
        HostWork(work, lambda _: None, words, None, self._group).wait()
        return not words.item()

    def takes_gather(self, ends: GatherEnds) -> bool:
        return False

    def takes_scatter(self, ends: ScatterEnds, scale: Scale) -> bool:
        return ends.section_numel > 0 and can_sum_in_parts(scale, self._size)

    def scatter_staging(self, layout: Bucket, itemsize: int) -> int:
        return 2 * self._size * layout.section_numel * itemsize

    def all_gather(self, ends: GatherEnds) -> Handle:
        raise AssertionError("takes_gather() is False: gathers are collectives of the backend")

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        numel, size = ends.section_numel * self._size, self._size
        flat, buffer = self._pool.acquire_tensor(2 * numel, ends.dtype)
        sent, received = flat[:numel], flat[numel:]
        ends.fill(sent)
        into, out_of = (half.view(torch.uint8).view(size, -1) for half in (received, sent))

        def end(received: torch.Tensor) -> None:
            out = ends.target()
            sum_sections(ends.layout, received.view(size, -1).unbind(), scale, self._group.rank(), out)
            ends.deliver(out)

        work = all_to_all_rows(into, out_of, self._group, async_op=True)
        return HostWork(work, end, received, buffer, self._group)


# ---- The link of one group: which transport its ranks choose, and where this rank's shards lie in shared memory.


@dataclass(frozen=True, slots=True)
class _AgreedSizes:
    """The sizes that must be equal on all ranks of a group; they fix the layout of every segment.

    Attributes:
        sections: dtype and number of elements of each bucket's section.
        slot_bytes: bytes of one slot of the outbox.
        sum_slot_bytes: bytes of one slot for in-place sums.
    """

    sections: tuple[tuple[str, int], ...]
    slot_bytes: int
    sum_slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a segment."""
        return HEADER_BYTES + outbox_bytes(self.slot_bytes) + sums_bytes(self.sum_slot_bytes)

    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


class LinkSetup:
    """Agrees on the link of one process group, and makes it; the units that use the link share this object.

    Args:
        process_group: the ranks.
        users: the units that gather, reduce and sum over the link.
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
        self._users = [[weakref.ref(unit) for unit in each] for each in (users.gathers, users.reduces, users.sums)]
        self._transport: Transport = transport
        self._pool = pool
        self._timeout_s = timeout_s
        self._sizes: _AgreedSizes | None = None
        self._link: Link | None = None
        self._exchange: StoreExchange | None = None
        self._published: list[ArenaPlace] = []
        self._num_published = 0

    def prepare(self) -> Link | None:
        """Return the link for the next pass; make a new one at first use and after the sizes of shards have changed.

        Collective when it makes one.  Raises: DesyncError if a rank does not arrive or has shards of other sizes.
        """
        if self._sizes is not None and not isinstance(self._link, HostLink):
            return self._link
        users = LinkUsers(*([unit for ref in refs if (unit := ref()) is not None] for refs in self._users))
        buckets = [bucket for unit in users.gathers for bucket in unit.main_buckets if bucket.travels]
        if self._sizes is None or any(bucket.number is None for bucket in buckets):
            sizes = _sizes_of(users, self._process_group.size())
            if sizes != self._sizes:
                self._sizes = sizes
                self._link = self._make(sizes)
                self._published = []
        if isinstance(self._link, HostLink):
            self._publish_sections(buckets, self._link)
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
            link.sections.publish(self._num_published)

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
        if meeting.segments:
            return self._make_shared(sizes, meeting)
        return None if meeting.transport == "collective" else ExchangeLink(self._process_group, self._pool)

    def _make_shared(self, sizes: _AgreedSizes, meeting: Outcome) -> HostLink:
        self._exchange = meeting.exchange
        ref, rank = weakref.ref(self), self._process_group.rank()

        def places_of(rank: int, number: int) -> Sequence[ArenaPlace]:
            owner = ref()
            assert owner is not None  # the LinkSetup owns the link, so it outlives it
            return owner._places_of(rank, number)

        host = HostGroup(meeting.segments, meeting.pids, rank, meeting.exchange.members, places_of)
        return HostLink(host, HEADER_BYTES, sizes.slot_bytes, self._timeout_s, sizes.sum_slot_bytes)


def can_link(process_group: dist.ProcessGroup, devices: Collection[torch.device]) -> bool:
    """True if a group may use a link for tensors on ``devices``: it has several ranks, on CPU, over gloo."""
    is_on_cpu = all(device.type == "cpu" for device in devices)
    return is_on_cpu and process_group.size() > 1 and torch_private.is_gloo(process_group)


def _sizes_of(users: LinkUsers, num_ranks: int) -> _AgreedSizes:
    buckets = [bucket for unit in users.gathers for bucket in unit.main_buckets if bucket.travels]
    sections = tuple((str(each.dtype), each.layout.section_numel) for each in buckets)
    reduced = [numel * itemsize for unit in users.reduces for numel, itemsize in unit.largest_reductions()]
    summed = sum(numel * itemsize for unit in users.sums for numel, itemsize in unit.largest_reductions())
    slot = slot_bytes(max(reduced, default=0), num_ranks)
    return _AgreedSizes(sections, slot, sum_slot_bytes(summed))


def register_transports() -> None:
    """Register these transports for groups of CPU ranks; ``shardwise/__init__.py`` calls it once."""
    link_providers.append(LinkProvider(can_link, take_shareable, LinkSetup))

"""How the ranks of a group find out by which link they can talk: through the store, so that one that does not come is named."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from shardwise.comm.alive import host_id, read_post
from shardwise.comm.links.arena import can_share_memory
from shardwise.comm.links.link import TRANSPORTS, Transport
from shardwise.comm.links.segment import Segment, SegmentAddress
from shardwise.errors import DesyncError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank brings: the transport it wants, the bytes of its segment, and a digest of the sizes that must agree."""

    transport: Transport
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Desk:
    """Where the ranks of a group put down what the others read; ``rank`` counts in the group, ``ranks`` are global."""

    store: dist.Store
    prefix: str
    rank: int
    ranks: Sequence[int]
    timeout_s: float

    def put(self, what: str, text: str) -> None:
        """Put down this rank's ``what``."""
        self.store.set(f"{self.prefix}/{what}/{self.rank}", text)

    def exchange(self, what: str, text: str) -> list[str]:
        """Return what every rank has put down; each leaves its own."""
        self.put(what, text)
        return [self.read(what, index) for index in range(len(self.ranks))]

    def read(self, what: str, index: int) -> str:
        """Return what rank ``index`` of the group puts down.

        Raises: DesyncError if it does not come in time, TransportError if its process is gone.
        """
        key = f"{self.prefix}/{what}/{index}"
        try:
            return read_post(self.store, key, self.ranks[index], self.timeout_s)
        except TimeoutError as error:
            raise DesyncError(
                f"rank {self.ranks[index]} did not come to its first forward or backward within {self.timeout_s:g} s of "
                f"rank {self.ranks[self.rank]}; every rank must run the same units in the same order"
            ) from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks agreed on: the segments of all ranks (``segments[rank]``) if they share memory, else None.

    Attributes:
        desk: where they may put down more for each other.
    """

    transport: Transport
    desk: Desk
    segments: tuple[Segment, ...] | None = None
    pids: tuple[int, ...] = ()


def meet(group: dist.ProcessGroup, store: dist.Store, offer: Offer, timeout_s: float) -> Outcome:
    """Meet the other ranks of ``group``.  Collective.

    Raises: DesyncError on every rank if one does not come within ``timeout_s`` seconds or brings another digest;
        TransportError if its process is gone.
    """
    rank, size = group.rank(), group.size()
    ranks = [dist.get_global_rank(group, index) for index in range(size)]
    topic = f"shardwise/link/{'-'.join(map(str, ranks))}"
    number = store.add(f"{topic}/{rank}", 1)
    desk = Desk(store, f"{topic}/{number}", rank, ranks, timeout_s)
    own: Segment | None = None
    problem = ""
    if offer.transport == "auto":
        own, problem = _create(offer.num_bytes)
    address = own.address if own is not None else None
    facts = [offer.transport, offer.digest, host_id(), problem, *_fields(address)]
    theirs = desk.exchange("offer", json.dumps(facts))
    found = [json.loads(text) for text in theirs]
    _compare_digests([fields[1] for fields in found], ranks, rank)
    transport = max((fields[0] for fields in found), key=TRANSPORTS.index)
    if transport != "auto":
        return Outcome(transport, desk)
    segments, problem = _open_all(found, rank, own)
    problems = [text for text in desk.exchange("opened", problem) if text]
    if problems or segments is None:
        if rank == 0:
            _log.warning("ranks %s do not share memory (%s); they use the network", ranks, problems[0])
        return Outcome(transport, desk)
    return Outcome(transport, desk, segments, tuple(fields[4] for fields in found))


def _compare_digests(digests: Sequence[str], ranks: Sequence[int], rank: int) -> None:
    for other, digest in enumerate(digests):
        if digest != digests[rank]:
            raise DesyncError(
                f"rank {ranks[other]} and rank {ranks[rank]} have shards of different sizes or dtypes; build the same model "
                "and apply fully_shard to the same modules on every rank"
            )


def _create(num_bytes: int) -> tuple[Segment | None, str]:
    problem = can_share_memory()
    if problem:
        return None, problem
    try:
        return Segment.create(num_bytes), ""
    except (OSError, AttributeError) as error:
        return None, f"no shared memory: {error}"


def _fields(address: SegmentAddress | None) -> list[int | str]:
    return [0, 0, 0, ""] if address is None else [address.pid, address.fd, address.num_bytes, address.token]


def _open_all(
    found: Sequence[Sequence[object]], rank: int, own: Segment | None
) -> tuple[tuple[Segment, ...] | None, str]:
    problem = next((str(fields[3]) for fields in found if fields[3]), "")
    if not problem and len({fields[2] for fields in found}) > 1:
        problem = "they are on different hosts"
    if not problem and len({fields[4] for fields in found}) < len(found):
        problem = "some are threads of one process"
    if problem or own is None:
        return None, problem or "no segment of its own"
    segments: list[Segment] = []
    for other, fields in enumerate(found):
        pid, fd, num_bytes, token = fields[4:]
        if other == rank:
            segments.append(own)
            continue
        try:
            segments.append(Segment.open(SegmentAddress(int(str(pid)), int(str(fd)), int(str(num_bytes)), str(token))))
        except OSError as error:
            return None, f"rank {rank} cannot open the memory of rank {other}: {error}"
    return tuple(segments), ""

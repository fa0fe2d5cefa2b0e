"""How the ranks of a group find out by which link they can talk: through the store, so that one that does not come is named."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from shardwise.comm.alive import host_id
from shardwise.comm.links.arena import can_share_memory
from shardwise.comm.links.link import TRANSPORTS, Transport
from shardwise.comm.links.segment import Segment, SegmentAddress
from shardwise.comm.posts import Posts, open_posts
from shardwise.errors import DesyncError, TransportError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """What a rank brings: the transport it wants, the bytes of its segment, and a digest of the sizes that must agree."""

    transport: Transport
    num_bytes: int
    digest: str


def read_posts(posts: Posts, what: str, ranks: Sequence[int]) -> list[str]:
    """Return what ``ranks`` of a group post about ``what``.

    Raises: DesyncError if one does not come in time, TransportError if its process is gone.
    """
    found = posts.collect(what, ranks)
    absent = [rank for rank in ranks if rank not in found]
    if absent:
        late = (
            f"{posts.named(absent)} did not begin its first forward or backward within {posts.timeout_s:g} s of "
            f"rank {posts.members[posts.rank]}; every rank must run the same units in the same order"
        )
        kind = TransportError if posts.gone(absent) else DesyncError
        raise kind(posts.absence(absent, late))
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks agreed on.

    Attributes:
        posts: where they may leave more for each other.
        mates: the ranks that share this one's memory, itself among them: all of the group, or as many on each of several
            hosts; empty where ranks share none.
        segments, pids: of the mates.
        are_on_one_host: all ranks, whether they share memory or not.
    """

    transport: Transport
    posts: Posts
    mates: range = range(0)
    segments: tuple[Segment, ...] = ()
    pids: tuple[int, ...] = ()
    are_on_one_host: bool = False


def mates_of(rank: int, hosts: Sequence[str]) -> range:
    """Return the ranks that share a host with ``rank``, by the host of each; none unless every host has as many, side by side.

    Example:
        >>> mates_of(2, ["a", "a", "b", "b"]), mates_of(1, ["a", "a"]), mates_of(0, ["a", "b"]), mates_of(0, ["a", "a", "b"])
        (range(2, 4), range(0, 2), range(0, 0), range(0, 0))
    """
    size = hosts.count(hosts[0])
    groups = [hosts[start : start + size] for start in range(0, len(hosts), size)]
    is_even = all(len(group) == size and len(set(group)) == 1 for group in groups)
    if size == 1 or not is_even or len({group[0] for group in groups}) < len(groups):
        return range(0)
    start = rank - rank % size
    return range(start, start + size)


def meet(group: dist.ProcessGroup, offer: TransportOffer) -> Outcome:
    """Meet the other ranks of ``group``.  Collective.

    Raises: DesyncError on every rank if one does not come within its timeout or brings another digest;
        TransportError if its process is gone.
    """
    posts = open_posts(group, "link")
    rank, ranks = posts.rank, posts.members
    own: Segment | None = None
    problem = ""
    if offer.transport == "auto":
        own, problem = _create(offer.num_bytes)
    address = own.address if own is not None else None
    facts = [offer.transport, offer.digest, host_id(), problem, *_fields(address)]
    posts.post("offer", json.dumps(facts))
    found = [json.loads(text) for text in read_posts(posts, "offer", range(posts.size))]
    _compare_digests([fields[1] for fields in found], ranks, rank)
    transport = max((fields[0] for fields in found), key=TRANSPORTS.index)
    on_one_host = len({fields[2] for fields in found}) == 1
    if transport != "auto":
        return Outcome(transport, posts, are_on_one_host=on_one_host)
    mates = mates_of(rank, [fields[2] for fields in found])
    segments, problem = _open_all(found, posts, own, mates)
    posts.post("opened", problem)
    problems = [text for text in read_posts(posts, "opened", range(posts.size)) if text]
    if problems:
        if rank == 0:
            _log.warning("ranks %s do not share memory (%s); they use the network", ranks, problems[0])
        return Outcome(transport, posts, are_on_one_host=on_one_host)
    return Outcome(transport, posts, mates, segments, tuple(found[mate][4] for mate in mates), on_one_host)


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
    found: Sequence[Sequence[object]], posts: Posts, own: Segment | None, mates: range
) -> tuple[tuple[Segment, ...], str]:
    problem = next((str(fields[3]) for fields in found if fields[3]), "")
    if not problem and not mates:
        problem = "they are on different hosts"
        if len({fields[2] for fields in found}) < len(found):
            problem += ", not as many on each, or not side by side"
    if not problem and len({found[mate][4] for mate in mates}) < len(mates):
        problem = "some are threads of one process"
    if problem or own is None:
        return (), problem or "no segment of its own"
    segments: list[Segment] = []
    for mate in mates:
        pid, fd, num_bytes, token = found[mate][4:]
        if mate == posts.rank:
            segments.append(own)
            continue
        try:
            segments.append(Segment.open(SegmentAddress(int(str(pid)), int(str(fd)), int(str(num_bytes)), str(token))))
        except OSError as error:
            return (), f"rank {posts.members[posts.rank]} cannot open the memory of rank {posts.members[mate]}: {error}"
    return tuple(segments), ""

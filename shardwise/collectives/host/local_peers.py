"""The ranks of one host as one of them sees them: passes that they enter and leave together, and words that they wait for.

Ranks order their accesses to each other's memory by words in the headers of their segments.  That needs stores to be seen in
the order they were made, which x86-64 guarantees and others do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import platform
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardwise.collectives.routes import TRANSPORTS, PassKind, Transport
from shardwise.consistency import store as alarm
from shardwise.consistency.agreement import StoreExchange, open_exchange
from shardwise.consistency.failure_report import cited, exit_hooks, gone_in_words, look_next, store_of_job
from shardwise.consistency.liveness import Liveness, host_id, is_gone
from shardwise.errors import DesyncError, TransportError
from shardwise.layout import align
from shardwise.observe import WAITS, note
from shardwise.waiting import MEMORY_PAUSES_S, comes_soon, wait_until

# ---- Memory that processes of one host share: nameless files, gone with the last process that maps them, even after
# kill -9.

_TOKEN_BYTES = 16
WORDS_START = 64  # bytes; the token and room before it
NUM_WORDS = 504
HEADER_BYTES = WORDS_START + 8 * NUM_WORDS  # one page
_MAP_FIXED = 0x10

# Segments that a forked child must be cut off from: it inherits shared mappings.
# Mappings, not segments: tensors keep a mapping after its link has gone.
_live_maps: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()  # to the descriptor of its file
_mapped: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()  # of other processes, by token


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """What another process of the host needs to map a segment."""

    pid: int
    fd: int
    num_bytes: int
    token: str


class Segment:
    """A shared mapping: a header page with 64-bit words that one process writes and others poll, then bytes.

    Attributes:
        words: the header's words; aligned 8-byte loads and stores.
        num_bytes: size, header included.
    """

    def __init__(self, fd: int, num_bytes: int, token: bytes | None) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, num_bytes)
        self.num_bytes = num_bytes
        if token is not None:
            self._map[:_TOKEN_BYTES] = token
        self.token = self._map[:_TOKEN_BYTES].hex()
        self.words = memoryview(self._map)[WORDS_START:HEADER_BYTES].cast("q")
        _live_maps[self._map] = fd
        # Closed with the map, not before: a forked child maps the file again.  Last: before this, who fails closes.
        weakref.finalize(self._map, os.close, fd)

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """Return a new segment of zeros; pages take memory when they are first written.

        Raises: OSError where the platform has no memfds or no memory is left; AttributeError outside of Linux.
        """
        fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            return cls(fd, num_bytes, secrets.token_bytes(_TOKEN_BYTES))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, address: SegmentAddress) -> Segment:
        """Map another process's segment; one that is mapped already is the same object.

        Raises: OSError if that process is not of this host, container or user, or the file there is another.
        """
        known = _mapped.get(address.token)
        if known is not None:
            return known
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != address.num_bytes:
                raise OSError(f"process {address.pid} has another file there")
            found = cls(fd, address.num_bytes, None)
        except BaseException:
            os.close(fd)
            raise
        if found.token != address.token:
            raise OSError(f"process {address.pid} has another file there")
        _mapped[address.token] = found
        return found

    @property
    def mapping(self) -> mmap.mmap:
        """The memory."""
        return self._map

    @property
    def address(self) -> SegmentAddress:
        """How other processes find this segment, which this process has made."""
        return SegmentAddress(os.getpid(), self._fd, self.num_bytes, self.token)

    def array(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return ``num_bytes`` bytes from byte ``offset``; the mapping lives as long as the array."""
        return np.frombuffer(self._map, dtype=np.uint8, count=num_bytes, offset=offset)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements from byte ``offset`` as a 1-D tensor whose storage starts there.

        The mapping lives as long as the storage.
        """
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)


def foreign_ranges() -> list[tuple[int, int]]:
    """Return where memory of other processes is mapped here: addresses of first bytes, and those after the last ones."""
    found: list[tuple[int, int]] = []
    for segment in list(_mapped.values()):
        start = ctypes.addressof(ctypes.c_char.from_buffer(segment.mapping))
        found.append((start, start + segment.num_bytes))
    return found


def _make_private(mapping: mmap.mmap, fd: int) -> None:
    """Replace a shared mapping, in place, by one whose writes others do not see (but which may show their later ones)."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if libc.mmap(address, len(mapping), access, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "a forked process cannot be cut off from the shared memory of its parent")


def _after_fork_in_child() -> None:
    for mapping, fd in list(_live_maps.items()):
        _make_private(mapping, fd)


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- Memory for shards that other ranks of this host can map.
# Shards are made in it, so that they need not move when the ranks have found out that they share memory: whoever holds a
# tensor of them holds the memory that training goes on in.

_SEGMENT_BYTES = 1 << 28  # of addresses: pages take memory when they are first written
_PAGE_BYTES = 4096
_LINE_BYTES = 64
_ORDERED_STORES = ("x86_64", "AMD64")  # architectures whose stores other cores see in order


def can_share_memory() -> str:
    """Return "" if processes of this host could share memory as shardwise needs it, else the reason why not."""
    if platform.machine() not in _ORDERED_STORES:
        return f"the order of stores is not defined on {platform.machine()}"
    return ""


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Where some memory lies for other processes: ``offset`` bytes into a segment."""

    segment: Segment
    offset: int


class Arena:
    """Hands out memory of segments; what is no longer used goes back to the system page by page."""

    def __init__(self) -> None:
        self._segment: weakref.ref[Segment] | None = None
        self._used = 0
        self._pid = os.getpid()

    def take(self, num_bytes: int) -> tuple[torch.Tensor, ArenaPlace] | None:
        """Return ``num_bytes`` zeros as a 1-D tensor of bytes and where they lie; None where memory cannot be shared."""
        grain = _PAGE_BYTES if num_bytes >= _PAGE_BYTES else _LINE_BYTES
        segment = self._segment() if self._segment is not None and self._pid == os.getpid() else None
        start = align(self._used, grain)
        if segment is None or start + num_bytes > segment.num_bytes:
            try:
                segment = Segment.create(max(_SEGMENT_BYTES, align(HEADER_BYTES + num_bytes, _PAGE_BYTES)))
            except (OSError, AttributeError):
                return None
            self._segment, self._pid = weakref.ref(segment), os.getpid()
            start = HEADER_BYTES
        self._used = align(start + num_bytes, grain)
        array = segment.array(start, num_bytes)
        if grain == _PAGE_BYTES:
            weakref.finalize(array, _give_back, segment.mapping, start, self._used - start).atexit = False
        return torch.from_numpy(array), ArenaPlace(segment, start)


_of_process = Arena()  # it holds no memory: the tensors made in it do


def take_shareable(num_bytes: int) -> tuple[torch.Tensor, ArenaPlace] | None:
    """Return ``num_bytes`` zeros as a 1-D tensor of bytes and where they lie; None where memory cannot be shared."""
    return None if can_share_memory() else _of_process.take(num_bytes)


def _give_back(mapping: mmap.mmap, start: int, num_bytes: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # a forked child has a private mapping, which cannot give back
        mapping.madvise(mmap.MADV_REMOVE, start, num_bytes)


# ---- How the ranks of a group find out by which link they can talk: through the store, so that one that does not
# come is named.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """What a rank brings: the transport it wants, the bytes of its segment, and a digest of the sizes that must agree."""

    transport: Transport
    num_bytes: int
    digest: str


def collect_from(exchange: StoreExchange, what: str, ranks: Sequence[int]) -> list[str]:
    """Return what ``ranks`` of a group post about ``what``.

    Raises: DesyncError if one does not come in time, TransportError if its process is gone.
    """
    found = exchange.collect(what, ranks)
    if absent := [rank for rank in ranks if rank not in found]:
        late = (
            f"{exchange.named(absent)} did not begin its first forward or backward within {exchange.timeout_s:g} s of "
            f"rank {exchange.members[exchange.rank]}; every rank must run the same units in the same order"
        )
        kind = TransportError if exchange.gone(absent) else DesyncError
        raise kind(exchange.absence(absent, late))
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks agreed on.

    Attributes:
        exchange: where they may leave more for each other.
        local_peers: the ranks that share this one's memory, itself among them: all of the group, or as many on each of several
            hosts; empty where ranks share none.
        segments, pids: of the local peers.
        are_on_one_host: all ranks, whether they share memory or not.
    """

    transport: Transport
    exchange: StoreExchange
    local_peers: range = range(0)
    segments: tuple[Segment, ...] = ()
    pids: tuple[int, ...] = ()
    are_on_one_host: bool = False


def local_peers_of(rank: int, hosts: Sequence[str]) -> range:
    """Return the ranks that share a host with ``rank``, by the host of each; none unless every host has as many, side by side.

    Example:
        >>> local_peers_of(2, ["a", "a", "b", "b"]), local_peers_of(1, ["a", "a"]), local_peers_of(0, ["a", "b"]),
        local_peers_of(0, ["a", "a", "b"]) (range(2, 4), range(0, 2), range(0, 0), range(0, 0))
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
    exchange = open_exchange(group, "link")
    rank, ranks = exchange.rank, exchange.members
    own, problem = _create(offer.num_bytes) if offer.transport == "auto" else (None, "")
    address = None if own is None else astuple(own.address)
    exchange.post("offer", json.dumps([offer.transport, offer.digest, host_id(), problem, address]))
    found = [json.loads(text) for text in collect_from(exchange, "offer", range(exchange.size))]
    _compare_digests([fields[1] for fields in found], ranks, rank)
    transport = max((fields[0] for fields in found), key=TRANSPORTS.index)
    on_one_host = len({fields[2] for fields in found}) == 1
    if transport != "auto":
        return Outcome(transport, exchange, are_on_one_host=on_one_host)
    local_peers = local_peers_of(rank, [fields[2] for fields in found])
    segments, problem = _open_all(found, exchange, own, local_peers)
    exchange.post("opened", problem)
    problems = [text for text in collect_from(exchange, "opened", range(exchange.size)) if text]
    if problems:
        if rank == 0:
            _log.warning("ranks %s do not share memory (%s); they use the network", ranks, problems[0])
        return Outcome(transport, exchange, are_on_one_host=on_one_host)
    return Outcome(
        transport, exchange, local_peers, segments, tuple(found[peer][4][0] for peer in local_peers), on_one_host
    )


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


def _open_all(
    found: Sequence[Sequence[Any]], exchange: StoreExchange, own: Segment | None, local_peers: range
) -> tuple[tuple[Segment, ...], str]:
    problem = next((fields[3] for fields in found if fields[3]), "")
    if not problem and not local_peers:
        problem = "they are on different hosts"
        if len({fields[2] for fields in found}) < len(found):
            problem += ", not as many on each, or not side by side"
    if not problem and len({found[peer][4][0] for peer in local_peers}) < len(local_peers):
        problem = "some are threads of one process"
    if problem or own is None:
        return (), problem or "no segment of its own"
    segments: list[Segment] = []
    for peer in local_peers:
        try:
            segments.append(own if peer == exchange.rank else Segment.open(SegmentAddress(*found[peer][4])))
        except OSError as error:
            return (
                (),
                f"rank {exchange.members[exchange.rank]} cannot open the memory of rank {exchange.members[peer]}: {error}",
            )
    return tuple(segments), ""


# Words of a segment's header: written by its owner, polled by the others.  All but the first are stamps, see _stamp.
_EPOCH = 0  # one more whenever this rank, or one that it has heard of, has left a pass by an exception
_OPEN = 1  # the pass entered last, with the flags below
CLOSED = 2  # the last pass that this rank has done its part of
_LEFT = 3  # the last pass that this rank has left by an exception
_LATE = 4  # the epoch that this rank left because a peer was late, and, in the low bits, 1 + which
FIRST_FREE = 5  # from here on: words of those who move bytes

_live: weakref.WeakSet[LocalPeers] = weakref.WeakSet()  # those of this process, which leaves them all when it ends

_WANTS_COLLECTIVES, _IN_BACKWARD = 1, 2  # flags of _OPEN
_CALL_BITS, _PASS_BITS = 20, 24


def _stamp(epoch: int, pass_number: int, call: int = 0) -> int:
    """Return a number that grows with the epoch, then with the pass in it, then with the call in that."""
    return (epoch << _PASS_BITS | pass_number) << _CALL_BITS | call


@dataclass(frozen=True, slots=True)
class HostGroup:
    """The ranks of a group that are processes of one host: all of the group, or some.

    Attributes:
        segments: one per rank of this host, in the order of the group: a header, then what they exchange.
        pids: process ids, for telling a rank that is gone from one that is late.
        place: this rank's among them.
        ranks: their numbers in the group.  members: the global rank of each rank of the group, as errors name them.
        places_of: ``places_of(rank, number)`` returns where the sections of ``rank`` (of the group) lie, as it has said for the
            ``number``-th time: for each bucket of the link, in order.
    """

    segments: tuple[Segment, ...]
    pids: tuple[int, ...]
    place: int
    ranks: range
    members: tuple[int, ...]
    places_of: Callable[[int, int], Sequence[ArenaPlace]]


class LocalPeers:
    """This rank's words and those of the others of its host, who are numbered by their places on it.

    Passes are counted from the last exception on: a rank that leaves a pass by one enters a new epoch, the others follow with
    an error when they next look at it, and all meet in the first pass of that epoch.

    Args:
        host: the ranks.
        timeout_s: how long to wait for a rank that is alive.
        signs: words of those who move bytes that errors tell of, and what each counts.

    Attributes:
        others: the places of the others.  kind: of the last pass.
        blamed: the rank that the last error here was about.
    """

    def __init__(self, host: HostGroup, timeout_s: float, signs: Sequence[tuple[int, str]] = ()) -> None:
        assert len(host.segments) == len(host.pids) == len(host.ranks)
        self.others = tuple(place for place in range(len(host.segments)) if place != host.place)
        self.kind: PassKind = "forward"
        self.blamed = host.ranks[host.place]
        self._ranks, self._pids, self._signs = host.ranks, host.pids, signs
        self._members, self._name = host.members, host.members[self.blamed]
        self._words = tuple(segment.words for segment in host.segments)
        self._mine = self._words[host.place]
        assert max(host.ranks) + 1 < 1 << _CALL_BITS
        self._alive = {place: Liveness(host.pids[place]) for place in self.others}
        self._timeout_s = timeout_s
        self._epoch = self._pass_number = 0
        _live.add(self)

    # ---- passes ----

    def open(self, kind: PassKind, wants_collectives: bool) -> bool:
        """Enter a pass with the others; return True unless one wants collectives.  Who gets an error aborts."""
        what = f"the start of a {kind}"
        self._check_epochs(what)
        self._pass_number += 1
        self.kind = kind
        flags = _IN_BACKWARD * (kind == "backward")
        self._mine[_OPEN] = self.start | flags | wants_collectives
        self.wait_for_all(_OPEN, self.start, what)
        for place in self.others:
            self._check_entered(place, self.start | flags, what)
        return not (wants_collectives or any(self._words[place][_OPEN] & _WANTS_COLLECTIVES for place in self.others))

    def _check_entered(self, place: int, word: int, what: str) -> None:
        words = self._words[place]
        found = words[_OPEN] & ~_WANTS_COLLECTIVES
        if found >> _CALL_BITS != word >> _CALL_BITS:
            if words[_LEFT] >> _CALL_BITS == word >> _CALL_BITS:
                return  # it was there: this rank may come to the same exception, and hears of the other's when it needs it
            if found >> (_CALL_BITS + _PASS_BITS) != self._epoch:
                self._check_epoch(place, what)
        if found != word:
            other = "forward" if word & _IN_BACKWARD else "backward"
            raise self._blame(
                place,
                f"rank {self.name_of(place)} starts a {other} where rank {self._name} starts a {self.kind}; every rank must "
                "make the same calls in the same order",
            )

    def close(self, waits: Callable[[str], None]) -> None:
        """Leave the pass; a backward ends for nobody before all have done their part of it.

        ``waits(what)`` returns when no other reads in this forward what is about to change.
        """
        what = f"the end of a {self.kind}"
        if self.kind == "backward":
            self._mine[CLOSED] = self.start
            self.wait_for_all(CLOSED, self.start, what)
        else:
            waits(what)
        self._check_epochs(what)
        self._mine[CLOSED] = self.start

    def abort(self) -> None:
        """Leave the pass by an exception."""
        # One epoch for all that leave because of each other.
        newest = max(self._words[place][_EPOCH] for place in self.others)
        self._mine[_LEFT] = self.start
        self._epoch = newest if newest > self._epoch else self._epoch + 1
        self._pass_number = 0
        self._mine[_EPOCH] = self._epoch

    def meet_after_exception(self, what: str) -> None:
        """Wait until all others have left what this rank has left by an exception: until then they read what was said in it.

        Raises: as :meth:`wait_for_all`.
        """
        for place in self.others:
            if self._words[place][_EPOCH] < self._epoch:
                self.wait_for(place, lambda words=self._words[place]: words[_EPOCH] >= self._epoch, what)

    # ---- words ----

    @property
    def start(self) -> int:
        """The stamp of the pass."""
        return _stamp(self._epoch, self._pass_number)

    def stamp(self, index: int) -> int:
        """Return the stamp of collective number ``index`` of its kind in this pass; -1: of none yet."""
        return _stamp(self._epoch, self._pass_number, index + 1)

    def long_stamp(self, index: int) -> int:
        """Return the stamp of number ``index`` of what is counted from pass to pass, from the last exception on."""
        return _stamp(self._epoch, 0) + index + 1

    def say(self, word: int, value: int) -> None:
        """Let the others read ``value``, and all that was written before."""
        self._mine[word] = value

    def hear(self, place: int, word: int) -> int:
        """Return what the rank at ``place`` has said last."""
        return self._words[place][word]

    def have_said(self, word: int, at_least: int) -> bool:
        """True if all others have said ``at_least`` that."""
        return all(self._words[place][word] >= at_least for place in self.others)

    def wait_for_all(self, word: int, at_least: int, what: str) -> None:
        """Wait until all others have said ``at_least`` that.

        Raises: TransportError if one is gone, has left the pass by an exception, or does not come in time.
        """
        for place in self.others:
            if self._words[place][word] < at_least:
                words = self._words[place]
                self.wait_for(place, lambda words=words: words[word] >= at_least, what)

    def wait_for(self, place: int, is_there: Callable[[], bool], what: str) -> None:
        """Wait for the rank at ``place`` until ``is_there()``, which reads its words.  Raises: as :meth:`wait_for_all`."""
        if comes_soon(is_there):
            return
        note(f"{WAITS}rank {self.name_of(place)}", what)
        start, alive = time.monotonic(), self._alive[place]

        def look() -> None:
            alarm.look()
            self._check_epochs(what)

        if wait_until(is_there, self._timeout_s, look, lambda: not alive.is_alive(), MEMORY_PAUSES_S):
            return
        if not alive.is_alive():
            raise self._lost(place, f"rank {self._name} waited {time.monotonic() - start:.1f} s for it at {what}")
        self._mine[_LATE] = self._epoch << _CALL_BITS | self._ranks[place] + 1
        raise self._blame(
            place,
            f"rank {self._name} waited {self._timeout_s:g} s for rank {self.name_of(place)} at {what}: "
            f"{self._last_sign(place)}; every rank must make the same calls in the same order",
        )

    def _check_epochs(self, what: str) -> None:
        for place in self.others:
            self._check_epoch(place, what)

    def _check_epoch(self, place: int, what: str) -> None:
        if self._words[place][_EPOCH] <= self._epoch:
            return
        gone = [each for each in self.others if self._has_stayed(each) and not self._alive[each].is_alive()]
        if gone:  # why the other one has left
            raise self._lost(gone[0], f"rank {self._name} was at {what}")
        for other in self.others:
            epoch, late = divmod(self._words[other][_LATE], 1 << _CALL_BITS)
            if late and epoch == self._epoch < self._words[other][_EPOCH]:
                self.blamed = late - 1
                raise TransportError(
                    f"rank {self.name_of(other)} waited {self._timeout_s:g} s for rank {self._members[late - 1]} while rank "
                    f"{self._name} was at {what}; every rank must make the same calls in the same order"
                )
        its = self.name_of(place)
        raise self._blame(
            place,
            f"rank {its} raised an exception while rank {self._name} was at {what}; "
            f"see the error of rank {its}{cited(store_of_job(), [its])}",
        )

    def name_of(self, place: int) -> int:
        """Return the global rank of the rank at ``place``."""
        return self._members[self._ranks[place]]

    def _blame(self, place: int, problem: str) -> TransportError:
        self.blamed = self._ranks[place]
        return TransportError(problem)

    def _lost(self, place: int, where: str) -> TransportError:
        """Return the error for the rank at ``place``, whose process has ended: what it did last, and what it said."""
        store, name = store_of_job(), self.name_of(place)
        if store is not None:
            is_gone(store, name)  # other hosts hear of it
        text = gone_in_words(store, [name])
        return self._blame(place, f"{text}; {where}: {self._last_sign(place)}. {look_next()}")

    def _last_sign(self, place: int) -> str:
        """Say what the words of the rank at ``place`` show that it has done last."""
        words, name = self._words[place], self.name_of(place)
        pass_number, mine = words[_OPEN] >> _CALL_BITS, self._mine[_OPEN] >> _CALL_BITS
        if not pass_number:
            return f"rank {name} had not begun it"
        which = "the same" if pass_number == mine else "an earlier" if pass_number < mine else "a later"
        kind = "backward" if words[_OPEN] & _IN_BACKWARD else "forward"
        done = [
            f"{words[word] & (1 << _CALL_BITS) - 1} {what}"
            for word, what in self._signs
            if words[word] >> _CALL_BITS == pass_number
        ]
        counts = f" ({', '.join(done)})" if done else ""
        ended = ", which it has finished" if words[CLOSED] >> _CALL_BITS == pass_number else ""
        return f"rank {name} was last in {which} {kind}{counts}{ended}"

    def _has_stayed(self, place: int) -> bool:
        return self._words[place][_EPOCH] <= self._epoch


def _leave_all() -> None:
    for local_peers in list(_live):
        local_peers.abort()


exit_hooks.append(_leave_all)

"""Local peers: the ranks of one host, which enter and leave passes together and synchronize over words in shared memory.

Each rank writes 64-bit words in the header of its segment, and the others poll them; the words order all accesses to
shared memory.  Other cores must see stores in program order, which x86-64 guarantees and other architectures do not.
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
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardwise.collectives.routes import TRANSPORTS, PassKind, Transport
from shardwise.consistency import store as alarm
from shardwise.consistency.agreement import StoreExchange, open_exchange
from shardwise.consistency.failure_report import (
    cited,
    exit_hooks,
    gone_in_words,
    look_next,
    publish_failure,
)
from shardwise.consistency.process_groups import Liveness, host_id, is_gone
from shardwise.consistency.store import MEMORY_PAUSES_S, comes_soon, default_store, wait_until
from shardwise.errors import DesyncError, StateError, TransportError
from shardwise.layout import align
from shardwise.observe import WAITS, Call, Listener, listeners, note

# ---- Shared memory of one host: nameless files (memfd) that vanish with the last process that maps them, even after
# kill -9.

_TOKEN_BYTES = 16
WORDS_START = 64  # bytes; the token precedes the words
NUM_WORDS = 504
HEADER_BYTES = WORDS_START + 8 * NUM_WORDS  # one page
_MAP_FIXED = 0x10
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write, and wait for nothing

# A forked child inherits shared mappings and must be cut off from them. The keys are mappings, not segments: tensors
# keep a mapping alive after its link is gone.
_live_maps: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()  # mapping -> descriptor of its file
# token -> segment of another process
_mapped: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()


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
        words: the words of the header; loads and stores are aligned and 8 bytes wide.
        num_bytes: size, header included.
    """

    def __init__(self, fd: int, num_bytes: int, token: bytes | None) -> None:
        self._fd = fd
        self.mapping = mmap.mmap(fd, num_bytes)
        self.num_bytes = num_bytes
        if token is not None:
            self.mapping[:_TOKEN_BYTES] = token
        self.token = self.mapping[:_TOKEN_BYTES].hex()
        self.words = memoryview(self.mapping)[WORDS_START:HEADER_BYTES].cast("q")
        _live_maps[self.mapping] = fd
        # The descriptor stays open as long as the mapping: a forked child maps the file again. This comes last, because
        # before it the caller closes the descriptor on failure.
        weakref.finalize(self.mapping, os.close, fd)

    @classmethod
    def create(cls, num_bytes: int, folder: str = "") -> Segment:
        """Return a new segment of zeros; pages take memory when they are first written.

        ``folder``: of a disk, where the segment has its space in a file without a name, to which pages go when memory is short.
        Raises: OSError if the platform has no memfds or no memory is left; AttributeError outside Linux.
        """
        if folder:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                fd = os.dup(file.fileno())
        else:
            fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            return cls(fd, num_bytes, secrets.token_bytes(_TOKEN_BYTES))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, address: SegmentAddress) -> Segment:
        """Map a segment of another process; return the same object if it is mapped already.

        Raises: OSError if that process belongs to another host, container or user, or its descriptor is another file.
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
    def address(self) -> SegmentAddress:
        """What other processes need to map this segment, which this process has created."""
        return SegmentAddress(os.getpid(), self._fd, self.num_bytes, self.token)

    def array(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return ``num_bytes`` bytes from byte ``offset``; the array keeps the mapping alive."""
        return np.frombuffer(self.mapping, dtype=np.uint8, count=num_bytes, offset=offset)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements from byte ``offset`` as a 1-D tensor whose storage starts there.

        The storage keeps the mapping alive.
        """
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self.mapping, dtype=dtype, count=numel, offset=offset)


class PageOut(Listener):
    """Pages files of segments out after a unit's part of a forward, a backward, an optimizer step or ``init_parameters``.

    Mapped pages would be resident until memory is short, and changed ones would be written only then, while the step waits.
    """

    def end(self, track: str, what: str, subject: str, num_bytes: int, call: Call | None) -> None:
        if what in ("reshard", "update", "redo", "initialize"):
            self.run()

    def run(self) -> None:
        """Unmap all pages, and begin to write those that have changed, so that the system can free all when memory is short.

        The next access maps the page again: from the page cache, where also other ranks find it, or from the disk.
        """
        has_work = False
        for mapping in [ref() for ref in _live_maps.keyrefs()]:  # a list: other threads may create segments
            if mapping is not None and not os.readlink(f"/proc/self/fd/{_live_maps[mapping]}").startswith("/memfd:"):
                has_work = True
                mapping.madvise(mmap.MADV_DONTNEED)
                ctypes.CDLL(None).sync_file_range(_live_maps[mapping], ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)
        if has_work != (self in listeners):  # a step without such segments pays nothing
            (listeners.append if has_work else listeners.remove)(self)


_page_out = PageOut()


def _make_private(mapping: mmap.mmap, fd: int) -> None:
    """Replace a shared mapping, in place, by a private one.

    Other processes do not see writes to it; it may show later writes of theirs.
    """
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
    _live_maps.clear()  # what is written to private pages would be lost with them


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- Memory for shards that other ranks of this host can map.
# Shards are created in it before ranks know whether they share memory, so that they need not move later: tensors that
# user code references would keep the old memory.

_SEGMENT_BYTES = 1 << 28  # address space: pages take memory when they are first written
_PAGE_BYTES = 4096
_LINE_BYTES = 64
_ORDERED_STORES = ("x86_64", "AMD64")  # architectures on which other cores see stores in program order


def can_share_memory() -> str:
    """Return "" if processes of this host can share memory, else the reason why not."""
    if platform.machine() not in _ORDERED_STORES:
        return f"the order of stores is not defined on {platform.machine()}"
    return ""


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Where memory lies for other processes: ``offset`` bytes into a segment."""

    segment: Segment
    offset: int


class Arena:
    """Hand out memory of segments; return unused memory to the system page by page.  ``folder``: where the segments are."""

    def __init__(self, folder: str = "") -> None:
        self._folder = folder
        self._segment: weakref.ref[Segment] | None = None
        self._used = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()  # threads may shard models at the same time

    def take(self, num_bytes: int) -> tuple[torch.Tensor, ArenaPlace] | None:
        """Return ``num_bytes`` zeros as a 1-D byte tensor, and their place; None if memory cannot be shared."""
        with self._lock:
            return self._take(num_bytes)

    def _take(self, num_bytes: int) -> tuple[torch.Tensor, ArenaPlace] | None:
        grain = _PAGE_BYTES if num_bytes >= _PAGE_BYTES else _LINE_BYTES
        segment = self._segment() if self._segment is not None and self._pid == os.getpid() else None
        start = align(self._used, grain)
        if segment is None or start + num_bytes > segment.num_bytes:
            size = max(_SEGMENT_BYTES, align(HEADER_BYTES + num_bytes, _PAGE_BYTES))
            try:
                segment = Segment.create(size, self._folder)
            except (OSError, AttributeError) as error:
                if not self._folder:
                    return None
                text = f"DiskOffloadPolicy: no file of {size >> 20} MiB in the folder {self._folder}: {error}. Name another one"
                publish_failure(text)
                raise StateError(text) from error
            self._segment, self._pid = weakref.ref(segment), os.getpid()
            start = HEADER_BYTES
        self._used = align(start + num_bytes, grain)
        if self._folder:
            _page_out.run()  # also what was made before: parameters or gradients of another unit
        array = segment.array(start, num_bytes)
        if grain == _PAGE_BYTES:
            # It keeps the segment, of which the next call takes more, also where the caller drops the place (gradients).
            weakref.finalize(array, _give_back, segment, start, self._used - start).atexit = False
        return torch.from_numpy(array), ArenaPlace(segment, start)


_arenas: dict[str, Arena] = {}  # by folder; an arena owns no memory: the tensors made in it do


def take_shareable(num_bytes: int, folder: str = "") -> tuple[torch.Tensor, ArenaPlace] | None:
    """Return ``num_bytes`` zeros as a 1-D byte tensor, and their place; None if memory cannot be shared."""
    return None if can_share_memory() else _arenas.setdefault(folder, Arena(folder)).take(num_bytes)


def _give_back(segment: Segment, start: int, num_bytes: int) -> None:
    # a forked child has a private mapping, from which no page can be removed
    with contextlib.suppress(OSError, ValueError):
        segment.mapping.madvise(mmap.MADV_REMOVE, start, num_bytes)


# ---- The ranks of a group agree on a link through the store, so that an absent rank is named.

_log = logging.getLogger(__name__)


def collect_from(exchange: StoreExchange, what: str, ranks: Sequence[int]) -> list[str]:
    """Return what ``ranks`` of a group posted under ``what``.

    Raises: DesyncError if one does not arrive in time, TransportError if its process is gone.
    """
    return _complete(exchange, exchange.collect(what, ranks), ranks)


def _complete(exchange: StoreExchange, found: Mapping[int, str], ranks: Sequence[int]) -> list[str]:
    if absent := [rank for rank in ranks if rank not in found]:
        late = (
            f"{exchange.named(absent)} did not begin its first forward or backward within {exchange.timeout_s:g} s of "
            f"rank {exchange.members[exchange.rank]}; every rank must run the same units in the same order"
        )
        kind = TransportError if exchange.gone(absent) else DesyncError
        raise kind(exchange.absence(absent, late))
    return list(found.values())


@dataclass(frozen=True, slots=True)
class HostGroup:
    """The ranks of a group whose ranks are processes of one host.

    Attributes:
        segments: one per rank: a header, then the shared bytes.
        pids: process ids, which tell a dead rank from a late one.
        rank: this one.  members: the global rank of each rank, as errors name them.
        exchange: where ranks post more for each other.
    """

    segments: tuple[Segment, ...]
    pids: tuple[int, ...]
    rank: int
    members: tuple[int, ...]
    exchange: StoreExchange


def meet(group: dist.ProcessGroup, transport: Transport, num_bytes: int, digest: str) -> HostGroup | Transport:
    """Return the ranks of ``group`` if they share memory, else the transport that they agree on.  Collective.

    Args:
        transport: the one that this rank wants.  num_bytes: of its segment.
        digest: of the sizes that must agree.
    Raises: DesyncError on every rank if one does not arrive within its timeout or offers another digest;
        TransportError if its process is gone.
    """
    exchange = open_exchange(group, "link")
    rank, ranks = exchange.rank, exchange.members
    own, problem = _create(num_bytes) if transport == "auto" else (None, "")
    address = None if own is None else astuple(own.address)
    text = json.dumps([transport, digest, host_id(), problem, address])
    found = [json.loads(text) for text in _complete(exchange, exchange.gather("offer", text), range(exchange.size))]
    for other, fields in zip(ranks, found, strict=True):
        if fields[1] != digest:
            raise DesyncError(
                f"rank {other} and rank {ranks[rank]} have shards of different sizes or dtypes; build the same model and apply "
                "fully_shard to the same modules on every rank"
            )
    transport = max((fields[0] for fields in found), key=TRANSPORTS.index)
    if transport != "auto":
        return transport
    segments, problem = _open_all(found, exchange, own)
    problems = [*filter(None, _complete(exchange, exchange.gather("opened", problem), range(exchange.size)))]
    if problems:
        if rank == 0:
            _log.warning("ranks %s do not share memory (%s); they use the network", ranks, problems[0])
        return transport
    return HostGroup(segments, tuple(fields[4][0] for fields in found), rank, ranks, exchange)


def _create(num_bytes: int) -> tuple[Segment | None, str]:
    problem = can_share_memory()
    if problem:
        return None, problem
    try:
        Liveness(os.getpid())  # a sandbox may have no pidfds, by which LocalPeers sees that a rank has ended
        return Segment.create(num_bytes), ""
    except (OSError, AttributeError) as error:
        return None, f"no shared memory or no pidfds: {error}"


def _open_all(
    found: Sequence[Sequence[Any]], exchange: StoreExchange, own: Segment | None
) -> tuple[tuple[Segment, ...], str]:
    problem = next((fields[3] for fields in found if fields[3]), "")
    if not problem and len({fields[2] for fields in found}) > 1:
        problem = "they are on different hosts"
    if not problem and len({fields[4][0] for fields in found}) < len(found):
        problem = "some are threads of one process"
    if problem or own is None:
        return (), problem or "no segment of its own"
    segments: list[Segment] = []
    for peer, fields in enumerate(found):
        try:
            segments.append(own if peer == exchange.rank else Segment.open(SegmentAddress(*fields[4])))
        except OSError as error:
            return (
                (),
                f"rank {exchange.members[exchange.rank]} cannot open the memory of rank {exchange.members[peer]}: {error}",
            )
    return tuple(segments), ""


# The words of a segment's header: its owner writes them, the others poll them. All but the first are stamps, see
# _stamp.
_EPOCH = 0  # number of exceptions after which this rank, or one whose epoch it has followed, has left a pass
_OPEN = 1  # the last pass entered, with the flags below
CLOSED = 2  # the last pass in which this rank has done its part
_LEFT = 3  # the last pass that this rank has left by an exception
FIRST_FREE = 4  # the words of the links start here

_live: weakref.WeakSet[LocalPeers] = weakref.WeakSet()  # those of this process; at exit it leaves their passes

_WANTS_COLLECTIVES, _IN_BACKWARD = 1, 2  # flags of _OPEN
_CALL_BITS, _PASS_BITS = 20, 24


def _stamp(epoch: int, pass_number: int, call: int = 0) -> int:
    """Return a number that grows with the epoch, then with the pass of the epoch, then with the call of the pass."""
    return (epoch << _PASS_BITS | pass_number) << _CALL_BITS | call


class LocalPeers:
    """This rank's words and those of the other ranks of its group.

    Passes are counted from the last exception: a rank that leaves a pass by an exception enters a new epoch, the others
    follow with an error at their next check, and all ranks meet in the first pass of the new epoch.

    Args:
        host: the ranks.
        timeout_s: how long to wait for a live rank.

    Attributes:
        others: the other ranks.  kind: of the last pass.
    """

    def __init__(self, host: HostGroup, timeout_s: float) -> None:
        self.others = tuple(place for place in range(len(host.segments)) if place != host.rank)
        self.kind: PassKind = "forward"
        self._members, self._name = host.members, host.members[host.rank]
        self._words = tuple(segment.words for segment in host.segments)
        self._mine = self._words[host.rank]
        self._alive = {place: Liveness(host.pids[place]) for place in self.others}
        self._timeout_s = timeout_s
        self._epoch = self._pass_number = 0
        _live.add(self)

    # ---- passes ----

    def open(self, kind: PassKind, wants_collectives: bool) -> bool:
        """Enter a pass with the others; return True unless one wants collectives.  The caller must abort after an error."""
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
                return  # It did enter. This rank may meet the same exception; else its next wait raises the other's.
            if found >> (_CALL_BITS + _PASS_BITS) != self._epoch:
                self._check_epoch(place, what)
        if found != word:
            other = "forward" if word & _IN_BACKWARD else "backward"
            raise TransportError(
                f"rank {self.name_of(place)} starts a {other} where rank {self._name} starts a {self.kind}; every rank must "
                "make the same calls in the same order"
            )

    def close(self, waits: Callable[[str], None]) -> None:
        """Leave the pass; a backward ends on no rank before all have done their part of it.

        ``waits(what)`` returns once no other rank reads memory of this forward that is about to change.
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
        """Leave the pass because of an exception."""
        # All ranks that leave because of one another enter the same epoch.
        newest = max(self._words[place][_EPOCH] for place in self.others)
        self._mine[_LEFT] = self.start
        self._epoch = newest if newest > self._epoch else self._epoch + 1
        self._pass_number = 0
        self._mine[_EPOCH] = self._epoch

    def meet_after_exception(self, what: str) -> None:
        """Wait until all others have left the pass that this rank left by an exception: until then they read its words.

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
        """Return the stamp of collective number ``index`` of its kind in this pass; -1 stands for none yet."""
        return _stamp(self._epoch, self._pass_number, index + 1)

    def long_stamp(self, index: int) -> int:
        """Return the stamp of number ``index`` of what is counted across passes, from the last exception on."""
        return _stamp(self._epoch, 0) + index + 1

    def publish(self, word: int, value: int) -> None:
        """Publish ``value`` to the others, and with it everything that this rank wrote before."""
        self._mine[word] = value

    def latest(self, place: int, word: int) -> int:
        """Return the value that the rank at ``place`` has published last."""
        return self._words[place][word]

    def have_reached(self, word: int, at_least: int) -> bool:
        """True if all others have published at least ``at_least``."""
        return all(self._words[place][word] >= at_least for place in self.others)

    def wait_for_all(self, word: int, at_least: int, what: str) -> None:
        """Wait until all others have published at least ``at_least``.

        Raises: TransportError if one is gone, has left the pass by an exception, or is not in time.
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
        raise TransportError(
            f"rank {self._name} waited {self._timeout_s:g} s for rank {self.name_of(place)} at {what}; every rank must make "
            "the same calls in the same order"
        )

    def _check_epochs(self, what: str) -> None:
        for place in self.others:
            self._check_epoch(place, what)

    def _check_epoch(self, place: int, what: str) -> None:
        if self._words[place][_EPOCH] <= self._epoch:
            return
        stayed = [each for each in self.others if self._words[each][_EPOCH] <= self._epoch]
        gone = [each for each in stayed if not self._alive[each].is_alive()]
        if gone:  # its end is why the other one has left
            raise self._lost(gone[0], f"rank {self._name} was at {what}")
        its = self.name_of(place)
        raise TransportError(
            f"rank {its} raised an exception while rank {self._name} was at {what}; "
            f"see the error of rank {its}{cited(default_store(), [its])}"
        )

    def name_of(self, place: int) -> int:
        """Return the global rank of the rank at ``place``."""
        return self._members[place]

    def _lost(self, place: int, where: str) -> TransportError:
        """Return the error for the rank at ``place``, whose process has ended, with its failure report."""
        store, name = default_store(), self.name_of(place)
        if store is not None:
            is_gone(store, name)  # records it, so that other hosts are notified
        return TransportError(f"{gone_in_words(store, [name])}; {where}. {look_next()}")


exit_hooks.append(lambda: [local_peers.abort() for local_peers in list(_live)])

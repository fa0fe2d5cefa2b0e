"""Process groups made on demand, their connections, and whether the processes of other ranks are alive."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import json
import os
import platform
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DeviceMesh

from shardwise import torch_private
from shardwise.consistency.store import BRIEF_S, JobStore, refuse_deadlock, wait_until
from shardwise.errors import ConfigError, StateError, TransportError
from shardwise.formatting import format_ranks
from shardwise.observe import EVERYBODY, note
from shardwise.one_host import read_proc
from shardwise.torch_private import is_gloo, timeout_s_of

# ---- TCP keepalive: the kernel finds out soon that another host is gone, or the cable to it is cut.
# By default TCP gives up on a silent peer after a quarter of an hour, and only while there is data to send. Backends do
# not change that, so a rank would wait for one on another host until the timeout of its group. Connections of this
# process to hosts of the job (only those: a user's own stay unchanged) are set to probe a silent peer and to break
# after five seconds (:func:`set_host_timeout`) without an answer. A process that is late, or stopped, still answers,
# because its kernel does.

_limit_s = [5.0]  # one entry, set by set_host_timeout only
_ADDRESSES = "shardwise/addresses"
_SIOCGIFADDR = 0x8915
_IDLE_S = 2  # seconds before the first probe
_OF_LOST_HOSTS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


def set_host_timeout(seconds: float) -> None:
    """Set how long another host of the job may be silent before it counts as gone; the default is 5 seconds.

    Call it before the first ``fully_shard``, ``replicate`` or optimizer of shardwise, with the same value on every
    rank.  Ranks that wait for a host that was switched off, or whose cable is cut, then raise an error instead of
    waiting for the timeout of the process group.  A rank that is late or stopped is still waited for.

    Args:
        seconds: 3 or more; 0 leaves connections as the backend made them.

    Raises: ConfigError for any other number.
    """
    if seconds != 0 and not 3 <= seconds < float("inf"):
        raise ConfigError(
            f"seconds must be 0 (never) or at least 3, so that a lost packet does not count as a lost host; got {seconds!r}"
        )
    _limit_s[0] = float(seconds)


def post_addresses(store: JobStore, host: str) -> None:
    """Post this host's addresses for ranks of other hosts; ``host``: its name, once per host."""
    with contextlib.suppress(TransportError, NotImplementedError):
        if store.add(f"{_ADDRESSES}/of/{host}", 1) == 1:
            store.append(_ADDRESSES, " ".join(own_addresses()) + "\n")


def enable_keepalive(store: dist.Store) -> int:
    """Enable keepalive on connections of this process to other hosts of the job; return the number of such connections.

    Call it whenever connections may have been made.  Cost: one store request and a check of each socket.
    """
    if _limit_s[0] == 0 or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return 0
    try:
        lines = (JobStore(store, BRIEF_S).peek(_ADDRESSES) or "").splitlines()
    except TransportError:
        return 0
    if len(lines) < 2:
        return 0  # this host only
    theirs = {address for line in lines for address in line.split()} - set(own_addresses())
    number = 0
    for each in _connections():
        with each:
            if _peer(each) in theirs:
                number += 1
                _set(each)
    return number


def tells_of_lost_host(error: str) -> bool:
    """Return True if ``error`` has the kernel's text for a host that does not answer: switched off, or behind a cut cable."""
    return any(os.strerror(each) in error for each in _OF_LOST_HOSTS)


def host_timeout_s() -> float:
    """Return after how many seconds without an answer connections break; 0 if the backend decides."""
    return _limit_s[0]


def own_addresses() -> list[str]:
    """Return the addresses of this host's interfaces, as peers see them; IPv6 of this network namespace included."""
    numbers = [bytes.fromhex(line.split()[0]) for line in read_proc("net/if_inet6").splitlines()]
    found = [socket.inet_ntop(socket.AF_INET6, each) for each in numbers]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [each for each in found if not each.startswith("127.") and each != "::1"]


def own_sockets() -> dict[str, int]:
    """Return the sockets of this process: inode -> descriptor; nothing where there is no /proc."""
    return dict(_sockets())


def _sockets() -> Iterator[tuple[str, int]]:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1], int(name)


_ends = threading.Lock()  # copies that one thread holds would pass for open connections in another


@contextlib.contextmanager
def ending_what_closes() -> Generator[None, None, None]:
    """Shut down the connections that are closed within the context.

    A forked process, such as a worker of a DataLoader, has copies of all sockets, so that a close alone tells peers nothing.
    """
    with _ends, contextlib.ExitStack() as stack:
        held = [stack.enter_context(each) for each in _connections()]
        yield
        copies = {each.fileno() for each in held}
        left = {inode for inode, descriptor in _sockets() if descriptor not in copies}
        for each in held:
            if str(os.fstat(each.fileno()).st_ino) not in left and _peer(each):
                with contextlib.suppress(OSError):  # the peer was faster
                    each.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterable[socket.socket]:
    for descriptor in own_sockets().values():
        with contextlib.suppress(OSError):
            found = socket.socket(fileno=os.dup(descriptor))
            if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                yield found
            else:
                found.close()


def _peer(connection: socket.socket) -> str:
    try:
        address = str(connection.getpeername()[0])
    except OSError:  # a listening socket
        return ""
    return address.removeprefix("::ffff:").split("%")[0]


def _set(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {socket.TCP_KEEPIDLE: _IDLE_S, socket.TCP_KEEPINTVL: 1, socket.TCP_USER_TIMEOUT: round(1000 * _limit_s[0])}
    for option, value in {**times, socket.TCP_KEEPCNT: max(1, round(_limit_s[0]) - _IDLE_S)}.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


# ---- Drain the backend's threads before the interpreter exits, which avoids a SIGABRT.

_PAUSE_S = 0.002  # pauses free the interpreter's lock
_SETTLED_S = 0.5
_TASKS = "/proc/self/task"


@functools.cache
def settle_at_exit() -> None:
    """Call :func:`settle` at the exit of this process."""
    atexit.register(lambda: settle())  # looked up at exit: tests replace it


def settle(limit_s: float = _SETTLED_S) -> None:
    """Wait until the other threads of this process are idle, at most ``limit_s`` seconds.

    A gloo thread releases a message after its waiter has continued.  If it is late and has the last reference to a
    tensor, it needs the interpreter's lock; after the interpreter's end torch (2.13) then ends the process with SIGABRT
    ("terminate called without an active exception"), although all work was done.  ``destroy_process_group()`` joins
    these threads only if nothing references the group, but sharded models do; so this waits for two checks in a row
    that find no running thread.
    """
    looks = -1  # the first check has no pause before it

    def is_at_rest() -> bool:
        nonlocal looks
        looks = 0 if _others_run() else looks + 1
        return looks >= 2

    wait_until(is_at_rest, limit_s, pauses_s=(_PAUSE_S, _PAUSE_S))


def _others_run() -> bool:
    tasks = {*os.listdir(_TASKS)} - {str(threading.get_native_id())} if os.path.isdir(_TASKS) else ()
    # After the name of the task, in parentheses, comes its state; a task that has ended has none.
    return ["R"] in [read_proc(f"self/task/{task}/stat").rpartition(")")[2].split()[:1] for task in tasks]


_LEFT = ["left by an error"]  # replaces a process's place in its note

# Ranks that have posted their note to a store: every fully_shard calls announce, but one note is enough.
_announced: weakref.WeakKeyDictionary[dist.Store, set[int]] = weakref.WeakKeyDictionary()


class Liveness:
    """Whether a process of this host is alive, by a pidfd, because its pid may be reused."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        self._poll = select.poll()
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:  # ended already, and its parent has waited for it
            return
        self._poll.register(self._fd, select.POLLIN)

    def is_alive(self) -> bool:
        """Return False once the process has ended."""
        return self._fd is not None and not self._poll.poll(0)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


# The default group of the process that this one was forked from, if that had several ranks.
_inherited: list[dist.ProcessGroup] = []


def _note_fork() -> None:
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    _inherited[:] = [world] if world is not None and world.size() > 1 else []


os.register_at_fork(after_in_child=_note_fork)


def refuse_forked() -> None:
    """Raise in a process that was forked from a rank: it has the rank's connections, but not the threads that serve them.

    Raises: StateError.
    """
    if _inherited and dist.group.WORLD is _inherited[0]:
        raise StateError(
            f"process {os.getpid()} was forked from rank {dist.get_rank()} and cannot run its sharded modules: ranks would "
            "wait for it in vain. Run them in the rank itself, or start processes with the method 'spawn'"
        )


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return a text that is equal for all processes of one boot of one host, and for no others."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def announce(store: dist.Store, rank: int) -> None:
    """Post process id and addresses of global rank ``rank`` to ``store``, so that others can tell whether it is gone."""
    ranks = _announced.setdefault(store, set())
    if rank not in ranks:
        ranks.add(rank)
        settle_at_exit()
        job = JobStore(store)
        job.set(_note_key(rank), json.dumps([*_name_space(), os.getpid()]))
        post_addresses(job, "/".join([host_id(), _link("net")]))


def mark_left(store: dist.Store, rank: int) -> None:
    """Mark global rank ``rank``, whose process has ended or ends by an error, as gone, for all hosts.

    Raises: TransportError if the store does not answer.
    """
    JobStore(store, BRIEF_S).set(_note_key(rank), json.dumps(_LEFT))


def is_gone(store: dist.Store, rank: int) -> bool:
    """Return True if global rank ``rank`` was a process of this host that has ended, or is marked as gone.

    False if that is not known.
    """
    try:
        text = JobStore(store, BRIEF_S).peek(_note_key(rank))
        if text is None:
            return False
        *space, pid = json.loads(text)
        if [*space, pid] == _LEFT:
            return True
        if space != _name_space() or Liveness(int(pid)).is_alive():
            return False
        mark_left(store, rank)  # other hosts cannot see it
        return True
    except (RuntimeError, OSError, AttributeError):  # no store, no /proc, no pidfds
        return False


def is_elsewhere(store: dist.Store, rank: int) -> bool:
    """Return True if global rank ``rank`` is a process of another host; False if that is not known."""
    try:
        text = JobStore(store, BRIEF_S).peek(_note_key(rank))
    except RuntimeError:
        return False
    return text is not None and json.loads(text)[0] not in (host_id(), *_LEFT)


def _note_key(rank: int) -> str:
    return f"shardwise/process/{rank}"


def _name_space() -> list[str]:
    """Return the host and the container in which a process id is valid."""
    return [host_id(), _link("pid")]


def _link(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


# ---- Connections are checked for their user: a process of another user of this host must not take the place of a rank.
# gloo accepts any connection that sends the number of a pair of ranks, which is easy to guess, and every user can read
# its port in the kernel's table of connections. The same table shows the user at the other end of each connection
# within this host.

_LISTENS = "0A"  # a state in the kernel's table
_MAPPED = "0000000000000000FFFF0000"  # precedes an IPv4 address in the IPv6 table

# The sockets of this process at the last check that passed: while they are the same, the table is not read again.
_checked: set[str] = set()


class _Row(NamedTuple):
    local: str
    remote: str
    state: str
    uid: int
    inode: str


def check_peers(before: Collection[str] = ()) -> None:
    """Raise if another user of this host is connected to a port of this process; call it before anything is sent.

    Only listeners on one address are checked, as gloo's are, not servers that listen on every interface.  Nothing is
    checked where the kernel's table cannot be read.  Cost: lists the open files; reads the table if there are new sockets.
    ``before``: sockets before a group was made through a store that others can write to: of newer ones also the other ends
    that this process has connected to are checked.
    Raises: TransportError naming the port and the user.
    """
    own = set(own_sockets())
    if own <= _checked:
        return
    rows = [row for name in ("tcp", "tcp6") for row in _table(name)]
    listening = {row.local for row in rows if row.state == _LISTENS and row.inode in own}
    users = {(row.local, row.remote): row.uid for row in rows if row.inode != "0"}  # "0": that end is closed
    for row in rows:
        uid = users.get((row.remote, row.local), os.geteuid())
        is_checked = row.local in listening or (before and row.inode not in before)
        if row.inode in own and row.state != _LISTENS and is_checked and uid != os.geteuid():
            raise TransportError(
                f"user {uid} of this host is connected to port {int(row.local[-4:], 16)} of this rank, expected only processes "
                f"of user {os.geteuid()}: it may have taken the place of another rank, so nothing is sent. End that "
                "process, then start the job again"
            )
    _checked.clear()
    _checked.update(own)


def _table(name: str) -> Iterator[_Row]:
    for fields in map(str.split, read_proc(f"self/net/{name}").splitlines()[1:]):
        local, remote = (address.removeprefix(_MAPPED) for address in fields[1:3])
        yield _Row(local, remote, fields[3], int(fields[7]), fields[9])


# ---- Waits for gloo transfers that end when a connection breaks, also where gloo's own waits do not.
# When a connection breaks, gloo fails all messages in its queues. A message that it is just handing to the socket, or
# of which a part has arrived, is in no queue: a wait for a collective that uses it lasts until the timeout of the group.
# So a long wait is split into short ones, and checks between them whether the group's connections still exist.

FIRST = timedelta(seconds=0.5)  # before the first check
_MOST_S = 2.0  # seconds between two checks
_SETTLE_S = 0.25  # for messages that arrived before the connection broke
_MOST_PROBED = 64
_TAG = 0x5AFE  # of messages that no rank sends

# When each group was last probed: a receive that is never answered costs some bytes on both sides, which would add up
# over months.
_probed: weakref.WeakKeyDictionary[dist.ProcessGroup, float] = weakref.WeakKeyDictionary()
_PROBE_AGAIN_S = 5.0
_num_probes: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

# Groups of this process with a connection that was found closed; only a reconnect opens it again.
_closed: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


def closed_to(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of ``group`` to which no gloo connection of this process leads any more.

    It probes by a receive that no rank answers: this fails at once without a connection, and otherwise costs both ranks
    some bytes. Within five seconds it does not probe again, and returns nothing.
    """
    found = _closed.get(group)
    last = _probed.get(group)
    if found is None and is_gloo(group) and (last is None or time.monotonic() - last > _PROBE_AGAIN_S):
        _probed[group] = time.monotonic()
        found = [rank for rank in range(group.size()) if rank != group.rank()][:_MOST_PROBED]
        found = [rank for rank in found if not _leads_to(group, rank)]
        with contextlib.suppress(KeyError, ValueError, RuntimeError):  # a destroyed group has no global ranks
            members = dist.get_process_group_ranks(group)
            found = [members[rank] for rank in found]
        if found:
            _closed[group] = found
    return found or []


def await_collective(
    work: dist.Work | None, group: dist.ProcessGroup | None, check: Callable[[], None] = refuse_deadlock
) -> None:
    """Wait for a collective of ``group`` (None: of all ranks) that was launched with ``async_op=True``.

    ``check``: is called every few seconds of a long wait over gloo; it may raise.

    Raises: RuntimeError, the backend's own, or one that names the ranks whose connection has broken meanwhile.
    """
    group = dist.group.WORLD if group is None else group
    if work is None:
        return
    if group is None or not is_gloo(group):
        work.wait()
        return
    try:
        work.wait(FIRST)
    except RuntimeError:
        outlast(work, group, check)


def outlast(work: dist.Work, group: dist.ProcessGroup, check: Callable[[], None] = refuse_deadlock) -> None:
    """Continue a wait for a collective of ``group`` after a wait raised, either by its timeout or as the collective failed.

    Raises: as :func:`await_collective`.
    """
    pause_s = FIRST.total_seconds()
    while not work.is_completed():
        check()
        closed = closed_to(group)
        with contextlib.suppress(RuntimeError):  # a failure of the collective is raised below
            work.wait(timedelta(seconds=_SETTLE_S if closed else pause_s))
        if closed and not work.is_completed():
            raise RuntimeError(f"the connection to {format_ranks(closed)} was closed in the middle of a transfer")
        pause_s = min(2 * pause_s, _MOST_S)
    refuse_deadlock()
    work.wait()


def collectives_begun() -> dict[str, int]:
    """Return how many collectives this process has begun in each of its gloo groups, by name; messages count too."""
    return {each.group_name: torch_private.sequence_of(each) - _num_probes.get(each, 0) for each in _gloo_groups()}


def _gloo_groups() -> list[dist.ProcessGroup]:
    return [group for group in torch_private.all_groups() if is_gloo(group) and group.size() > 1]


def _leads_to(group: dist.ProcessGroup, rank: int) -> bool:
    _num_probes[group] = _num_probes.get(group, 0) + 1
    try:
        group.recv([torch.empty(1, device="cpu")], rank, _TAG)
    except RuntimeError:
        return False
    return True


# ---- The ranks of a group wait for each other.


def all_have_come(group: dist.ProcessGroup) -> None:
    """Return once all ranks of ``group`` have called this: one all-reduce of one number."""
    if group.size() > 1:
        number = torch.ones((), dtype=torch.int32, device="cpu")
        await_collective(dist.all_reduce(number, group=group, async_op=True), group)


def gather_rows(row: torch.Tensor) -> list[list[float]]:
    """Return the 1-D ``row`` of every rank of the default process group, in rank order."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [each.tolist() for each in rows]


# ---- Abort and reconnect: close a group's connections so that no rank waits in it, and connect it again under the same
# object.
# References to the group (in a mesh, torch's DistributedDataParallel, user code) stay valid: the backend under it is
# replaced.

_RECONNECT_TAG = 0x5AFF  # of messages that no rank sends
_FIRST_KIND, _LAST_KIND = 8, 255  # numbers of backends that torch does not use, in one byte
_CPU = torch.device("cpu")

_num_reconnected: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def largest_words(words: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace each of ``words`` by the largest of all ranks of ``group``, a gloo group."""
    work = dist.all_reduce(words, dist.ReduceOp.MAX, group=group, async_op=True)
    note(EVERYBODY)
    await_collective(work, group)
    note("went on")


def broadcast(data: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Replace ``data`` by that of rank ``source`` of ``group``, a gloo group."""
    await_collective(dist.broadcast(data, group=group, group_src=source, async_op=True), group)


def begin_exchange(
    received: torch.Tensor, sent: torch.Tensor, takes: list[int], sends: list[int], group: dist.ProcessGroup
) -> dist.Work:
    """Send ``sends[rank]`` elements to each rank of ``group``, in order, and receive ``takes[rank]``."""
    return cast(dist.Work, dist.all_to_all_single(received, sent, takes, sends, group, async_op=True))


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the picklable objects of all ranks of ``group``."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def groups_within(members: Collection[int]) -> list[dist.ProcessGroup]:
    """Return this rank's gloo groups of several ranks that are all in ``members`` (global), in the same order on each rank."""
    found = [group for group in _gloo_groups() if set(dist.get_process_group_ranks(group)) <= set(members)]
    return sorted(found, key=lambda group: group.group_name)


def abort_connections(group: dist.ProcessGroup) -> None:
    """Close this rank's connections in ``group``: collectives that wait for it, here and on other ranks, fail at once.

    Ranks that fail abort too, so that all ranks notice that wait, directly or not, for this one.  Cost: a few
    milliseconds.
    """
    backend = torch_private.backend_of(group, _CPU)
    with ending_what_closes():
        for step in range(1, group.size()):
            # gloo closes all open pairs when a message times out; one receive per peer, since some pairs may be closed
            # already.
            peer = (group.rank() + step) % group.size()
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1, device="cpu")], peer, _RECONNECT_TAG).wait(timedelta(milliseconds=1))


def abort_all_connections(members: Collection[int]) -> None:
    """Close this rank's connections in all gloo groups within global ranks ``members``."""
    for group in groups_within(members) if dist.is_initialized() else ():
        with contextlib.suppress(RuntimeError):
            abort_connections(group)


def reconnect_group(group: dist.ProcessGroup) -> None:
    """Connect the ranks of ``group`` again.  Collective; takes a few milliseconds, and two threads until it is destroyed.

    Raises: StateError after 248 times.
    """
    number = _num_reconnected.get(group, 0)
    if _FIRST_KIND + number > _LAST_KIND:
        raise StateError(f"group {group.group_name} was reconnected {number} times; start again from a checkpoint")
    _num_reconnected[group] = number + 1
    torch_private.replace_gloo(group, f"shardwise/mended/{number}", _FIRST_KIND + number)
    _closed.pop(group, None)
    _probed.pop(group, None)
    all_have_come(group)  # a rank that aborts at once would break others that are still connecting


_alone: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = weakref.WeakKeyDictionary()


def group_of(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Return a new process group of global ``ranks``, this one included; only these ranks wait.

    ``backend``: its backend; None: that of all ranks.
    """
    world = dist.group.WORLD
    limit = None if world is None else timedelta(seconds=timeout_s_of(world))
    group = dist.new_group(list(ranks), timeout=limit, backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    check_peers()
    return group


def patience_s(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """Return how long ranks of ``group`` wait for each other: its timeout, or that of the job if it was created without one.

    A gloo group without a timeout (those of ``init_device_mesh``) has torch's default of half an hour, whatever the
    job's; it gets the job's from here on.
    """
    seconds, world = timeout_s_of(group, device), dist.group.WORLD
    if world is None or group is world or not is_gloo(group) or seconds != default_pg_timeout.total_seconds():
        return seconds
    limit_s = timeout_s_of(world, device)
    if limit_s < seconds:
        group.set_timeout(timedelta(seconds=limit_s))
    return min(limit_s, seconds)


def mesh_of_one(device_type: str) -> DeviceMesh:
    """Return a mesh of this rank only, created once per default process group."""
    world = dist.group.WORLD
    assert world is not None
    known = _alone.setdefault(world, {})
    if device_type not in known:
        known[device_type] = DeviceMesh.from_group(group_of([dist.get_rank()]), device_type)
    return known[device_type]

"""Whether another rank's process is alive: a rank that is gone is named at once, and a late one is waited for."""

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
import weakref
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from shardwise.consistency.store import BRIEF_S, JobStore, wait_until
from shardwise.errors import ConfigError, StateError, TransportError

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
_NO_ANSWER = tuple(
    os.strerror(each) for each in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
)


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
    return any(words in error for words in _NO_ANSWER)


def host_timeout_s() -> float:
    """Return after how many seconds without an answer connections break; 0 if the backend decides."""
    return _limit_s[0]


def own_addresses() -> list[str]:
    """Return the addresses of this host's interfaces, as peers see them; IPv6 of this network namespace included."""
    found = [*_ipv4(), *_ipv6()]
    return [each for each in found if not each.startswith("127.") and each != "::1"]


def _ipv4() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])


def _ipv6() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0]))


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
    probes = max(1, round(_limit_s[0]) - _IDLE_S)
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * _limit_s[0])),
    ):
        connection.setsockopt(level, option, value)


# ---- Drain the backend's threads before the interpreter exits, which avoids a SIGABRT.

_PAUSE_S = 0.002  # pauses free the interpreter's lock
_MOST_S = 0.5
_TASKS = Path("/proc/self/task")


@functools.cache
def settle_at_exit() -> None:
    """Call :func:`settle` at the exit of this process."""
    atexit.register(lambda: settle())  # looked up at exit: tests replace it


def settle(limit_s: float = _MOST_S) -> None:
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
    own = str(threading.get_native_id())
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended
            continue
        if state == "R" and task.name != own:
            return True
    return False


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

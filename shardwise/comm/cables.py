"""Connections to other hosts: the kernel is asked to find out soon that a host is gone, or the cable to it cut.

TCP gives up on a silent peer after a quarter of an hour, and only while there is something to send.  Backends leave it at
that: a rank that waits for one on another host waits for the timeout of its group.  Connections of this process that lead to
hosts of the job (none else: a user's own stay as they are) are told to probe a peer that is silent and to break after
five seconds (:func:`set_host_timeout`) without an answer; a process that is late, or stopped, still answers: its kernel does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from shardwise.comm.store import BRIEF_S, JobStore
from shardwise.errors import ConfigError, TransportError

_limit_s = [5.0]  # one entry, set by set_host_timeout alone
_ADDRESSES = "shardwise/addresses"
_SIOCGIFADDR = 0x8915
_IDLE_S = 2  # before the first probe
_NO_ANSWER = tuple(
    os.strerror(each) for each in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
)


def set_host_timeout(seconds: float) -> None:
    """Say after how long without a sign of life another host of the job counts as gone; 5 seconds at first.

    Call it before the first ``fully_shard``, ``replicate`` or optimizer of ours, alike on every rank.  Ranks that wait for
    a host that was switched off, or whose cable is cut, then raise an error instead of waiting for the timeout of the
    process group.  A rank that is late or stopped is waited for as ever.

    Args:
        seconds: from 3 on; 0 leaves connections as the backend has made them.

    Raises: ConfigError for any other number.
    """
    if seconds != 0 and not 3 <= seconds < float("inf"):
        raise ConfigError(
            f"seconds must be 0 (never) or at least 3, so that one lost packet is no lost host; got {seconds!r}"
        )
    _limit_s[0] = float(seconds)


def post_addresses(store: JobStore, host: str) -> None:
    """Let the ranks of other hosts know under which addresses they reach this one; ``host``: its name, once per host."""
    with contextlib.suppress(TransportError, NotImplementedError):
        if store.add(f"{_ADDRESSES}/of/{host}", 1) == 1:
            store.append(_ADDRESSES, " ".join(own_addresses()) + "\n")


def watch_cables(store: dist.Store) -> int:
    """Let connections of this process to other hosts of the job break when the host does; return how many lead there.

    To be called whenever connections may have been made; costs one question to the store and a look at each socket.
    """
    if _limit_s[0] == 0 or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return 0
    try:
        lines = (JobStore(store, BRIEF_S).peek(_ADDRESSES) or "").splitlines()
    except TransportError:
        return 0
    if len(lines) < 2:
        return 0  # this host alone
    theirs = {address for line in lines for address in line.split()} - set(own_addresses())
    number = 0
    for each in _connections():
        with each:
            if _peer(each) in theirs:
                number += 1
                _set(each)
    return number


def tells_of_lost_host(error: str) -> bool:
    """Return True if ``error`` has the kernel's words for a host that answers nothing: switched off, or behind a cut cable."""
    return any(words in error for words in _NO_ANSWER)


def host_timeout_s() -> float:
    """Return after how many seconds without an answer connections break; 0: when the backend has it so."""
    return _limit_s[0]


def own_addresses() -> list[str]:
    """Return the addresses of this host's interfaces, as peers see them; IPv6 of this network namespace too."""
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


def _connections() -> Iterable[socket.socket]:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(name)))
                if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
                else:
                    found.close()


def _peer(connection: socket.socket) -> str:
    try:
        address = str(connection.getpeername()[0])
    except OSError:  # it listens
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

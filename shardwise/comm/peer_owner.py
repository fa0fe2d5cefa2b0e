"""Checks which user owns each connection: no process of another user of this host may take the place of a rank.

gloo accepts any connection that sends the number of a pair of ranks, which is easy to guess, and every user can read its port
in the kernel's table of connections.  The same table has the user at the other end of each connection within this host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.errors import TransportError

_LISTENS = "0A"  # a state in the kernel's table
_MAPPED = "0000000000000000FFFF0000"  # before an IPv4 address in the table of IPv6

# The sockets of this process at the last check that passed: while they are the same, the table is not read again.
_checked: set[str] = set()


class _Row(NamedTuple):
    local: str
    remote: str
    state: str
    uid: int
    inode: str


def check_peers() -> None:
    """Raise if another user of this host is connected to a port of this process; call it before anything is sent.

    Only listeners on one address are checked, as gloo's are, not servers that listen on every interface.  Nothing is
    checked where the kernel's table cannot be read.  Cost: lists the open files; reads the table if there are new sockets.
    Raises: TransportError naming the port and the user.
    """
    own = set(_own_sockets())
    if own <= _checked:
        return
    rows = [row for name in ("tcp", "tcp6") for row in _table(name)]
    listening = {row.local for row in rows if row.state == _LISTENS and row.inode in own}
    users = {(row.local, row.remote): row.uid for row in rows if row.inode != "0"}  # "0": that end is closed
    for row in rows:
        uid = users.get((row.remote, row.local), os.geteuid())
        if row.inode in own and row.state != _LISTENS and row.local in listening and uid != os.geteuid():
            raise TransportError(
                f"user {uid} of this host is connected to port {int(row.local[-4:], 16)} of this rank, expected only processes "
                f"of user {os.geteuid()}: it may have taken the place of another rank, so nothing is sent. End that "
                "process, then start the job again"
            )
    _checked.clear()
    _checked.update(own)


def _own_sockets() -> Iterator[str]:
    with contextlib.suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _table(name: str) -> Iterator[_Row]:
    with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as lines:
        next(lines, None)
        for line in lines:
            fields = line.split()
            local, remote = fields[1].removeprefix(_MAPPED), fields[2].removeprefix(_MAPPED)
            yield _Row(local, remote, fields[3], int(fields[7]), fields[9])

"""A process of this host that holds the memory of an elastic run while its launcher ends all ranks and starts others.

The first rank starts it, as ``python -IS keeper.py``: it imports the standard library alone, and is there at once.  It holds
files without a name, and hands their descriptors to ranks.  It ends with the ranks' launcher (the agent of torchrun), or when
no rank has been connected for a while.

Its socket has no name in the file system.  The kernel says who has connected: a rank was started by that launcher, as this
user.  Others are disconnected unheard.  The name cannot be guessed, so that no other user takes it before.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

IDLE_S, OVER_S = 900.0, 30.0  # without a rank: until the keeper ends, and once the run is over
_START_S, _AGAIN_S = 30.0, 0.02  # for the keeper to be there, and between two looks
_ANSWER_S = 10.0
_MOST_FDS = 250  # of one message: the kernel takes 253
_MOST_BYTES = 1 << 17  # of one message
_KIND = socket.SOCK_SEQPACKET if hasattr(socket, "SOCK_SEQPACKET") else socket.SOCK_STREAM


def name_of(agent: int, job: str) -> str:
    """Return the socket's name for the ranks of ``job`` that process ``agent`` has started.

    Another user cannot guess it: where the kernel has put that process in memory is for its own user to read.
    """
    seed = [f"{job}/{agent}".encode()]
    for kind in ("stat", "auxv"):
        with suppress(OSError):
            text = Path(f"/proc/{agent}/{kind}").read_bytes()
            seed.append(text.rpartition(b")")[2].split()[19] if kind == "stat" else text)  # when it started
    return "\0shardwise-keeper-" + hashlib.sha256(b"/".join(seed)).hexdigest()[:32]


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user of the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def line_of(pid: int) -> dict[int, int]:
    """Return ``pid``, its parent, the parent of that one and so on, each with its session."""
    found: dict[int, int] = {}
    with suppress(OSError):
        while pid:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid], pid = int(fields[3]), int(fields[1])
    return found


# ---- A rank's side.


class Keeper:
    """The connection of a rank to the keeper of its host, which is started if there is none.

    Attributes:
        name: of the socket: the same for the ranks of one host of the job.
        generation: the newest that ranks of this host have taken part in.  files: set and rank of those that hold something.

    Raises: OSError if it cannot be started, or if another user has its name.
    """

    def __init__(self, agent: int, job: str = "") -> None:
        self.name = name_of(agent, job)
        end = time.monotonic() + _START_S
        while True:
            self._connection = socket.socket(socket.AF_UNIX, _KIND)
            self._connection.settimeout(_ANSWER_S)
            try:
                self._connection.connect(self.name)
                uid = _peer_of(self._connection)[1]
                if uid != os.geteuid():
                    raise PermissionError(f"user {uid} of this host has taken the name of its socket")
                self.generation, keys = self._ask([0, [], False])[0]
                self.files = [(number, rank) for number, rank in keys]
                return
            except (ConnectionError, EOFError):
                self._connection.close()
                if time.monotonic() > end:
                    raise
                if not _start(self.name, agent):  # another rank does
                    time.sleep(_AGAIN_S)

    def open(self, generation: int, wanted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Return descriptors of the files ``wanted``, which are made if there are none, for ranks of ``generation``."""
        found: dict[tuple[int, int], int] = {}
        for begin in range(0, len(wanted), _MOST_FDS):
            some = wanted[begin : begin + _MOST_FDS]
            found |= zip(some, self._ask([generation, some, False])[1], strict=True)
        return found

    def finish(self) -> None:
        """Let the keeper end soon after the ranks."""
        self._ask([0, [], True])

    def _ask(self, request: object) -> tuple[Any, list[int]]:
        self._connection.sendall(json.dumps(request).encode())
        data, fds, _, _ = socket.recv_fds(self._connection, _MOST_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise EOFError("it has closed the connection")
        return json.loads(data), fds


def _start(name: str, agent: int) -> bool:
    """Start the keeper; return False if another process has its name already."""
    with socket.socket(socket.AF_UNIX, _KIND) as listening:
        try:
            listening.bind(name)
        except OSError:
            return False
        listening.listen(socket.SOMAXCONN)
        fd, none = listening.fileno(), subprocess.DEVNULL
        words = [sys.executable, "-IS", __file__, str(fd), str(agent)]
        subprocess.run(words, pass_fds=[fd], stdin=none, stdout=none, stderr=none, start_new_session=True, check=True)
    return True


# ---- The keeper's side.


def serve(listening: socket.socket, agent: int) -> None:
    """Hold files, and hand them to ranks, until ``agent`` has ended or no rank has been connected for long."""
    files: dict[tuple[int, int], int] = {}
    generation, limit_s = 0, IDLE_S
    ranks = selectors.DefaultSelector()
    ranks.register(listening, selectors.EVENT_READ)
    ranks.register(os.pidfd_open(agent), selectors.EVENT_READ)
    while True:
        events = ranks.select(None if len(ranks.get_map()) > 2 else limit_s)
        if not events or any(not isinstance(key.fileobj, socket.socket) for key, _ in events):
            return
        for key, _ in events:
            rank = key.fileobj
            assert isinstance(rank, socket.socket)
            if rank is listening:
                rank, _ = listening.accept()
                rank.settimeout(_ANSWER_S)
                pid, uid = _peer_of(rank)
                if uid == os.geteuid() and agent in line_of(pid):
                    ranks.register(rank, selectors.EVENT_READ)
                else:
                    rank.close()
                continue
            try:
                newest, wanted, is_over = json.loads(rank.recv(_MOST_BYTES) or "0")
                for each in map(tuple, wanted):
                    if each not in files:
                        files[each] = os.memfd_create("shardwise-elastic")
                generation = max(generation, newest)
                limit_s = OVER_S if is_over else limit_s
                held = [each for each, fd in files.items() if os.fstat(fd).st_size]
                data = json.dumps([generation, held]).encode()
                socket.send_fds(rank, [data], [files[number, other] for number, other in wanted])
            except (OSError, ValueError, TypeError):  # it has ended, or does not read
                ranks.unregister(rank)
                rank.close()


if __name__ == "__main__":
    os.chdir("/")
    if os.fork():  # the rank that starts the keeper is not its parent: nothing that ends a rank's children ends it
        os._exit(0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))

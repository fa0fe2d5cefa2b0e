"""Memory that outlives the ranks of an elastic run: files without a name, of a process of this host that outlives them.

That process is the launcher of ``shardwise run --elastic``, whose ranks inherit the files, or a keeper, where a launcher ends
all ranks and starts others.  A keeper sends its files to each process that connects to its socket, if it is of the same user,
which the kernel knows.

The first rank starts the keeper, as ``python -IS keeper.py``: it imports the standard library alone, and is there at once.  It
ends with the ranks' launcher (the agent of torchrun), or when no rank has been connected for a while.  Its socket, by which
ranks find it, has no name in the file system, and none that another user could guess and take before.
"""

from __future__ import annotations

import hashlib
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

NUM_FILES = 128  # of a set of a keeper, for ranks and copies of another host's; one message can have 253
IDLE_S = 900.0  # without a rank: until the keeper ends
_START_S, _AGAIN_S = 30.0, 0.02  # for the keeper to be there, and between two looks


def make_files(num_files: int) -> list[int]:
    """Return descriptors of new files: two sets of so many."""
    return [os.memfd_create("shardwise-elastic") for _ in range(2 * num_files)]


def name_of(agent: int, job: str) -> str:
    """Return the socket's name for the ranks of ``job`` that process ``agent`` has started.

    Another user cannot guess it: where the kernel has put that process in memory is for its own user to read.
    """
    secret = Path(f"/proc/{agent}/auxv").read_bytes()
    return "\0shardwise-keeper-" + hashlib.sha256(f"{agent}/{job}/".encode() + secret).hexdigest()[:32]


def _user_of(connection: socket.socket) -> int:
    """Return the user of the other end, as the kernel knows it."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


class Keeper:
    """The connection of a rank to the keeper of its host, which is started if there is none.

    Attributes:
        name: of the socket: the same for the ranks of one host of the job.
        fds: of its files.

    Raises: OSError if it cannot be started, or if another user has its name.
    """

    def __init__(self, agent: int, job: str = "") -> None:
        self.name, end = name_of(agent, job), time.monotonic() + _START_S
        _start(self.name, agent)
        self._connection = socket.socket(socket.AF_UNIX)
        while self._connection.connect_ex(self.name):  # another rank has bound it, and does not listen yet
            if time.monotonic() > end:
                raise ConnectionRefusedError(f"nothing listens for {_START_S:g} s")
            time.sleep(_AGAIN_S)
        if (user := _user_of(self._connection)) != os.geteuid():
            raise PermissionError(f"user {user} of this host has taken the name of its socket")
        self.fds = [fd for _ in range(2) for fd in socket.recv_fds(self._connection, 1, NUM_FILES)[1]]
        for fd in self.fds:  # else they would outlive this process in one that it starts
            os.set_inheritable(fd, False)
        if not self.fds:
            raise ConnectionResetError("it has ended")

    def finish(self) -> None:
        """End the keeper; ranks that still run have its files."""
        with suppress(OSError), self._connection:  # another rank may have ended it
            self._connection.send(b".")


def _start(name: str, agent: int) -> None:
    """Start the keeper, unless another process has its name already."""
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(name)
        except OSError:
            return
        listening.listen(socket.SOMAXCONN)
        fd, none = listening.fileno(), subprocess.DEVNULL
        words = [sys.executable, "-IS", __file__, str(fd), str(agent)]
        subprocess.run(words, pass_fds=[fd], stdin=none, stdout=none, stderr=none, start_new_session=True, check=True)


def serve(listening: socket.socket, agent: int) -> None:
    """Hold files until process ``agent`` has ended, a rank ends the run, or none has been connected for long."""
    files = make_files(NUM_FILES)
    ending, ranks = os.pidfd_open(agent), list[socket.socket]()
    while True:
        ready = select.select([listening, ending, *ranks], (), (), None if ranks else IDLE_S)[0]
        if not ready or ending in ready:
            return
        for each in [each for each in ranks if each in ready]:
            ranks.remove(each)
            with suppress(ConnectionError):
                if each.recv(1):
                    return
        if listening in ready:
            found, _ = listening.accept()
            with suppress(OSError):  # it has ended
                if _user_of(found) == os.geteuid():
                    for each in (files[:NUM_FILES], files[NUM_FILES:]):
                        socket.send_fds(found, [b"."], each)
                    ranks.append(found)


if __name__ == "__main__":
    os.chdir("/")
    if os.fork():  # the rank that starts the keeper is not its parent: nothing that ends a rank's children ends it
        os._exit(0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # limits what ranks have not received, too
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))

"""Memory that outlives the ranks of an elastic run: files without a name, of a process of this host that outlives them.

That process is the launcher of ``shardwise run --elastic``, or a keeper, where a launcher ends all ranks and starts others.
Ranks open its files as ``/proc/PID/fd/N``: the kernel lets in who may read the memory of that process, and no other user.

The first rank starts the keeper, as ``python -IS keeper.py``: it imports the standard library alone, and is there at once.  It
ends with the ranks' launcher (the agent of torchrun), or when no rank has been connected for a while.  Its socket, by which
ranks find it, has no name in the file system, and none that another user could guess and take before.
"""

from __future__ import annotations

import hashlib
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

NUM_FILES = 128  # of a set of a keeper: its host's ranks, and those of another host whose copies it has
IDLE_S = 900.0  # without a rank: until the keeper ends
_START_S, _AGAIN_S = 30.0, 0.02  # for the keeper to be there, and between two looks
_NAME = "shardwise-elastic"


def make_files(num_files: int) -> list[int]:
    """Return descriptors of new files: two sets of so many."""
    return [os.memfd_create(_NAME) for _ in range(2 * num_files)]


def open_files(pid: int) -> list[int]:
    """Return own descriptors of the files of process ``pid``, in the order of :func:`make_files`."""
    folder, found = Path(f"/proc/{pid}/fd"), list[int]()
    for each in folder.iterdir():
        with suppress(FileNotFoundError):  # others of its descriptors come and go
            if f"memfd:{_NAME} " in os.readlink(each):
                found.append(int(each.name))
    return [os.open(folder / str(number), os.O_RDWR | os.O_CLOEXEC) for number in sorted(found)]


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


class Keeper:
    """The connection of a rank to the keeper of its host, which is started if there is none.

    Attributes:
        name: of the socket: the same for the ranks of one host of the job.
        fds: of its files.

    Raises: OSError if it cannot be started, or if another user has its name.
    """

    def __init__(self, agent: int, job: str = "") -> None:
        self.name, end = name_of(agent, job), time.monotonic() + _START_S
        while True:
            self._connection = socket.socket(socket.AF_UNIX)
            try:
                self._connection.connect(self.name)
                break
            except ConnectionError:
                self._connection.close()
                if time.monotonic() > end:
                    raise
                if not _start(self.name, agent):  # another rank does
                    time.sleep(_AGAIN_S)
        pid, uid = _peer_of(self._connection)
        if uid != os.geteuid():
            raise PermissionError(f"user {uid} of this host has taken the name of its socket")
        self._process = os.pidfd_open(pid)
        self.fds = open_files(pid)

    def finish(self) -> None:
        """End the keeper; ranks that still run have its files."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGTERM)


def _start(name: str, agent: int) -> bool:
    """Start the keeper; return False if another process has its name already."""
    with socket.socket(socket.AF_UNIX) as socket_of_keeper:
        try:
            socket_of_keeper.bind(name)
        except OSError:
            return False
        fd, none = socket_of_keeper.fileno(), subprocess.DEVNULL
        words = [sys.executable, "-IS", __file__, str(fd), str(agent)]
        subprocess.run(words, pass_fds=[fd], stdin=none, stdout=none, stderr=none, start_new_session=True, check=True)
    return True


def serve(listening: socket.socket, agent: int) -> None:
    """Hold files until process ``agent`` has ended, or no rank has been connected for long."""
    files = make_files(NUM_FILES)
    listening.listen(socket.SOMAXCONN)  # by this process: it is the one that ranks find at the other end
    ending, ranks = os.pidfd_open(agent), list[socket.socket]()
    while True:
        ready = select.select([listening, ending, *ranks], (), (), None if ranks else IDLE_S)[0]
        if not ready or ending in ready:
            break
        ranks = [each for each in ranks if each not in ready]  # ranks send nothing: such a one has ended
        if listening in ready:
            found, _ = listening.accept()
            ranks += [found] * (_peer_of(found)[1] == os.geteuid())
    del files


if __name__ == "__main__":
    os.chdir("/")
    if os.fork():  # the rank that starts the keeper is not its parent: nothing that ends a rank's children ends it
        os._exit(0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))

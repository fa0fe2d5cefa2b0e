"""What connects to a keeper: ``keeper_client.py KEEPER WHAT ...``; it imports no torch, so that it is there at once.

``rank AGENT put|get TEXT``: a rank that writes a file, or reads it.  ``stranger UID NAME PID``: another process, of the user
UID, that tries what it can with the socket of that name and the files of process PID.  ``squat UID NAME``: it takes the name
and stays.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any


def module_of(path: str) -> Any:
    """Return the keeper's module, without its package."""
    spec = importlib.util.spec_from_file_location("keeper", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def be_rank(path: str, agent: int, what: str, text: str) -> None:
    """Print what the file of rank 0 holds, or write it."""
    try:
        keeper = module_of(path).Keeper(agent)
    except OSError as error:
        print(error)
        return
    if what == "put":
        os.write(keeper.fds[0], text.encode())
    num_own = sum(not os.get_inheritable(fd) for fd in keeper.fds)  # no process that a rank starts keeps them
    print(keeper.name[1:], num_own, os.pread(keeper.fds[0], 100, 0).decode())


def be_stranger(name: str, pid: int) -> None:
    """Print what another user, or process, gets of ``name`` and of the files of its process: bytes and descriptors."""
    got: list[Any] = []
    for request in (".", json.dumps([99, [[0, 0]], True]), "[[[", ""):  # the first is the word that ends a keeper
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            with suppress(ConnectionError, TimeoutError):
                connection.connect("\0" + name)
                connection.send(request.encode())
                data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 8)
                got += [data.decode(), *fds]
    with suppress(PermissionError):
        got += [os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR) for name in os.listdir(f"/proc/{pid}/fd")]
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    for each in waiting:  # who connects and says nothing
        each.settimeout(1)
        each.connect("\0" + name)
    print([each for each in got if each != ""])


def main() -> None:
    path, what, *words = sys.argv[1:]
    if what == "rank":
        be_rank(path, int(words[0]), *words[1:])
        return
    uid, name = int(words[0]), words[1]
    if uid != os.getuid():
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if what == "stranger":
        be_stranger(name, int(words[2]))
        return
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind("\0" + name)
        taken.listen()
        print("taken", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main()

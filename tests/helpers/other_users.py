"""Processes of another user of this host, where the tests run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import pytest

NOBODY = 65534
_AS_NOBODY = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
_CONNECT = """
import socket, struct, sys
held = []
for port in map(int, sys.argv[2:]):
    for pair in range(4):  # gloo asks for nothing but the number of a pair of ranks
        held.append(socket.create_connection((sys.argv[1], port), 10))
        held[-1].sendall(struct.pack("<q", pair))
print("connected", flush=True)
sys.stdin.readline()
received = 0
for each in held:
    each.settimeout(0.05)
    try:
        received += len(each.recv(1 << 20))
    except OSError:
        pass
print(received, flush=True)
"""


@lru_cache
def _python() -> str:
    """Return a Python that another user may run; "" if this process cannot become another user."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return ""
    candidates = (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin") or "false")
    runs = ([*_AS_NOBODY, each, "-IS", "-c", ""] for each in candidates)
    usable = (words[-4] for words in runs if not subprocess.run(words, check=False, capture_output=True).returncode)
    return next(usable, "")


second_user = pytest.mark.skipif(not _python(), reason="a second user needs root and setpriv")


def run_as_nobody(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python code, which needs the standard library alone, as another user."""
    command = [*_AS_NOBODY, _python(), "-IS", "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


class Stranger:
    """Another user's process that has taken seats and waits."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def received(self) -> int:
        """Return how many bytes it was sent; it leaves."""
        return int(self._process.communicate("\n", timeout=60)[0])


@contextmanager
def stranger_at(ports: Sequence[int], address: str = "127.0.0.1") -> Generator[Stranger, None, None]:
    """Give another user's process once it has connected to ``ports`` of this host in place of ranks."""
    command = [*_AS_NOBODY, _python(), "-IS", "-c", _CONNECT, address, *map(str, ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "connected\n"
            yield Stranger(process)
        finally:
            process.kill()

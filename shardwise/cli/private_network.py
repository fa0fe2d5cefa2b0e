"""A network namespace for the ranks of one host, so that other users neither see their ports nor can connect."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from shardwise.recipes.config import TrainConfig

# Root needs no user namespace, and inside one it could not read files of other users.  Any other user maps to itself.
_MAKE = """
import ctypes, fcntl, os, socket, struct, sys
uid, gid, libc = os.geteuid(), os.getegid(), ctypes.CDLL(None)
if libc.unshare(0x40000000 | (0x10000000 if uid else 0)): sys.exit(1)
maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"} if uid else {}
for name in maps:
    with open(f"/proc/self/{name}", "w") as file: file.write(maps[name])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh22x", b"lo", 1))
print("ready", flush=True)
sys.stdin.read()
"""
_ENTER = """
import ctypes, os, sys
count, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
for fd in sys.argv[2:2 + count]:
    if libc.setns(int(fd), 0): sys.exit(os.strerror(ctypes.get_errno()))
    os.close(int(fd))
os.execv(sys.argv[2 + count], sys.argv[2 + count:])
"""


def needs_no_network(config: TrainConfig, device_type: str) -> bool:
    """Return True if ranks never need the host's network: a user's own model may (downloads), and so may NCCL."""
    return config.model_from is None and device_type == "cpu"


@contextmanager
def private_network(is_wanted: bool) -> Generator[tuple[int, ...], None, None]:
    """Yield descriptors of a new network namespace that only has a loopback interface, for :func:`entering`.

    The tuple is empty if none is wanted or the kernel does not allow one (many containers).  Cost: one small process.
    """
    with ExitStack() as stack:
        if not is_wanted or sys.platform != "linux":
            yield ()
            return
        command = [sys.executable, "-IS", "-c", _MAKE]
        pipe = subprocess.PIPE
        holder = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL))
        assert holder.stdout is not None
        found: list[int] = []
        if holder.stdout.readline():
            with contextlib.suppress(OSError):
                for kind in ("net",) if os.geteuid() == 0 else ("user", "net"):
                    found.append(os.open(f"/proc/{holder.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
                    stack.callback(os.close, found[-1])
        holder.communicate()
        yield tuple(found)


def entering(network: tuple[int, ...], command: list[str]) -> list[str]:
    """Return the command line that runs ``command`` in ``network``; the new process must inherit these descriptors."""
    if not network:
        return command
    return [sys.executable, "-IS", "-c", _ENTER, str(len(network)), *map(str, network), *command]

"""The end of a process that has had process groups: the backend's threads must be done with Python by then."""

from __future__ import annotations

import atexit
import functools
import threading
import time
from pathlib import Path

_PAUSE_S = 0.002  # in which the interpreter's lock is free
_MOST_S = 0.5
_TASKS = Path("/proc/self/task")


@functools.cache
def settle_at_exit() -> None:
    """Let this process call :func:`settle` when it ends."""
    atexit.register(lambda: settle())  # as it is named then


def settle(limit_s: float = _MOST_S) -> None:
    """Wait until the other threads of this process rest, at most ``limit_s`` seconds.

    A thread of gloo lets go of a message after whoever waited for it has gone on.  If it comes late and holds the last
    reference to a tensor, it asks for the interpreter's lock; once the interpreter ends, torch (2.13) ends the process for
    that with SIGABRT ("terminate called without an active exception"), though all work was done.
    ``destroy_process_group()`` joins these threads only where nobody keeps the group, as sharded models do; so two looks that
    find nobody running must do.
    """
    end, looks = time.monotonic() + limit_s, 0
    while looks < 2 and time.monotonic() < end:
        time.sleep(_PAUSE_S)
        looks = 0 if _others_run() else looks + 1


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

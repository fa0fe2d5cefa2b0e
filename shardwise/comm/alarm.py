"""What wakes a thread that waits for other ranks once one of them has said that it will not come.

Whoever waits by looking again and again (at words in shared memory, at the store) calls :func:`look` between two looks.  A
wait inside a backend's collective ends by its connections (:mod:`shardwise.comm.mending`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# Of this process, by thread: a checkpoint that is written beside the step waits on.  Changed by listen and leave alone.
_checks: dict[int, Callable[[], None]] = {}


def listen(check: Callable[[], None]) -> None:
    """Let ``check``, which raises if a rank will not come, be called while this thread waits."""
    _checks[threading.get_ident()] = check


def leave() -> None:
    """Take it away again."""
    _checks.pop(threading.get_ident(), None)


def look() -> None:
    """Raise what the check of this thread raises; costs a look into an empty dict where there is none."""
    if _checks:
        check = _checks.get(threading.get_ident())
        if check is not None:
            check()

"""How a process leaves its job by an error: nobody waits for it, and the store that it keeps stays until the others have read.

The end of a process closes its connections, and so wakes whoever waits for it in a collective.  A process that keeps the store
of the job may not end before the others: they ask there for the reason.  So connections are closed first, by hand; else it
would wait for ranks that wait for it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize

import torch.distributed as dist

from shardwise.comm.alive import is_gone, say_left
from shardwise.comm.last_words import has_said_all, in_short, leave, out_of_reach
from shardwise.comm.mending import break_off_all
from shardwise.comm.store import keeps_store
from shardwise.errors import ShardwiseError, TransportError

_MOST_ASKED = 64
_STAY_S = 6.0  # for the others to have ended, too
_LINGER_S = 2.0  # for those that have said why they failed, and live on

farewells: list[Callable[[], None]] = []  # called when this process leaves; appended to where they are defined
# Of this process: the store of its job, and whether an error has left the program (with the process that it was in).
_stores: dict[int, dist.Store] = {}
_is_leaving: list[int] = []


def watch_end(store: dist.Store) -> None:
    """Call :func:`leave_job` at the end of this process, whose job has ``store``."""
    pid = os.getpid()
    if pid not in _stores:
        Finalize(None, leave_job, exitpriority=100)
    _stores[pid] = store


def will_leave(store: dist.Store) -> None:
    """Take note that an error has left the program of this process."""
    watch_end(store)
    _is_leaving.append(os.getpid())


def leave_job() -> None:
    """Let nobody wait for this process, whose program has ended by an error; does nothing after any other end.

    Who keeps the store of the job stays until the others have ended or said why they fail, at most 6 s: who asks for the reason
    asks there.  Those of a host that does not answer will not.
    """
    store, error = _stores.pop(os.getpid(), None), getattr(sys, "last_value", None)
    if store is None or not dist.is_initialized() or (os.getpid() not in _is_leaving and error is None):
        return
    if error is not None and not isinstance(error, ShardwiseError) and os.getpid() not in _is_leaving:
        leave(f"{type(error).__name__}: {in_short(error)}")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with suppress(TransportError):
        say_left(store, rank)
    for farewell in farewells:
        farewell()
    break_off_all(range(num_ranks))
    if keeps_store(store):
        others = [other for other in range(num_ranks) if other != rank][:_MOST_ASKED]
        far = out_of_reach(store, others, str(error))
        _stay_for([other for other in others if other not in far], store)


def _stay_for(others: list[int], store: dist.Store) -> None:
    start, left = time.monotonic(), others
    while left and (waited_s := time.monotonic() - start) < _STAY_S:
        left = [
            rank
            for rank in left
            if not is_gone(store, rank) and not (waited_s > _LINGER_S and has_said_all(store, rank))
        ]
        time.sleep(0.05)

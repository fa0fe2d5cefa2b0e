"""Waits for what gloo moves that end when a connection breaks, also where gloo's own do not.

When a connection breaks, gloo tells all messages in its queues.  One that it is just handing to the socket, or of which a part
has come, is in none of them: who waits for it, or for a collective made of it, waits as long as the timeout of the group.  So
who has waited for a while looks whether the connections of the group are still there.  A collective can be waited for by and
by.  A wait for a message cannot, since one that gives up closes all connections: a thread waits in place of the caller.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import TypeAlias

import torch
import torch.distributed as dist

from shardwise.black_box import EVERYBODY, note
from shardwise.comm.alive import ranks_in_words
from shardwise.torch_private import is_gloo

FIRST = timedelta(seconds=0.5)  # before the first look
_MOST_S = 2.0  # between two looks
_SETTLE_S = 0.25  # for what came before the connection broke
_SETTLE_AGAIN_S = 0.02
_MOST_ASKED = 64
_TAG = 0x5AFE  # of messages that nobody sends

# When each group was last asked: an answer that never comes keeps some bytes on both sides, in a run of months, too.
_asked: weakref.WeakKeyDictionary[dist.ProcessGroup, float] = weakref.WeakKeyDictionary()
_ASK_AGAIN_S = 5.0

# Groups of this process of which a connection was found closed; none is ever opened again, except by mending.
_closed: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


def closed_to(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of ``group``, as the job names them, that no gloo connection of this process leads to any more.

    Asked by a receive that nobody answers: it fails at once where there is no connection, and else costs both ranks some
    bytes: within five seconds it is not asked again, and nothing is returned.
    """
    found = _closed.get(group)
    last = _asked.get(group)
    if found is None and is_gloo(group) and (last is None or time.monotonic() - last > _ASK_AGAIN_S):
        _asked[group] = time.monotonic()
        found = [rank for rank in range(group.size()) if rank != group.rank()][:_MOST_ASKED]
        found = [rank for rank in found if not _leads_to(group, rank)]
        with contextlib.suppress(KeyError, ValueError, RuntimeError):  # a group that was destroyed has no names
            members = dist.get_process_group_ranks(group)
            found = [members[rank] for rank in found]
        if found:
            _closed[group] = found
    return found or []


def forget_closed(group: dist.ProcessGroup) -> None:
    """Take note that the ranks of ``group`` have been connected anew."""
    _closed.pop(group, None)
    _asked.pop(group, None)


def await_collective(work: dist.Work | None, group: dist.ProcessGroup | None) -> None:
    """Wait for a collective of ``group`` (None: of all ranks) that was launched with ``async_op=True``.

    Raises: RuntimeError, the backend's own, or one that names the ranks whose connection has broken meanwhile.
    """
    group = dist.group.WORLD if group is None else group
    if work is None:
        return
    if group is None or not is_gloo(group):
        work.wait()
        return
    try:
        work.wait(FIRST)
    except RuntimeError:
        outlast(work, group)


def outlast(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Go on with a wait for a collective of ``group`` that has raised: because it had a limit, or as the collective has.

    Raises: as :func:`await_collective`.
    """
    pause_s = FIRST.total_seconds()
    while not work.is_completed():
        closed = closed_to(group)
        with contextlib.suppress(RuntimeError):  # of what has failed it is raised below
            work.wait(timedelta(seconds=_SETTLE_S if closed else pause_s))
        if closed and not work.is_completed():
            raise _broken(closed)
        pause_s = min(2 * pause_s, _MOST_S)
    work.wait()


def wait_all(works: list[dist.Work], group: dist.ProcessGroup) -> None:
    """Wait for messages of ``group`` and take out those that have ended: after an exception the rest is in the list.

    Raises: RuntimeError, the backend's own, or one that names the ranks whose connection has broken meanwhile.
    """
    if not works:
        return
    note(EVERYBODY)
    waiter: _Waiter | None = getattr(_mine, "waiter", None)
    if waiter is None or waiter.pid != os.getpid():  # a fork has no threads
        waiter = _Waiter()
    _mine.waiter = None  # who does not come back from here leaves it to its wait
    waiter.wait(works, group)
    _mine.waiter = waiter


_Task: TypeAlias = "tuple[list[dist.Work], threading.Lock, list[BaseException]]"
_mine = threading.local()  # the waiter of each thread, while it has nothing to wait for


class _Waiter:
    """A thread that waits for messages."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        threading.Thread(target=_wait, args=(self._tasks,), name="shardwise-messages", daemon=True).start()

    def wait(self, works: list[dist.Work], group: dist.ProcessGroup) -> None:
        is_over, failed = threading.Lock(), list[BaseException]()
        is_over.acquire()
        self._tasks.put((works, is_over, failed))
        pause_s = _SETTLE_AGAIN_S if group in _closed else FIRST.total_seconds()
        while not is_over.acquire(timeout=pause_s):
            was_closed = group in _closed
            closed = closed_to(group)
            if closed and not is_over.acquire(timeout=_SETTLE_AGAIN_S if was_closed else _SETTLE_S):
                raise _broken(closed)
            if closed:
                break
            pause_s = min(2 * pause_s, _MOST_S)
        if failed:
            raise failed.pop().with_traceback(None)

    def __del__(self) -> None:
        self._tasks.put(None)


def _wait(tasks: SimpleQueue[_Task | None]) -> None:
    while (each := tasks.get()) is not None:
        works, is_over, failed = each
        try:
            while works:
                works[0].wait()  # no name for it: a frame that an exception keeps alive would keep the message, too
                del works[0]
        except BaseException as error:
            failed.append(error)
        del each, works, failed
        is_over.release()
        del is_over


def _leads_to(group: dist.ProcessGroup, rank: int) -> bool:
    try:
        group.recv([torch.empty(1, device="cpu")], rank, _TAG)
    except RuntimeError:
        return False
    return True


def _broken(ranks: Sequence[int]) -> RuntimeError:
    return RuntimeError(f"the connection to {ranks_in_words(ranks)} was closed in the middle of a transfer")

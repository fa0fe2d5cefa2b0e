"""Names the rank that this one waits for where no error can: the host waits for the device, and a kernel there for the rank.

Over gloo the host itself waits for other ranks, and looks around meanwhile.  A collective of NCCL is a kernel, which ends when
all ranks have come, or never: over NVLink and shared memory NCCL does not see that a process has ended.  torch ends this one
by SIGABRT then, after the timeout of the group, and without a name.

So a thread looks beside.  While the host moves, or the device does, it asks nobody: a long evaluation on one rank, after the
others have ended, is no fault.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, cast

import torch
import torch.distributed as dist

from shardwise.black_box import last_time
from shardwise.comm.alive import is_gone
from shardwise.comm.groups import patience_s
from shardwise.comm.lanes import Stream
from shardwise.comm.last_words import gone_in_words, leave, look_next, store_of_job
from shardwise.comm.lost_peers import found_among
from shardwise.comm.store import BRIEF_S, JobStore
from shardwise.comm.wait_watch import kernel_waits
from shardwise.errors import TransportError
from shardwise.torch_private import abort_groups

_LOOK_S = 0.5
_STILL_S = 10.0  # for which nothing has moved, on the host or on the device
_NEAR = 8  # ranks of a host are neighbours: that many on each side are looked after, and what one finds all are told
_COMES_BACK_S = 30.0  # once the collectives are ended
_ASKING_S = 8.0  # for the others to say why
_PART_OF_TIMEOUT = 0.9  # torch ends the process when all of it is over
_TOLD = "shardwise/lost in a kernel"

_watches: weakref.WeakKeyDictionary[dist.Store, DeviceWatch] = weakref.WeakKeyDictionary()


def watch_device(device: torch.device) -> None:
    """Let a thread beside look after the ranks of the job, whose collectives on ``device`` nobody can be waited out of.

    Does nothing on the host, alone, and where the job is looked after already.  The calling thread is the one that hears of it.
    """
    store, world = store_of_job(), dist.group.WORLD
    if device.type == "cpu" or store is None or world is None or world.size() == 1 or store in _watches:
        return
    stream = cast(Stream, torch.accelerator.current_stream(device))
    timeout_s = patience_s(world, device)
    limit_s = max(min(_PART_OF_TIMEOUT * timeout_s, timeout_s - _ASKING_S), timeout_s / 2)
    watch = DeviceWatch(store, dist.get_rank(), range(world.size()), limit_s, StreamProgress(stream), abort_groups)
    _watches[store] = watch
    watch.start()
    kernel_waits.append(lambda: watch.waited_s)
    Finalize(None, watch.end_process, exitpriority=-1000)


class StreamProgress:
    """Says for how many seconds a stream has not come to the end of what it had been given before."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._event: Any = None
        self._since = 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        try:
            if self._event is None or self._event.query():
                self._event, self._since = self._stream.record_event(), now
        except RuntimeError:  # the device has failed, which is said where it is used
            self._event, self._since = None, now
        return now - self._since


class DeviceWatch:
    """Looks whether this process waits for a rank that will not come.

    Args:
        rank: this one, of ``ranks``, all global.
        limit_s: how long a rank that is there may take.
        stuck_s: for how long the device has not gone on.  abort: makes what waits there come back.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        limit_s: float,
        stuck_s: Callable[[], float],
        abort: Callable[[], None],
    ) -> None:
        self._store = weakref.ref(store)
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._near = [other for other in self._others if abs(other - rank) <= _NEAR]
        self._limit_s = limit_s
        self._stuck_s, self._abort = stuck_s, abort
        self._waiter = threading.get_ident()
        self._began = time.monotonic()
        self._pid = os.getpid()
        self._has_told = False
        self.waited_s = 0.0  # for which the program has waited for a kernel

    def start(self) -> None:
        """Begin; it ends with the default process group."""
        threading.Thread(target=self._run, name="shardwise-device", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            store = self._store()
            if store is None or store_of_job() is not store:
                return
            waited_s = min(self._stuck_s(), time.monotonic() - max(last_time(), self._began))
            self.waited_s = waited_s
            if waited_s < _STILL_S:
                continue
            reason = self.reason(store, waited_s)
            if reason:
                self.tell(reason)
                return

    def reason(self, store: dist.Store, waited_s: float) -> str:
        """Return why waiting, which has lasted ``waited_s``, will not end; an empty text if it may."""
        job = JobStore(store, BRIEF_S)
        try:
            told = job.peek(_TOLD)
            lost = [int(told)] if told else [rank for rank in self._near if is_gone(store, rank)]
            if lost:
                job.set(_TOLD, str(lost[0]))
        except TransportError as silence:  # who keeps the store is gone
            return f"{silence}; rank {self._rank} waits for a kernel"
        if lost:
            return f"{gone_in_words(store, lost)}; rank {self._rank} waits in a kernel. {look_next()}"
        if waited_s < self._limit_s:
            return ""
        who = found_among(self._others, store)
        return f"rank {self._rank} has waited in a kernel for {waited_s:.0f} s: {who}. {look_next()}"

    def tell(self, reason: str) -> None:
        """Raise ``reason`` in the thread that waits; it comes back because the collectives of this process are ended."""
        leave(reason)
        # torch may end the process first: its own watch finds connections that were closed.
        print(f"shardwise: {reason}", file=sys.stderr, flush=True)
        self._has_told = True
        # In a thread of its own: it may itself wait for the device.
        aborting = threading.Thread(target=self._abort, name="shardwise-abort", daemon=True)
        heard = raise_in(self._waiter, reason, lambda: aborting.join(_COMES_BACK_S))
        aborting.start()
        if not heard.wait(_COMES_BACK_S) and self._store() is not None:
            print("shardwise: the kernel does not end; this process does", file=sys.stderr, flush=True)
            os._exit(1)

    def end_process(self) -> None:
        """At the end of this process: end it without torch's destructors if an error has ended it, or its groups are ended.

        They would wait for the rank that is lost, and then abort.
        """
        is_lost = self._has_told or getattr(sys, "last_value", None) is not None
        if os.getpid() == self._pid and is_lost and self._store() is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def raise_in(thread: int, reason: str, first: Callable[[], None] = lambda: None) -> threading.Event:
    """Let a TransportError be raised in ``thread`` as soon as it runs Python again: before it sees what it has waited for.

    Returns: what is set then.  ``first``: what ``thread`` calls before it goes on.
    """
    heard = threading.Event()

    class Found(TransportError):
        def __init__(self) -> None:
            super().__init__(reason)
            heard.set()
            first()

    Found.__name__, Found.__qualname__, Found.__module__ = "TransportError", "TransportError", TransportError.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Found))
    return heard

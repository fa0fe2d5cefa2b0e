"""Reports who waits for whom: in one line after 30 seconds of waiting, and in the error at the end of the wait.

A rank that waits in a collective cannot report, and the cause is on another rank.  So a thread of each process posts where the
program is to the store of the job every few seconds: the line of user code, the call that it makes, and how many forwards and
backwards have begun.  Nothing of this runs on the program's own thread, except when there is an error.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist

from shardwise.black_box import ERROR, Entry, entries
from shardwise.comm.store import BRIEF_S, JobStore
from shardwise.doctor import rank_status
from shardwise.doctor.rank_status import RankStatus
from shardwise.doctor.recorder import DefaultRecorder, place_of_records
from shardwise.doctor.user_code import lines_of, lines_of_trace
from shardwise.errors import ConfigError, TransportError
from shardwise.torch_private import are_threads, default_store, timeout_s_of

_report_s = [30.0]  # one entry, set by set_wait_report alone
_LOOKS = 6  # within that time
_MOST_ASKED = 64
_ASKED, _NAME = "shardwise/wait/asked", "shardwise/wait/job"
kernel_waits: list[
    Callable[[], float]
] = []  # seconds for which a kernel has not ended; appended to by comm/device_watch.py
_RULE = "Every rank must make the same calls in the same order."
_watches: weakref.WeakKeyDictionary[dist.Store, WaitWatch] = weakref.WeakKeyDictionary()
_running: list[WaitWatch] = []  # the last one, set by watch_waits alone


def set_wait_report(seconds: float) -> None:
    """Set how long a rank waits for others before it reports who waits for whom, and where; the default is 30 seconds.

    One of the ranks that wait writes a line to standard error, once for each wait.  At the same time ranks that do not make
    progress write their records (see :func:`record`).  Call this on every rank before the first ``fully_shard``,
    ``replicate`` or optimizer of shardwise.

    Args:
        seconds: more than 0; 0 turns off the report, and all records except those of :func:`record`.

    Raises: ConfigError for any other number.
    """
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"seconds must be 0 (no report) or more, got {seconds!r}")
    _report_s[0] = float(seconds)


def watch_waits(store: dist.Store) -> None:
    """Start the thread that posts where this process is to ``store``, unless it runs already."""
    world = dist.group.WORLD
    if store in _watches or world is None or world.size() == 1 or are_threads():
        return
    for earlier in _running:  # its process group is gone: a process has one job at a time
        earlier.end()
    _running.clear()
    if not _report_s[0]:
        return
    _stop_at_exit()
    watch = _watches[store] = WaitWatch(store, dist.get_rank(), _report_s[0], timeout_s_of(world))
    _running[:] = [watch]
    watch.start()


@functools.cache
def _stop_at_exit() -> None:
    """Stop the threads before the interpreter exits: one that waits for the GIL then may abort the process."""
    atexit.register(lambda: [watch.stop() for watch in _running])


def status_in_words(members: Iterable[int], error: BaseException | None = None) -> str:
    """Return a sentence about where global ranks ``members`` are, this one among them; empty if no other has posted.

    ``error``: the exception that ends this process; its traceback says where the program was.
    """
    store = default_store() if dist.is_available() and dist.is_initialized() else None
    watch = _watches.get(store) if store is not None else None
    return "" if watch is None else watch.in_words(members, error)


class ProgramStatus:
    """Where the program of this process, global ``rank``, is, and since when; create it on the program's thread.

    Attributes:
        since_s: the monotonic time since which it has been where the last :meth:`look` found it.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.since_s = rank, 0.0
        self._thread = threading.get_ident()
        self._seen, self._looked_s = ("", ""), 0.0  # line and call, and when

    def look(self) -> RankStatus:
        """Return where the program is; call it periodically."""
        frames = lines_of(sys._current_frames().get(self._thread))  # pyright: ignore[reportPrivateUsage]
        now, last = time.monotonic(), self._last_event()
        moved_s = last[0] if last is not None else 0.0
        found = rank_status.look(self.rank, frames, last)
        if not found.waits_for and any(seconds() >= _report_s[0] for seconds in kernel_waits):
            found = replace(found, waits_for="all ranks")
        seen, looked_s = self._seen, self._looked_s
        self._seen, self._looked_s = (found.line, found.call), now
        if seen == self._seen and moved_s <= looked_s:
            return replace(found, still_s=now - self.since_s)
        self.since_s = moved_s if moved_s > looked_s else now
        return found

    def at_error(self, frames: Sequence[str], raised: str) -> RankStatus:
        """Return where an error at ``frames`` stopped the program; ``raised``: the exception's class if it ends it."""
        found = rank_status.look(self.rank, frames, self._last_event(), raised)
        is_same = self._seen == (found.line, found.call)
        return replace(found, still_s=time.monotonic() - self.since_s) if is_same else found

    def _last_event(self) -> Entry | None:
        events = (entry for entry in reversed(entries()) if entry[1] == self._thread and entry[4] != ERROR)
        return next(events, None)


class WaitWatch:
    """Posts the status of this process, and reads that of others when it waits.

    Args:
        report_s: how long a wait may take before it is reported.  timeout_s: the timeout of the job's collectives.
    """

    def __init__(self, store: dist.Store, rank: int, report_s: float, timeout_s: float) -> None:
        self._store, self._program, self._report_s = weakref.ref(store), ProgramStatus(rank), report_s
        self._pause_s = min(report_s / _LOOKS, timeout_s / 4)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-wait", daemon=True)
        self._reported_s = self._recorded_s = 0.0  # when the last wait began that was reported, or recorded
        self._asked = ""
        self._recorder = DefaultRecorder(self._name)

    def start(self) -> None:
        """Start the thread, which ends with the default process group or this process."""
        store = self._job()
        if store is not None and self._program.rank == 0:
            JobStore(store, BRIEF_S).set(_NAME, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        self._recorder.open()
        self._thread.start()

    def end(self) -> None:
        """Let the thread end soon, and write no more records."""
        self._stop.set()
        self._recorder.flush()
        self._recorder.close()

    def stop(self) -> None:
        """Stop the thread."""
        self.end()
        self._thread.join(2 * BRIEF_S)

    def _job(self) -> dist.Store | None:
        store = self._store()
        return store if store is not None and dist.is_initialized() and default_store() is store else None

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s):
            with suppress(
                TransportError, RuntimeError, ValueError
            ):  # the store does not answer, or a model or group is being built
                store = self._job()
                if store is None:
                    self.end()
                    break
                self.look(JobStore(store, BRIEF_S))
            self._recorder.flush()

    def look(self, job: JobStore) -> None:
        """Post where the program is; report it if it has waited for too long."""
        mine = self._program.look()
        if not mine.line:  # the program is starting or exiting
            return
        job.set(_key(mine.rank), mine.to_text())
        self._recorder.place()  # while the store answers
        if mine.still_s < self._report_s:
            return
        if mine.waits_for and self._reported_s != self._program.since_s:
            self._reported_s = self._program.since_s
            self._report(job, mine)
        asked = job.peek(_ASKED) or ""
        if asked != self._asked and self._recorded_s != self._program.since_s:
            self._asked, self._recorded_s = asked, self._program.since_s
            self._recorder.write(f"nothing has moved for {mine.still_s:.0f} s")

    def _report(self, job: JobStore, mine: RankStatus) -> None:
        found = self._statuses(job, range(dist.get_world_size()), mine)
        job.set(_ASKED, f"{mine.rank} {self._program.since_s}")
        if min(each.rank for each in found if each.waits_for) == mine.rank:
            more = f" For the stacks of all ranks: shardwise diagnose {place}" if (place := place_of_records()) else ""
            print(f"shardwise: {rank_status.in_words(found)}. {_RULE}{more}", file=sys.stderr, flush=True)

    def in_words(self, members: Iterable[int], error: BaseException | None) -> str:
        """Do as :func:`status_in_words`."""
        ranks = list(members)
        store = self._job()
        if store is None:
            return ""
        try:
            job = JobStore(store, BRIEF_S)
            if error is not None:
                self._stop.set()  # the stack is gone from now on
                frames, raised = lines_of_trace(error.__traceback__), type(error).__name__
            else:
                frames, raised = lines_of(sys._getframe()), ""  # pyright: ignore[reportPrivateUsage]
            mine = self._program.at_error(frames, raised)
            job.set(_key(mine.rank), mine.to_text())
            found = self._statuses(job, ranks, mine)
        except (TransportError, RuntimeError, ValueError):
            return ""
        return rank_status.in_words(found) if len(found) > 1 else ""

    def _statuses(self, job: JobStore, ranks: Sequence[int], mine: RankStatus) -> list[RankStatus]:
        asked = sorted({*ranks[:_MOST_ASKED], mine.rank})
        texts = {rank: job.peek(_key(rank)) for rank in asked if rank != mine.rank}
        found = [rank_status.from_text(text) for text in texts.values() if text]
        return sorted([*found, mine], key=lambda each: each.rank)

    def _name(self) -> str | None:
        """Return the name of the job, which its first rank gives; None before that."""
        store = self._job()
        with suppress(TransportError):
            return None if store is None else JobStore(store, BRIEF_S).peek(_NAME)
        return None


def _key(rank: int) -> str:
    return f"shardwise/wait/status/{rank}"

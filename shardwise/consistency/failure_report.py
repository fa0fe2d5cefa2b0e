"""Report who waits for whom: in one line after 30 seconds of waiting, and in the error at the end of the wait.

A rank that waits in a collective cannot report, and the cause is on another rank.  So a thread of each process posts
the position of the program to the job's store every few seconds: the line of user code, the call that it makes, and the
number of forwards and backwards.  None of this runs on the program's own thread, except after an error.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.consistency import store as alarm
from shardwise.consistency.process_groups import (
    abort_all_connections,
    abort_connections,
    collectives_begun,
    groups_within,
    host_timeout_s,
    is_elsewhere,
    is_gone,
    mark_left,
    tells_of_lost_host,
)
from shardwise.consistency.recorder import (
    NOTHING_MOVES,
    RankStatus,
    awaited_groups,
    deadlocked,
    excepthook,
    lines_of,
    lines_of_trace,
    place_of_records,
    status_at,
    status_from_text,
    statuses_in_words,
    write_all,
)
from shardwise.consistency.store import (
    BRIEF_S,
    LOOK_S,
    SILENCE,
    JobStore,
    are_threads,
    default_store,
    keeps_store,
    wait_until,
)
from shardwise.errors import ConfigError, ShardwiseError, TransportError
from shardwise.formatting import format_ranks, ranks_by_text
from shardwise.observe import ERROR, Entry, entries, explain_end, explainers, observers
from shardwise.torch_private import is_gloo, timeout_s_of

# ---- The last error of each rank, so that a rank that finds another one gone, or waits for it in vain, can cite the
# first cause.
# A rank that is notified of a fault exits too, and the next one finds it gone: without the report of the first, the
# follower would be blamed. Reports are written to the job's store when an error is created, and read only after a
# failure.

_MOST_TEXT = 600
_CITATION = re.compile(r"; the last error of ranks? (\d+(?:, \d+)*): ")
_LEFT = re.compile(r"rank (\d+) raised an exception (?:while|in backward)")
ASKING_S = 4.0
ASKS = " (asks the others)"  # at the end of a report that may still change
_busy = threading.local()  # set while a report is written: errors of that write are not reported
_ADVICE = re.compile(r" ?Look at the end of its log(; ask: shardwise diagnose \S+)?")
NO_REPORT = "it reported no exception: killed, or its program ended"


def publish_failure(text: str) -> None:
    """Report ``text``, why this rank may not continue, to the other ranks; an empty one withdraws the report.  Never raises."""
    store = default_store()
    if store is None or SILENCE in text or getattr(_busy, "is_on", False):
        return
    _busy.is_on = True
    try:
        put(store, dist.get_rank(), text)
    except (TransportError, ValueError):  # the error itself still shows it
        return
    finally:
        _busy.is_on = False


def look_next() -> str:
    """Return the advice that ends messages about a lost rank."""
    place = place_of_records()
    return "Look at the end of its log" + (f"; ask: shardwise diagnose {place}" if place is not None else "")


def in_short(error: BaseException) -> str:
    """Return the first line of ``error``; of a backend's error, without its source line and advice.

    Example:
        >>> in_short(RuntimeError("[/a/pair.cc:553] Connection closed by peer. This is typically caused by a crash. GLHF!"))
        'Connection closed by peer'
    """
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". This is typically caused by")[0]


def put(store: dist.Store, rank: int, text: str) -> None:
    """Store ``text`` as the report of global ``rank``.  Raises: TransportError if the store does not answer."""
    said = _ADVICE.sub("", text.removesuffix(ASKS))[:_MOST_TEXT]  # advice is only for the first reader
    line = " | ".join(each.strip() for each in said.splitlines())
    JobStore(store, BRIEF_S).set(_report_key(rank), line + ASKS * text.endswith(ASKS))


def report_of(store: dist.Store | None, rank: int, patience_s: float = 0.0) -> str:
    """Return the report of global ``rank``, or an empty text if there is none or it cannot be read.

    ``patience_s``: how long to wait for a rank that is querying others, since it will know more.
    """
    text = ""

    def is_final() -> bool:
        nonlocal text
        text = JobStore(store, BRIEF_S).peek(_report_key(rank)) or "" if store is not None else ""
        return not text.endswith(ASKS)

    with suppress(TransportError):  # the store may be the cause
        wait_until(is_final, patience_s)
    return text.removesuffix(ASKS)


def has_reported_all(store: dist.Store, rank: int) -> bool:
    """Return True if the report of global ``rank`` is final, or if none can arrive."""
    with suppress(TransportError):
        text = JobStore(store, BRIEF_S).peek(_report_key(rank)) or ""
        return bool(text) and not text.endswith(ASKS)
    return True


def cited(store: dist.Store | None, ranks: Sequence[int], patience_s: float = ASKING_S) -> str:
    """Return the reports of global ``ranks`` as the end of a message: "; the last error of rank 3: ..."."""
    end = time.monotonic() + patience_s
    found = {rank: report_of(store, rank, end - time.monotonic()) for rank in ranks[:8]}
    return cited_texts({rank: text for rank, text in found.items() if text})


def cited_texts(found: Mapping[int, str]) -> str:
    """Return reports as the end of a message: each rank's own reason once, also those of ranks that they cite.

    Example:
        >>> cited_texts({1: "DesyncError: rank 2 is gone; the last error of rank 2: KeyError: 7; rank 1 waited for it."})
        '; the last error of rank 1: DesyncError: rank 2 is gone; the last error of rank 2: KeyError: 7'
        >>> cited_texts({1: "Timed out; the last error of rank 2: Timed out", 2: "Timed out"})
        '; the last error of ranks 1, 2: Timed out'
    """
    reasons: dict[int, str] = {}
    quoted: dict[int, str] = {}
    for rank, text in found.items():
        own, *rest = _CITATION.split(text)
        reasons[rank] = _own_reason(own)
        for names, said in zip(rest[::2], rest[1::2], strict=True):
            for name in map(int, names.split(", ")):  # use the longest: a citation within a citation may be truncated
                quoted[name] = max(quoted.get(name, ""), _own_reason(said), key=len)
    ranks_of = ranks_by_text((reasons | quoted | reasons).items())  # a rank knows its own reason best
    return "".join(f"; the last error of {format_ranks(ranks)}: {reason}" for reason, ranks in ranks_of.items())


def _own_reason(text: str) -> str:
    """Return ``text`` without what a rank reports of others: their positions, and that it has waited for them."""
    lines = [line for line in text.split(" | ") if not re.match(r"rank \d+ was at |Ranks must run ", line)]
    short = re.sub(r", after [^()]*(?= \()", "", "; ".join(lines))
    return re.sub(r"; rank \d+ waited for (it|them)\.?", "", short).rstrip(" .;|")


def out_of_reach(store: dist.Store, ranks: Sequence[int], error: str) -> list[int]:
    """Return which of global ``ranks`` cannot report: those on other hosts, once one host is known not to answer.

    ``error``, of this rank, or the report of another shows that a host does not answer.
    """
    is_known = tells_of_lost_host(error) or any(tells_of_lost_host(report_of(store, rank)) for rank in ranks)
    return [rank for rank in ranks if is_elsewhere(store, rank)] if is_known else []


def out_of_reach_in_words(ranks: Sequence[int]) -> str:
    """Return a text about ``ranks`` whose host does not answer."""
    after = f" for {host_timeout_s():g} s" if host_timeout_s() else ""
    return (
        f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} on another host, from which no answer has come{after}: "
        "it is switched off or stands still, or the cable to it is cut. Look at that host and at the network between; "
        "shardwise.set_host_timeout sets how long ranks wait"
    )


def gone_in_words(store: dist.Store | None, ranks: Sequence[int]) -> str:
    """Return a text about global ``ranks`` whose processes have ended, with their reports.

    Example:
        >>> gone_in_words(None, [3])
        'rank 3 is gone (it reported no exception: killed, or its program ended)'
    """
    text = f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} gone"
    found = cited(store, ranks, patience_s=0.0)  # their reports are final
    return text + (found or f" ({_ends_in_words(store, ranks) or NO_REPORT})")


def _ends_in_words(store: dist.Store | None, ranks: Sequence[int]) -> str:
    """Return that global ``ranks`` have ended without an exception, if they have said so."""
    with suppress(TransportError, RuntimeError):
        texts = [JobStore(store, BRIEF_S).peek(_status_key(rank)) for rank in ranks] if store is not None else []
        ends = [status_from_text(text) for text in texts if text]
        if ends and all(each.has_ended for each in ends):
            return f"{statuses_in_words(ends)}: give every rank as many batches, or put the loop into torch's Join"
    return ""


def _report_key(rank: int) -> str:
    return f"shardwise/last words/{rank}"


# ---- The ranks that a failed collective of a backend waited for: the backend's own text names a port, or nothing.


def name_partners(error: RuntimeError, group: dist.ProcessGroup) -> None:
    """Raise a backend's ``error`` with the other ranks of ``group``; return if these are all ranks of the job."""
    if isinstance(error, ShardwiseError) or not dist.is_initialized():
        return
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        others = format_ranks([rank for rank in ranks if rank != dist.get_rank()])
        raise RuntimeError(f"{in_short(error)} (in a group with {others})") from error


# ---- Exit after an error: no rank waits for this process, and if it hosts the store, it stays until the others have
# read.
# A process that ends closes its connections, which wakes ranks that wait for it in a collective. The process that hosts
# the job's store must not end before the others, which read the reason there. So connections are closed explicitly
# first; otherwise it would wait for ranks that wait for it.

_MOST_REQUESTED = 64
_STAY_S = 6.0  # seconds for the others to end, too
_LINGER_S = 2.0  # seconds for those that have reported their failure and live on

exit_hooks: list[Callable[[], object]] = []  # called when this process exits after an error; modules append their hooks
# Processes that leave their job at exit, and those whose program an error has ended.  No store: one that is kept would
# answer the next job at its address, after destroy_process_group().
_watched: set[int] = set()
_is_leaving: list[int] = []


def watch_end() -> None:
    """Call :func:`leave_job` at the exit of this process."""
    if os.getpid() not in _watched:
        Finalize(None, leave_job, exitpriority=100)
    _watched.add(os.getpid())


def will_leave() -> None:
    """Record that an error has ended the program of this process."""
    watch_end()
    _is_leaving.append(os.getpid())


def leave_job() -> None:
    """After an error has ended the program, make sure that no rank waits for this process; else do nothing.

    The process that hosts the job's store stays until the others have ended or reported why they fail, at most 6 s,
    since they read the reason there.  It does not wait for ranks on a host that does not answer.
    """
    store, error, is_first = default_store(), getattr(sys, "last_value", None), os.getpid() in _watched
    _watched.discard(os.getpid())
    if store is None or not is_first or (os.getpid() not in _is_leaving and error is None):
        return
    if error is not None and not isinstance(error, ShardwiseError) and os.getpid() not in _is_leaving:
        publish_failure(f"{type(error).__name__}: {in_short(error)}")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with suppress(TransportError):
        mark_left(store, rank)
    for exit_hook in exit_hooks:
        exit_hook()
    abort_all_connections(range(num_ranks))
    if keeps_store(store):
        others = [other for other in range(num_ranks) if other != rank][:_MOST_REQUESTED]
        far = out_of_reach(store, others, str(error))
        start = time.monotonic()

        def may_leave(rank: int) -> bool:
            is_late = time.monotonic() - start > _LINGER_S
            return rank in far or is_gone(store, rank) or (is_late and has_reported_all(store, rank))

        wait_until(lambda: all(may_leave(rank) for rank in others), _STAY_S)


# ---- The thread that posts where this process is, reports long waits, and ends those that cannot end.

_report_s, _deadlock_s = [30.0], [10.0]  # one entry each, set by set_wait_report only
_LOOKS = 6  # checks within that time
_REQUESTED, _DEADLOCK = "shardwise/wait/asked", "shardwise/wait/deadlock"
# Functions that return for how many seconds a kernel has not ended; collectives/streams.py appends them.
kernel_waits: list[Callable[[], float]] = []
_RULE = "Every rank must make the same calls in the same order."
_running: list[WaitWatch] = []  # that of the job, if there is one; only watch_waits changes it


def forget_deadlock(store: dist.Store) -> None:
    """Forget a deadlock that was found, after its ranks have left their waits and meet again."""
    alarm.deadlock.clear()
    store.set(_DEADLOCK, json.dumps([[], ""]))


def set_wait_report(seconds: float, *, deadlock_s: float = 10.0) -> None:
    """Set how long a rank waits for others before it reports who waits for whom, and where; the default is 30 seconds.

    One of the ranks that wait writes a line to standard error, once for each wait.  At the same time ranks that do not make
    progress write their records (see :func:`record`).  Call this on every rank before the first ``fully_shard``,
    ``replicate`` or optimizer of shardwise.

    Args:
        seconds: more than 0; 0 turns off the report and the end of deadlocks.
        deadlock_s: how long ranks that wait for each other in different calls, so that none can go on, wait before the
            report is raised on each of them, over gloo; 0: they wait for the timeout of their process group.

    Raises: ConfigError for any other number.
    """
    for name, value in (("seconds", seconds), ("deadlock_s", deadlock_s)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name} must be 0 (no report) or more, got {value!r}")
    _report_s[0], _deadlock_s[0] = float(seconds), float(deadlock_s)


def watch_waits(store: dist.Store) -> None:
    """Start the thread that posts this process's status to ``store``, unless it runs already."""
    world = dist.group.WORLD
    if world is None or world.size() == 1 or are_threads() or any(each.watches(store) for each in _running):
        return
    for earlier in _running:  # its process group is gone: a process has one job at a time
        earlier.end()
    _running.clear()
    if not _report_s[0]:
        return
    _stop_at_exit()
    alarm.deadlock.clear()  # of an earlier job
    _running.append(WaitWatch(store, dist.get_rank(), _report_s[0], timeout_s_of(world)))
    _running[0].start()


@functools.cache
def _stop_at_exit() -> None:
    """Stop the threads before the interpreter exits: one that waits for the GIL then may abort the process."""
    atexit.register(lambda: [(watch.stop(), watch.note_end()) for watch in _running])


def status_in_words(members: Iterable[int], error: BaseException | None = None) -> str:
    """Return a sentence about where global ranks ``members`` are, this one included; empty if no other has posted.

    ``error``: the exception that ends this process; its traceback shows where the program was.
    """
    return _running[0].in_words(members, error) if _running else ""


def _frame_of(thread: int) -> FrameType | None:
    return sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]  the documented way


class ProgramStatus:
    """Where the program of this process, global ``rank``, is, and since when; create it on the program's thread.

    Attributes:
        thread: that of the program.
        since_s: the monotonic time since which it has been where the last :meth:`look` found it.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.since_s = rank, 0.0
        self.thread = threading.get_ident()
        self._seen, self._looked_s = ("", ""), 0.0  # line and call, and when

    def look(self) -> RankStatus:
        """Return where the program is; call it periodically."""
        frame = _frame_of(self.thread)
        frames = lines_of(frame)
        now, last = time.monotonic(), self._last_event()
        moved_s = last[0] if last is not None else 0.0
        found = status_at(self.rank, frames, last)
        if not found.waits_for and any(seconds() >= _report_s[0] for seconds in kernel_waits):
            found = replace(found, waits_for="all ranks")
        seen, looked_s = self._seen, self._looked_s
        self._seen, self._looked_s = (found.line, found.call), now
        if seen == self._seen and moved_s <= looked_s:
            found = replace(found, still_s=now - self.since_s)
            if not found.waits_for:
                return found
            return replace(found, awaited=awaited_groups(frame), collectives=collectives_begun())
        self.since_s = moved_s if moved_s > looked_s else now
        return found

    def at_error(self, frames: Sequence[str], raised: str) -> RankStatus:
        """Return where an error at ``frames`` stopped the program; ``raised``: the exception's class if it ends the program."""
        found = status_at(self.rank, frames, self._last_event(), raised)
        is_same = self._seen == (found.line, found.call)
        return replace(found, still_s=time.monotonic() - self.since_s) if is_same else found

    def _last_event(self) -> Entry | None:
        events = (entry for entry in reversed(entries()) if entry[1] == self.thread and entry[4] != ERROR)
        return next(events, None)


class WaitWatch:
    """Post the status of this process, and read the others' while it waits.

    Args:
        report_s: how long a wait may take before it is reported.  timeout_s: the timeout of the job's collectives.
    """

    def __init__(self, store: dist.Store, rank: int, report_s: float, timeout_s: float) -> None:
        self._store, self._program = weakref.ref(store), ProgramStatus(rank)
        self._pause_s = min(report_s / _LOOKS, timeout_s / 4, (_deadlock_s[0] or report_s) / 2)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-wait", daemon=True)
        self._reported_s = self._recorded_s = 0.0  # when the last wait began that was reported, or recorded
        self._compared = (0.0, 0.0)  # when the last wait began that was compared with those of others, and its length
        self._asked = ""
        self._hook = ExitStack()

    def start(self) -> None:
        """Start the thread, which ends with the default process group or this process."""
        self._hook.enter_context(excepthook(_explain_end))
        self._thread.start()

    def end(self) -> None:
        """Stop the thread soon, and explain no more."""
        self._stop.set()
        self._hook.close()

    def stop(self) -> None:
        """Stop the thread."""
        self.end()
        self._thread.join(2 * BRIEF_S)

    def note_end(self) -> None:
        """Post that the program ended without an exception, to a store that the launcher keeps: it outlives the ranks."""
        store, has_raised = self._store(), os.getpid() in _is_leaving or getattr(sys, "last_value", None) is not None
        if store is not None and not has_raised and dist.is_torchelastic_launched():
            with suppress(TransportError, RuntimeError, ValueError):
                status = replace(status_at(self._program.rank, (), None), has_ended=True)
                JobStore(store, BRIEF_S).set(_status_key(status.rank), status.to_text())

    def watches(self, store: dist.Store) -> bool:
        """Return True if the status is posted to ``store``."""
        return self._store() is store

    def _job(self) -> dist.Store | None:
        store = self._store()
        return store if store is not None and default_store() is store else None

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s):
            # The store may not answer, or a model or group may be under construction.
            with suppress(TransportError, RuntimeError, ValueError):
                store = self._job()
                if store is None:
                    self.end()
                    break
                self.look(JobStore(store, BRIEF_S))

    def look(self, job: JobStore) -> None:
        """Post where the program is; report it if it has waited for too long."""
        mine = self._program.look()
        if not mine.line:  # the program is starting or exiting
            return
        job.set(_status_key(mine.rank), mine.to_text())
        if mine.waits_for and 0 < _deadlock_s[0] <= mine.still_s:
            self._end_deadlock(job, mine)
        if mine.still_s < _report_s[0]:
            return
        said = ""
        if mine.waits_for and self._reported_s != self._program.since_s:
            self._reported_s = self._program.since_s
            said = self._report(job, mine)
        asked = job.peek(_REQUESTED) or ""
        if asked != self._asked and self._recorded_s != self._program.since_s:
            self._asked, self._recorded_s = asked, self._program.since_s
            write_all(f"{NOTHING_MOVES} for {mine.still_s:.0f} s{said}")

    def _end_deadlock(self, job: JobStore, mine: RankStatus) -> None:
        """Raise on the program's thread if this rank and others wait for each other.

        The last rank that has waited long enough sees that the others have, so each one compares rarely: whenever its wait
        is twice as long.  All of them learn the reason before the first one raises, since its error breaks their calls.
        """
        since_s, least_s = self._compared
        if self._program.since_s != since_s or mine.still_s >= 2 * least_s:
            self._compared = (self._program.since_s, mine.still_s)
            found = self._statuses(job, range(dist.get_world_size()), mine)
            stuck = deadlocked(found, _deadlock_s[0])
            if mine.rank in stuck:
                where = statuses_in_words([each for each in found if each.rank in stuck])
                text = f"{format_ranks(stuck)} wait for each other, so that none can go on: {where}. {_RULE}{_for_stacks()}"
                job.set(_DEADLOCK, json.dumps([stuck, text]))
        stuck, text = json.loads(job.peek(_DEADLOCK) or '[[], ""]')
        if mine.rank not in stuck or [text] == alarm.deadlock:
            return
        alarm.deadlock[:] = [text]
        self._reported_s = self._program.since_s
        if mine.rank == min(stuck):
            print(f"shardwise: {text}", file=sys.stderr, flush=True)
        write_all(text)
        known = f"{_DEADLOCK}/{len(stuck)}/{zlib.crc32(text.encode())}"
        job.add(known, 1)
        wait_until(lambda: job.add(known, 0) >= len(stuck), 2 * self._pause_s, pauses_s=(0.05, 0.2))
        alarm.end_waits(self._program.thread)
        abort_all_connections(range(dist.get_world_size()))

    def _report(self, job: JobStore, mine: RankStatus) -> str:
        """Return who waits for whom, after a colon, on the rank that prints it."""
        found = self._statuses(job, range(dist.get_world_size()), mine)
        job.set(_REQUESTED, f"{mine.rank} {self._program.since_s}")
        if min(each.rank for each in found if each.waits_for) != mine.rank:
            return ""
        said = statuses_in_words(found)
        print(f"shardwise: {said}. {_RULE}{_for_stacks()}", file=sys.stderr, flush=True)
        return f": {said}"

    def in_words(self, members: Iterable[int], error: BaseException | None) -> str:
        """Return the text of :func:`status_in_words`."""
        ranks = list(members)
        store = self._job()
        if store is None:
            return ""
        try:
            job = JobStore(store, BRIEF_S)
            if error is not None:
                self._stop.set()  # the stack is unwound from now on
                frames, raised = lines_of_trace(error.__traceback__), type(error).__name__
            else:
                frames, raised = lines_of(_frame_of(threading.get_ident())), ""
            mine = self._program.at_error(frames, raised)
            job.set(_status_key(mine.rank), mine.to_text())
            found = self._statuses(job, ranks, mine)
        except (TransportError, RuntimeError, ValueError):
            return ""
        return statuses_in_words(found) if len(found) > 1 else ""

    def _statuses(self, job: JobStore, ranks: Sequence[int], mine: RankStatus) -> list[RankStatus]:
        asked = sorted({*ranks[:_MOST_REQUESTED], mine.rank})
        texts = {rank: job.peek(_status_key(rank)) for rank in asked if rank != mine.rank}
        found = [status_from_text(text) for text in texts.values() if text]
        return sorted([*found, mine], key=lambda each: each.rank)


def _explain_end(error: BaseException, _: object) -> None:
    if place_of_records() is None:  # else the recorder does
        explain_end(error)


def _for_stacks() -> str:
    return f" For the stacks of all ranks: shardwise diagnose {place}" if (place := place_of_records()) else ""


def _status_key(rank: int) -> str:
    return f"shardwise/wait/status/{rank}"


# ---- Explanations of backends' raw errors: which rank is gone, or may have left by an exception.

_T = TypeVar("_T")
_OF_BACKEND = re.compile(r"^\[\S+\.(cc|cpp|hpp):\d+\]|^Connection (closed|reset)|^Wait timeout")
_SAY_S = 3.0  # time for ranks to fail after this one, and to report it


def naming_lost_peers(act: Callable[[], _T], what: str, members: Sequence[int], mine: int) -> _T:
    """Return ``act()``, a collective of global ranks ``members``; this process is ``mine``.

    Args:
        what: begins the message: "whole matrices cannot go to their owners or back".
    Raises: what ``act`` raises if that explains itself (an error of shardwise, or of memory); instead of any other
    RuntimeError,
        a TransportError that names the ranks whose processes are gone, or all candidates.
    """
    try:
        return act()
    except (ShardwiseError, torch.OutOfMemoryError):
        raise  # it explains itself
    except RuntimeError as error:
        alarm.refuse_deadlock()
        failed = f"{what} on rank {mine}: {in_short(error)}"
        groups = groups_within(members) if dist.is_initialized() else ()
        others = [rank for rank in members if rank != mine]
        who = why_failed(failed, error, members, mine, default_store(), groups)
        who = who or f"{format_ranks(others)} did not all make this call, or raised an exception: see their errors"
        raise TransportError(
            f"{what}: {who}; rank {mine} waited. Every rank must make the same calls in the same order; first error: "
            f"{in_short(error)}"
        ) from error


def why_failed(
    failed: str,
    error: BaseException,
    members: Sequence[int],
    mine: int,
    store: dist.Store | None,
    groups: Iterable[dist.ProcessGroup],
) -> str:
    """Return in words what is known of the other ranks after a collective of global ranks ``members`` failed on ``mine``.

    A rank that left by an exception of its own is not waited for: it may continue, and would wait for this one.

    Args:
        failed: the report of this rank, until it knows more.
        groups: after a backend's own error their connections are closed: no rank may wait for this one while it queries
            the others.
    """
    if store is None:
        return ""
    publish_failure(failed + ASKS)
    if not isinstance(error, ShardwiseError):
        for group in filter(is_gloo, groups):
            with suppress(RuntimeError):
                abort_connections(group)
    left = {int(rank) for rank in _LEFT.findall(str(error))}
    others = [rank for rank in members if rank != mine and rank not in left]
    found = found_among(others, store, str(error)) if others else ""
    return "; ".join(filter(None, [found, status_in_words(members)]))


def concerns_others(error: RuntimeError) -> bool:
    """Return True for a backend's error, or one of shardwise about another rank; False for one of this rank only."""
    return not isinstance(error, (ShardwiseError, torch.OutOfMemoryError)) or isinstance(error, TransportError)


def _explain(error: BaseException) -> str:
    """Return which ranks a backend's own ``error`` may be about; report any error to them that is not shardwise's."""
    store = default_store()
    if store is None or isinstance(error, SystemExit):
        return ""
    if alarm.deadlock:
        will_leave()
        return "" if isinstance(error, ShardwiseError) else f"DesyncError: {alarm.deadlock[0]}"
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    found, status = "", status_in_words(range(dist.get_world_size()), error)
    if not isinstance(error, ShardwiseError):  # those are reported already, and name their ranks
        said = f"{type(error).__name__}: {in_short(error)}"
        publish_failure(said)
        if _is_of_backend(error):
            found = found_among(others, store, str(error))
            publish_failure(f"{said}; {found}")
            found = "; ".join(filter(None, [found, status]))
    will_leave()
    return found


def _is_of_backend(error: BaseException) -> bool:
    """Return True if ``error`` is of a collective or the store; False for the program's own, which others do not know."""
    frames = lines_of_trace(error.__traceback__)
    is_called = isinstance(error, RuntimeError) and any("/torch/distributed/" in frame for frame in frames)
    return is_called or isinstance(error, dist.DistError) or _OF_BACKEND.search(str(error)) is not None


def found_among(others: Sequence[int], store: dist.Store, error: str = "") -> str:
    """Return which of ``others`` are gone, else which report nothing although all ranks in a failed collective do.

    ``error``: of this rank; it does not wait for a host that does not answer.
    """
    others, begin = others[:_MOST_REQUESTED], time.monotonic()

    def reason() -> str:
        try:
            JobStore(store, BRIEF_S).check([""])
        except TransportError as silence:
            return str(silence)
        gone = [rank for rank in others if is_gone(store, rank)]
        if gone:
            return gone_in_words(store, gone)
        silent = [rank for rank in others if not report_of(store, rank)]
        waited = time.monotonic() - begin
        lost = [rank for rank in out_of_reach(store, others, error) if rank in silent] if waited >= LOOK_S else []
        if lost:
            return out_of_reach_in_words(lost)
        if not silent:
            return f"all ranks have failed{cited(store, others, patience_s=0.0)}"  # each waits for all
        if waited >= _SAY_S:
            return f"{format_ranks(silent)} reported nothing: stopped, in another call, or it caught its exception"
        return ""

    return wait_until(reason, alarm=alarm.look)


# Registered at import: errors of this process are reported to other ranks, and a backend's own error is explained.
observers.append(publish_failure)
explainers.append(_explain)

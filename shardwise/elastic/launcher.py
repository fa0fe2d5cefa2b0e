"""The launcher's side of an elastic run: it alone decides which processes are the ranks.

It sees at once that a process has ended, and none of its processes is special.  Each process has a socket of its own to the
launcher, which it has inherited and no other process can open; what ranks of a generation tell each other is in files of a
folder that only this user can open.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.consistency.recorder import RankStatus, statuses_in_words
from shardwise.elastic.membership import VARIABLE, Generation
from shardwise.elastic.process import MOST_BYTES
from shardwise.errors import ConfigError, RankError
from shardwise.formatting import format_ranks
from shardwise.loop.launch import POLL_S
from shardwise.one_host import read_proc

STUCK_S = 60.0  # the default of --hang-after
_NUM_SETS = 2
_LOOK_S = 0.5  # between two looks for ranks that hang
_STUCK_S, _STUCK_USE = 15.0, 0.05  # a rank that has used less than this part of its time for so long will not leave
_TICKS = os.sysconf("SC_CLK_TCK")
_EXITING = 4  # of the flags of a process in /proc: PF_EXITING


@dataclass(frozen=True, slots=True)
class ElasticTerms:
    """How many processes a run may have.

    Attributes:
        num_ranks: at the start, and the most later on.  num_spares: that wait to take the place of a lost rank.
        num_new: to start in place of lost processes, until the run ends.  min_ranks: the run ends with fewer.
        stuck_s: a rank that makes no progress for so long, while others wait for it, is ended; 0: never.
    """

    num_ranks: int
    num_spares: int = 0
    num_new: int = 0
    min_ranks: int = 1
    stuck_s: float = STUCK_S


@dataclass(slots=True)
class _Started:
    """A process, with what the launcher knows of it."""

    link: socket.socket
    theirs: socket.socket  # closed here once it has started
    folder: Path  # for its temporary files
    pid: int = 0
    threads: tuple[int, int] = (0, 0)  # its main one, and the one that follows the launcher
    is_ready: bool = False  # it has called elastic()
    here: int = 0  # the newest generation that it has come to
    asks_in: int = 0  # the generation in which it has an error that may come of a lost rank
    has_closed: bool = False
    raised: str = ""  # its program's exception, which ends the run
    why_ended: str = ""  # why it is being ended
    status: RankStatus = field(default_factory=lambda: RankStatus(0))
    told_s: float = field(
        default_factory=time.monotonic
    )  # when it reported, or used a core before it had called elastic()
    used_s: float = 0.0  # of a core, until ``idle_s``
    idle_s: float = field(default_factory=time.monotonic)  # since when it has used next to nothing

    def send(self, *words: object) -> None:
        """Tell the process; one that is stopped may miss it."""
        with suppress(OSError):
            self.link.send(json.dumps(words).encode(), socket.MSG_DONTWAIT)

    @property
    def is_leaving(self) -> bool:
        """Whether it exits, or has: connections to it may be closed, before its parent is told."""
        fields = read_proc(f"{self.pid}/stat").rpartition(")")[2].split()
        return not fields or fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)

    def look(self, is_first: bool = False) -> None:
        """Note whether it uses a core, or waits for one; the thread that follows the launcher does not count."""
        used_s = core_s(self.pid, self.threads[1])
        if is_first or used_s - self.used_s > _STUCK_USE * _STUCK_S:
            self.used_s, self.idle_s = used_s, time.monotonic()


def core_s(pid: int, left_out: int = 0) -> float:
    """Return the CPU time of a process without one of its threads, and how long its main thread has waited for a core."""
    fields = read_proc(f"{pid}/schedstat").split()  # on a busy machine a rank that computes has little CPU time
    used_s = int(fields[1]) / 1e9 if fields else 0.0
    with suppress(OSError, ValueError):  # threads end meanwhile
        for thread in set(os.listdir(f"/proc/{pid}/task")) - {str(left_out)}:
            fields = read_proc(f"{pid}/task/{thread}/stat").rpartition(")")[2].split()
            used_s += sum(map(int, fields[11:13])) / _TICKS
    return used_s


class Launcher:
    """Decides on generations: a supervisor of :class:`LaunchContext`.

    Args:
        folder: that only this user can open.
    Raises: ConfigError where the system has no memory files.
    """

    def __init__(self, terms: ElasticTerms, folder: Path) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--elastic needs memory that outlives a process (memfd_create), which only Linux has.")
        self._terms, self._folder = terms, folder
        self._fds = [
            [os.memfd_create("shardwise-elastic", 0) for _ in range(terms.num_ranks)] for _ in range(_NUM_SETS)
        ]
        self._processes: dict[int, _Started] = {}
        self._waiting: list[int] = []  # spares, ready or not
        self._lost: set[int] = set()
        self._num_started = terms.num_ranks
        self._num_stuck = 0  # were ended as nothing could interrupt them; they are replaced besides what terms allow
        self._formed = self._lost_in = 0  # the newest generation that all have entered; that begins with a loss
        self._is_over = self._is_ending = False
        self._announced_s = self._looked_s = time.monotonic()
        self._generation = Generation(1, tuple(range(terms.num_ranks)), False, "the start")
        self._ranks: tuple[int, ...] = ()  # members of the newest generation that all have come to

    # ---- processes ----

    def prepare(self, rank: int) -> tuple[Mapping[str, object], tuple[int, ...]]:
        """Do as :class:`Supervisor` says."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        each = self._processes[rank] = _Started(ours, theirs, self._folder / f"tmp-{rank}")
        each.folder.mkdir()
        shared = theirs.fileno(), *(fd for one_set in self._fds for fd in one_set)
        told = {"fds": self._fds, "link": shared[0], "folder": str(self._folder), "stuck_s": self._terms.stuck_s}
        return {VARIABLE: json.dumps(told), "TMPDIR": each.folder}, shared

    def close(self) -> None:
        """Do as :class:`Supervisor` says."""
        for fd in (fd for one_set in self._fds for fd in one_set):
            os.close(fd)
        for each in self._processes.values():
            each.link.close()

    def started(self, rank: int, pid: int) -> None:
        """Do as :class:`Supervisor` says."""
        each = self._processes[rank]
        each.pid = pid
        each.theirs.close()
        each.send("generation", asdict(self._generation))

    def outlives(self, rank: int, code: int) -> bool:
        """Do as :class:`Supervisor` says."""
        each = self._processes[rank]
        if rank in self._lost or each.raised:
            return not each.raised
        if code >= 0 or self._is_over:
            return False
        if self._has_raised:
            return True  # the run ends by the exception, not by this one
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return self._lose(rank, each.why_ended or f"was ended by {how}")

    def more(self) -> int:
        """Do as :class:`Supervisor` says: let processes that are ready join, and replace those that are lost."""
        if self._is_over or self._has_raised:
            if self._is_over and self._generation.members:  # also for those that others were to let join
                self._announce((), False, "the run is over")
            return 0
        self._end_stuck()
        members, terms = self._generation.members, self._terms
        ready = [each for each in self._waiting if self._processes[each].is_ready]
        joining = ready[: terms.num_ranks - len(members)]
        # A rank may take up the newest generation only: one that others are still entering must not have a successor
        # that does not interrupt them.
        if joining and (not members or self._formed == self._generation.number):
            names = "process" if len(joining) == 1 else "processes"
            self._announce([*members, *joining], False, f"{names} {_listed(joining)} joined")
        num_more = terms.num_ranks + terms.num_spares - len(self._generation.members) - len(self._waiting)
        num_more = max(0, min(num_more, self._num_startable))
        self._waiting += range(self._num_started, self._num_started + num_more)
        self._num_started += num_more
        return num_more

    def pause(self, is_ending: bool) -> None:
        """Do as :class:`Supervisor` says."""
        self._is_ending = is_ending
        links = {each.link.fileno(): number for number, each in self._processes.items() if not each.has_closed}
        for fd in select.select([*links], (), (), POLL_S)[0]:
            self._hear(links[fd])
        for number, each in self._processes.items():
            if self._lost_in > each.asks_in:
                each.asks_in = 0  # it knows
            elif each.asks_in and (is_ending or self._has_raised or not self._are_leaving(number)):
                each.send("own", each.asks_in)
                each.asks_in = 0
            if each.has_closed and each.folder.exists() and not read_proc(f"{each.pid}/stat"):
                shutil.rmtree(each.folder, ignore_errors=True)
                if each.is_ready and number in self._generation.members and not (self._is_over or self._has_raised):
                    self._lose_or_end(number, "has ended before the last step")

    @property
    def _has_raised(self) -> bool:
        return any(each.raised for each in self._processes.values())

    def _are_leaving(self, asking: int) -> bool:
        others = [each for each in self._generation.members if each != asking]
        return any(self._processes[each].has_closed or self._processes[each].is_leaving for each in others)

    # ---- what processes say ----

    def _hear(self, number: int) -> None:
        each = self._processes[number]
        with suppress(BlockingIOError):
            while not each.has_closed:
                try:
                    text = each.link.recv(MOST_BYTES)
                except ConnectionError:
                    text = b""
                if not text:
                    each.has_closed = True
                    each.link.close()
                    return
                try:
                    self._take(number, each, json.loads(text))
                except (ValueError, TypeError) as error:
                    what = f"{type(error).__name__}: {error}"
                    print(f"shardwise: ignored a malformed message of process {number} ({what})", file=sys.stderr)

    def _take(self, number: int, each: _Started, message: object) -> None:
        match message:
            case ["ready", int(main), int(watcher)]:
                each.is_ready, each.threads, each.told_s = True, (main, watcher), time.monotonic()
            case ["here", int(generation)]:
                each.here = generation
                members = [self._processes[other] for other in self._generation.members]
                if all(other.here == self._generation.number for other in members):
                    self._ranks = self._generation.members
                    for other in members:
                        other.send("complete", self._generation.number)
            case ["formed", int(generation)]:
                for earlier in range(self._formed, generation):
                    (self._folder / str(earlier)).unlink(missing_ok=True)
                self._formed = max(self._formed, generation)
            case ["status", dict(status)]:
                fields: Any = {**status, "rank": number}  # pyright: ignore[reportUnknownVariableType]
                each.status, each.told_s = RankStatus(**fields), time.monotonic()
            case ["suspects", int(generation)]:
                each.asks_in = generation
            case ["raised", str(what)]:
                each.raised = what
            case ["left", str(what)]:
                self._lose_or_end(number, f"was ended by {what}")
            case ["over"]:
                self._is_over = True
            case _:
                raise ValueError(f"{str(message)[:80]!r}")

    # ---- generations ----

    @property
    def _num_startable(self) -> int:
        terms = self._terms
        return terms.num_ranks + terms.num_spares + terms.num_new + self._num_stuck - self._num_started

    def _lose_or_end(self, number: int, how: str) -> None:
        if not (self._is_ending or number in self._lost or self._lose(number, how)):
            raise RankError("too few ranks are left: all have been stopped")

    def _lose(self, number: int, how: str) -> bool:
        members, ranks = self._generation.members, self._ranks
        rank = f" (rank {ranks.index(number)} of {len(ranks)})" if number in ranks else ""
        cause = f"process {number}{rank} {how}"
        lost = {*self._lost, number}
        left, waiting = ([each for each in group if each not in lost] for group in (members, self._waiting))
        num_left = len(left) + len(waiting) + self._num_startable
        if num_left < self._terms.min_ranks and number in members:
            are = "1 rank is" if num_left == 1 else f"{num_left} ranks are"
            print(f"shardwise: {cause}; {are} left, --min-nproc is {self._terms.min_ranks}", file=sys.stderr)
            return False
        self._lost, self._waiting = lost, waiting
        if number in members:
            ready = [each for each in waiting if self._processes[each].is_ready]
            self._announce([*left, *ready[: self._terms.num_ranks - len(left)]], True, cause)
        return True

    def _announce(self, members: Iterable[int], is_urgent: bool, cause: str) -> None:
        if self._formed < self._generation.number > 1:  # no rank has said why that one began
            cause = f"{self._generation.cause}, {cause}"
        self._generation = Generation(self._generation.number + 1, tuple(sorted(members)), is_urgent, cause)
        self._announced_s = time.monotonic()
        self._lost_in = self._generation.number if is_urgent else self._lost_in
        self._waiting = [each for each in self._waiting if each not in self._generation.members]
        for number, each in self._processes.items():
            if number not in self._lost:
                each.send("generation", asdict(self._generation))
                each.look(is_first=True)

    # ---- ranks that hang ----

    def _end_stuck(self) -> None:
        """End ranks that others wait for in vain.  Raises: RankError if all ranks wait for each other."""
        now, limit_s = time.monotonic(), self._terms.stuck_s
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        members = {number: self._processes[number] for number in self._generation.members}
        late = {number: each for number, each in members.items() if each.here < self._generation.number}
        for number, each in late.items():
            each.look()
            stuck_s = now - max(self._announced_s, each.idle_s)
            if self._generation.is_urgent and stuck_s > min(_STUCK_S, limit_s or _STUCK_S):
                self._num_stuck += not each.why_ended
                self._end(number, "waited for a lost rank where nothing can interrupt it")
        still, silent = dict[int, RankStatus](), set[int]()
        for rank, (number, each) in enumerate(members.items()):
            if not each.is_ready:  # it may compute for long before it calls elastic()
                each.told_s = max(each.told_s, each.idle_s)
            if now - each.told_s > limit_s or (number in late and self._generation.is_urgent):
                silent.add(number)
            still_s = each.status.still_s + now - each.told_s
            waits_for = "" if number in silent else each.status.waits_for
            still[number] = replace(each.status, rank=rank, still_s=still_s, waits_for=waits_for)
        if not limit_s or min([now - self._announced_s, *(each.still_s for each in still.values())]) <= limit_s:
            return
        # One that waits inside of C++, as in DDP's backward, does not say so, but has begun more than the awaited one.
        idle = {number: each for number, each in still.items() if not each.waits_for}
        ended = {number for number, each in idle.items() if number in silent or not _is_ahead(each, idle.values())}
        ended = ended or set(idle)
        if not ended and len(members) > 1:
            where = statuses_in_words([*still.values()])
            raise RankError(
                f"no rank made progress for {limit_s:g} s (--hang-after), and all wait: {where}. Does step() catch an "
                "exception of one rank, or do ranks make other calls?"
            )
        for number in ended if len(ended) < len(members) else ():  # else none waits
            self._end(number, f"made no progress for {limit_s:g} s while others waited")

    def _end(self, number: int, why: str) -> None:
        each = self._processes[number]
        if not each.why_ended:
            place = ", in ".join(filter(None, (each.status.line, each.status.call)))
            each.why_ended = f"{why}, and was ended (last seen at {place})" if place else f"{why}, and was ended"
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)


def _is_ahead(status: RankStatus, others: Iterable[RankStatus]) -> bool:
    """Return True if a rank has begun a collective that another one has not: it may wait for it inside of C++."""
    return any(
        number > other.collectives.get(group, number)
        for other in others
        for group, number in status.collectives.items()
    )


def _listed(numbers: Iterable[int]) -> str:
    return format_ranks([*numbers]).partition(" ")[2]

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
from shardwise.elastic.keeper import make_files
from shardwise.elastic.membership import VARIABLE, Generation
from shardwise.elastic.process import MOST_BYTES
from shardwise.errors import ConfigError, RankError
from shardwise.formatting import format_ranks
from shardwise.loop.launch import POLL_S
from shardwise.one_host import read_proc

STUCK_S = 60.0  # the default of --hang-after
_START_S = (
    600.0  # instead of it for a process that has not yet called elastic(): it may import, and read data, for long
)
_LOOK_S = 0.5  # between two looks for ranks that hang
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
    is_ready: bool = False  # it has called elastic()
    here: int = 0  # the newest generation that it has come to
    asks_in: int = 0  # the generation in which it has an error that may come of a lost rank
    has_closed: bool = False
    is_lost: bool = False
    raised: str = ""  # its program's exception, which ends the run
    why_ended: str = ""  # why it is being ended
    status: RankStatus = field(default_factory=lambda: RankStatus(0))
    told_s: float = field(default_factory=time.monotonic)  # when it reported its status

    def send(self, what: str, generation: Generation) -> None:
        """Tell the process; one that is stopped may miss it."""
        with suppress(OSError):
            self.link.send(json.dumps([what, asdict(generation)]).encode(), socket.MSG_DONTWAIT)

    @property
    def is_leaving(self) -> bool:
        """Whether it exits, or has: connections to it may be closed, before its parent is told."""
        fields = read_proc(f"{self.pid}/stat").rpartition(")")[2].split()
        return self.has_closed or not fields or fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


class Launcher:
    """Decides on generations: a supervisor of :class:`LaunchContext`.

    Args:
        folder: that only this user can open.
    Raises: ConfigError where the system has no memory files.
    """

    def __init__(self, terms: ElasticTerms, folder: Path) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--elastic needs memory that outlives a process (memfd_create), which only Linux has.")
        self._terms, self._folder, self._files = terms, folder, make_files(terms.num_ranks)
        self._processes: dict[int, _Started] = {}
        self._num_stuck = 0  # were ended as nothing could interrupt them; they are replaced besides what terms allow
        self._is_over = self._is_ending = False
        self._announced_s = self._looked_s = time.monotonic()
        self._entered = Generation(0, (), 0, "")  # the newest that all its members have come to
        self._generation = Generation(1, tuple(range(terms.num_ranks)), 0, "the start")

    # ---- processes ----

    def prepare(self, rank: int) -> tuple[Mapping[str, object], tuple[int, ...]]:
        """Do as :class:`Supervisor` says."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        each = self._processes[rank] = _Started(ours, theirs, self._folder / f"tmp-{rank}")
        each.folder.mkdir()
        told = {"link": theirs.fileno(), "folder": str(self._folder), "stuck_s": self._terms.stuck_s}
        return {VARIABLE: json.dumps(told), "TMPDIR": each.folder}, (theirs.fileno(),)

    def close(self) -> None:
        """Do as :class:`Supervisor` says."""
        for fd in self._files:
            os.close(fd)
        for each in self._processes.values():
            each.link.close()

    def started(self, rank: int, pid: int) -> None:
        """Do as :class:`Supervisor` says."""
        each = self._processes[rank]
        each.pid = pid
        each.theirs.close()
        each.send("generation", self._generation)

    def outlives(self, rank: int, code: int) -> bool:
        """Do as :class:`Supervisor` says."""
        each = self._processes[rank]
        if each.is_lost or each.raised:
            return not each.raised
        if code >= 0 or self._is_over:
            return False
        if self._has_raised:
            return True  # the run ends by the exception, not by this one
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return self._lose(rank, each.why_ended or f"was ended by {how}")

    def more(self) -> int:
        """Do as :class:`Supervisor` says: let processes that are ready join, and replace those that are lost."""
        members, terms = self._generation.members, self._terms
        if self._is_over or self._has_raised:
            if self._is_over and members:  # also for those that others were to let join
                self._announce((), False, "the run is over")
            return 0
        self._end_stuck()
        joining = self._ready[: terms.num_ranks - len(members)]
        # Before all have come to the newest generation, some would come to its successor instead.
        if joining and (not members or self._entered.number == self._generation.number):
            names = "process" if len(joining) == 1 else "processes"
            self._announce([*members, *joining], False, f"{names} {_listed(joining)} joined")
        return max(0, min(terms.num_ranks + terms.num_spares - self._num_alive, self._num_startable))

    def pause(self, is_ending: bool) -> None:
        """Do as :class:`Supervisor` says."""
        self._is_ending = is_ending
        links = {each.link.fileno(): number for number, each in self._processes.items() if not each.has_closed}
        for fd in select.select([*links], (), (), POLL_S)[0]:
            self._hear(links[fd])
        for number, each in self._processes.items():
            others = [self._processes[other] for other in self._generation.members if other != number]
            if self._generation.lost_in > each.asks_in:
                each.asks_in = 0  # it knows
            elif each.asks_in and (is_ending or self._has_raised or not any(other.is_leaving for other in others)):
                each.send("own", self._generation)
                each.asks_in = 0
            if each.has_closed and each.folder.exists() and not read_proc(f"{each.pid}/stat"):
                shutil.rmtree(each.folder, ignore_errors=True)
                if each.is_ready and number in self._generation.members and not (self._is_over or self._has_raised):
                    self._lose_or_end(number, each.why_ended or "has ended before the last step")

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
            case ["ready"]:
                each.is_ready, each.told_s = True, time.monotonic()
            case ["here", int(generation)]:
                each.here = generation
                members = [self._processes[other] for other in self._generation.members]
                if all(other.here == self._generation.number for other in members):
                    for earlier in range(self._entered.number, self._generation.number):
                        (self._folder / str(earlier)).unlink(missing_ok=True)  # all have left it
                    self._entered = self._generation
                    for other in members:
                        other.send("enter", self._generation)
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
    def _has_raised(self) -> bool:
        return any(each.raised for each in self._processes.values())

    @property
    def _num_alive(self) -> int:
        return sum(not each.is_lost for each in self._processes.values())

    @property
    def _ready(self) -> list[int]:
        """Spares that may become ranks."""
        return [
            number
            for number, each in self._processes.items()
            if each.is_ready and not (each.is_lost or each.has_closed or number in self._generation.members)
        ]

    @property
    def _num_startable(self) -> int:
        terms = self._terms
        return terms.num_ranks + terms.num_spares + terms.num_new + self._num_stuck - len(self._processes)

    def _lose_or_end(self, number: int, how: str) -> None:
        if not (self._is_ending or self._processes[number].is_lost or self._lose(number, how)):
            raise RankError("too few ranks are left: all have been stopped")

    def _lose(self, number: int, how: str) -> bool:
        """Let the others go on without a process; return False if too few are left."""
        self._processes[number].is_lost = True
        members, ranks = self._generation.members, self._entered.members
        rank = f" (rank {ranks.index(number)} of {len(ranks)})" if number in ranks else ""
        cause, num_left = f"process {number}{rank} {how}", self._num_alive + self._num_startable
        if num_left < self._terms.min_ranks and number in members:
            are = "1 rank is" if num_left == 1 else f"{num_left} ranks are"
            print(f"shardwise: {cause}; {are} left, --min-nproc is {self._terms.min_ranks}", file=sys.stderr)
            return False
        if number in members:
            left = [each for each in members if each != number]
            self._announce([*left, *self._ready[: self._terms.num_ranks - len(left)]], True, cause)
        return True

    def _announce(self, members: Iterable[int], is_loss: bool, cause: str) -> None:
        before = self._generation
        if self._entered.number < before.number > 1:  # no rank has said why that one began
            cause = f"{before.cause}, {cause}"
        number = before.number + 1
        self._generation = Generation(number, tuple(sorted(members)), number if is_loss else before.lost_in, cause)
        self._announced_s = time.monotonic()
        for each in self._processes.values():
            if not each.is_lost:
                each.send("generation", self._generation)

    # ---- ranks that hang ----

    def _end_stuck(self) -> None:
        """End ranks that others wait for in vain.  Raises: RankError if all ranks wait for each other."""
        now, limit_s, generation = time.monotonic(), self._terms.stuck_s, self._generation
        if not limit_s or now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        found, late, silent = dict[int, RankStatus](), set[int](), set[int]()
        for rank, number in enumerate(generation.members):
            each = self._processes[number]
            told_s = now - each.told_s
            if not each.is_ready and told_s <= _START_S:
                return
            if generation.lost_in == generation.number > each.here:
                late.add(number)
            if told_s > limit_s:
                silent.add(number)
            waits_for = "" if number in late | silent else each.status.waits_for
            found[number] = replace(each.status, rank=rank, still_s=each.status.still_s + told_s, waits_for=waits_for)
        if min([now - self._announced_s, *(each.still_s for each in found.values())]) <= limit_s:
            return
        idle = {number: each for number, each in found.items() if not each.waits_for}
        # One that waits inside of C++, as in DDP's backward, does not say so, but has begun more than the awaited one.
        behind = {number for number, each in idle.items() if not _is_ahead(each, idle.values())}
        ended = late or silent or behind or set(idle)
        if not ended and len(found) > 1:
            where = statuses_in_words([*found.values()])
            raise RankError(
                f"no rank made progress for {limit_s:g} s (--hang-after), and all wait: {where}. Does step() catch an "
                "exception of one rank, or do ranks make other calls?"
            )
        for number in ended if late or len(ended) < len(found) else ():  # else none waits
            each = self._processes[number]
            if not each.why_ended:
                self._num_stuck += number in late
                place = ", in ".join(filter(None, (each.status.line, each.status.call)))
                why = f"made no progress for {limit_s:g} s {'after a loss' if late else 'while others waited'}, and was ended"
                each.why_ended = f"{why} (last seen at {place})" if place else why
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

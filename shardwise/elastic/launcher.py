"""The launcher's side of an elastic run: it alone decides which processes are the ranks.

It sees at once that a process has ended, and none of its processes is special.  Each process has a socket of its own to the
launcher, which it has inherited and no other process can open; what ranks of a generation tell each other is in files of a
folder that only this user can open.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwise.consistency.recorder import RankStatus, statuses_in_words
from shardwise.elastic.keeper import make_files
from shardwise.elastic.membership import BEFORE_ALL, MOST_BYTES, VARIABLE, Announcement, Generation
from shardwise.errors import ConfigError, RankError
from shardwise.formatting import format_ranks
from shardwise.loop.launch import POLL_S
from shardwise.one_host import read_proc

STUCK_S = 60.0  # the default of --hang-after
_START_S = 600.0  # instead of it before a process has called elastic(): it may import, and read data, for long
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
    here: int = 0  # what it has said: see Process
    suspects: int = 0
    end: str = ""
    status: RankStatus = field(default_factory=lambda: RankStatus(0))
    said_s: float = field(default_factory=time.monotonic)  # when
    settled: int = 0  # see Announcement
    told: Announcement | None = None
    has_closed: bool = False
    is_lost: bool = False
    why_ended: str = ""  # why it is being ended

    def tell(self, announcement: Announcement) -> None:
        """Tell the process, if it does not know; one that is stopped may take nothing more, and is told later."""
        if announcement != self.told and not self.has_closed:
            with suppress(OSError):
                self.link.send(pickle.dumps(announcement))
                self.told = announcement

    def hear(self) -> None:
        """Read what the process says.  Raises: ValueError, TypeError for a malformed message."""
        text = b""
        with suppress(ConnectionError):
            text = self.link.recv(MOST_BYTES)
        if not text:
            self.has_closed = True
            self.link.close()
            return
        here, suspects, end, status = json.loads(text)
        self.status = RankStatus(**status)
        self.here, self.suspects, self.end = int(here), int(suspects), str(end)
        self.is_ready, self.said_s = True, time.monotonic()

    @property
    def may_join(self) -> bool:
        """Whether it waits in elastic(), or is a rank."""
        return self.is_ready and not (self.is_lost or self.has_closed)

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
        self._is_ending = False
        self._entered, self._left = BEFORE_ALL, 0  # the generation that ranks are in, and the number of the one before
        self._newest = Generation(1, tuple(range(terms.num_ranks)), 0, "the start", begin_s=time.monotonic())

    # ---- processes ----

    def prepare(self, rank: int) -> tuple[Mapping[str, object], tuple[int, ...]]:
        """Do as :class:`Supervisor` says."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        each = self._processes[rank] = _Started(ours, theirs, self._folder / f"tmp-{rank}")
        each.folder.mkdir()
        fds = (theirs.fileno(), *self._files)
        told = {"fds": fds, "folder": str(self._folder), "stuck_s": self._terms.stuck_s}
        return {VARIABLE: json.dumps(told), "TMPDIR": each.folder}, fds

    def close(self) -> None:
        """Do as :class:`Supervisor` says."""
        for fd in self._files:
            os.close(fd)
        for each in self._processes.values():
            each.link.close()

    def started(self, rank: int, pid: int) -> None:
        """Do as :class:`Supervisor` says."""
        self._processes[rank].pid = pid
        self._processes[rank].theirs.close()

    def outlives(self, rank: int, code: int) -> bool:
        """Do as :class:`Supervisor` says."""
        each = self._processes[rank]
        if each.end == "raised" or (not each.is_lost and (code >= 0 or self._has_ended("over"))):
            return False
        if each.is_lost or self._has_ended("raised"):
            return True  # in the second case the run ends by the exception, not by this one
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return self._lose(rank, each.why_ended or f"was ended by {how}")

    def more(self) -> int:
        """Do as :class:`Supervisor` says: let processes that are ready join, and replace those that are lost."""
        members, terms = self._newest.members, self._terms
        if self._has_ended("over", "raised"):
            if self._has_ended("over") and members:  # also for those that others were to let join
                self._announce((), False, "the run is over")
            return 0
        self._end_stuck()
        joining = self._ready[: terms.num_ranks - len(members)]
        # Before all have come to the newest generation, some would come to its successor instead.
        if joining and (not members or self._entered is self._newest):
            self._announce([*members, *joining], False, f"{format_ranks(joining, 'process', 'processes')} joined")
        return max(0, min(terms.num_ranks + terms.num_spares - self._num_alive, self._num_startable))

    def pause(self, is_ending: bool) -> None:
        """Do as :class:`Supervisor` says."""
        self._is_ending = is_ending
        self._tell()
        links = {each.link.fileno(): number for number, each in self._processes.items() if not each.has_closed}
        for fd in select.select([*links], (), (), POLL_S)[0]:
            try:
                self._processes[links[fd]].hear()
            except (ValueError, TypeError) as error:
                what = f"{type(error).__name__}: {error}"
                print(f"shardwise: ignored a malformed message of process {links[fd]} ({what})", file=sys.stderr)
        members = [self._processes[number] for number in self._newest.members]
        has_come = [each.here == self._newest.number for each in members]
        if self._entered is not self._newest and has_come and all(has_come):
            (self._folder / str(self._left)).unlink(missing_ok=True)  # a thread of a rank may still ask the next one
            self._left, self._entered = self._entered.number, self._newest
        for each in [each for each in self._processes.values() if each.suspects > each.settled]:
            leaving = [other for other in members if other is not each and other.is_leaving]
            if is_ending or self._has_ended("raised") or not leaving:
                each.settled = each.suspects
        for number, each in self._processes.items():
            if each.end == "left":
                self._lose_or_end(number, "was ended by KeyboardInterrupt")
            if each.has_closed and each.folder.exists() and not read_proc(f"{each.pid}/stat"):
                shutil.rmtree(each.folder, ignore_errors=True)
                if each.is_ready:
                    self._lose_or_end(number, each.why_ended or "has ended before the last step")

    def _tell(self) -> None:
        for each in self._processes.values():
            each.tell(Announcement(self._newest, self._entered, each.settled))

    # ---- generations ----

    def _has_ended(self, *how: str) -> bool:
        return any(each.end in how for each in self._processes.values())

    @property
    def _num_alive(self) -> int:
        return sum(not each.is_lost for each in self._processes.values())

    @property
    def _ready(self) -> list[int]:
        """Spares that may become ranks."""
        members = self._newest.members
        return [number for number, each in self._processes.items() if each.may_join and number not in members]

    @property
    def _num_startable(self) -> int:
        terms = self._terms
        return terms.num_ranks + terms.num_spares + terms.num_new + self._num_stuck - len(self._processes)

    def _lose_or_end(self, number: int, how: str) -> None:
        is_late = self._is_ending or self._has_ended("over", "raised")
        if not (is_late or self._processes[number].is_lost or self._lose(number, how)):
            raise RankError("too few ranks are left: all have been stopped")

    def _lose(self, number: int, how: str) -> bool:
        """Let the others go on without a process; return False if too few are left."""
        self._processes[number].is_lost = True
        members, ranks = self._newest.members, self._entered.members
        rank = f" (rank {ranks.index(number)} of {len(ranks)})" if number in ranks else ""
        cause, num_left = f"process {number}{rank} {how}", self._num_alive + self._num_startable
        if number not in members:
            return True
        if num_left < self._terms.min_ranks:
            are = "1 rank is" if num_left == 1 else f"{num_left} ranks are"
            print(f"shardwise: {cause}; {are} left, --min-nproc is {self._terms.min_ranks}", file=sys.stderr)
            return False
        left = [each for each in members if each != number]
        self._announce([*left, *self._ready[: self._terms.num_ranks - len(left)]], True, cause)
        return True

    def _announce(self, members: Iterable[int], is_loss: bool, cause: str) -> None:
        before = self._newest
        if self._entered is not before and before.number > 1:  # no rank has said why that one began
            cause = f"{before.cause}, {cause}"
        number = before.number + 1
        lost_in = number if is_loss else before.lost_in
        self._newest = Generation(number, tuple(sorted(members)), lost_in, cause, begin_s=time.monotonic())
        self._tell()
        if is_loss:  # a link to itself, which nothing can open: all calls of the store raise, also those that wait
            store = self._folder / str(self._entered.number)
            link = store.with_suffix(".lost")
            link.symlink_to(store.name)
            link.replace(store)

    # ---- ranks that hang ----

    def _end_stuck(self) -> None:
        """End ranks that others wait for in vain.  Raises: RankError if all ranks wait for each other."""
        now, limit_s, newest = time.monotonic(), self._terms.stuck_s, self._newest
        members = {number: self._processes[number] for number in newest.members}
        found: dict[int, RankStatus] = {}
        for rank, (number, each) in enumerate(members.items()):
            silent_s = now - each.said_s
            if not each.is_ready and silent_s <= _START_S:
                return
            found[number] = replace(each.status, rank=rank, still_s=each.status.still_s + silent_s)
        if not limit_s or min([now - newest.begin_s, *(each.still_s for each in found.values())]) <= limit_s:
            return
        late = {number for number, each in members.items() if newest.lost_in == newest.number > each.here}
        silent = {number for number, each in members.items() if now - each.said_s > limit_s}
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
    begun = status.collectives.items()
    return any(number > other.collectives.get(group, number) for other in others for group, number in begun)

"""A rank's side of an elastic run on one host: it follows its launcher, over a socket that it has inherited.

A thread reads what the launcher announces, and interrupts what the rank does if a rank of its generation is lost.  It also
tells the launcher where the program is, which by that sees a rank that hangs.  A message has all that its sender knows: only
the last one of each side counts.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from shardwise import torch_private
from shardwise.consistency import store as waits
from shardwise.consistency.failure_report import ProgramStatus
from shardwise.consistency.process_groups import abort_all_connections, check_peers, collectives_begun
from shardwise.consistency.recorder import RankStatus
from shardwise.elastic.membership import CONNECT_S, MOST_BYTES, Announcement, Generation, RanksChanged, backend
from shardwise.errors import StateError
from shardwise.observe import ERROR, entries

_AGAIN_S, _STATUS_S = 0.1, 1.0  # between two attempts to interrupt the main thread; between two reports of where it is
_END_S = 5.0  # for the end of a thread: one that wakes up in C++ while Python ends aborts the process
_POLLS_S = 2e-4, 5e-3  # first and longest pause between two looks for a message


class Process:
    """This process, which is a rank of some generations.

    Attributes:
        fds: descriptors of the memory files for the state.
        timeout_s: of process groups, once build() has returned.

    Args:
        number: of the process.
        told: by the launcher: the descriptors of its link and of the files, the folder of the run, and after how many seconds
            a rank that hangs is ended.
    """

    def __init__(self, number: int, told: Mapping[str, Any]) -> None:
        self.number, (link, *self.fds), self._folder = number, told["fds"], told["folder"]
        for fd in told["fds"]:  # else they would outlive this process in one that it starts
            os.set_inheritable(fd, False)
        # Hangs are left to the launcher, and what waits for a message that was cut does not last.
        self.timeout_s = min(default_pg_timeout.total_seconds(), 2 * told["stuck_s"] or float("inf"))
        self._link = socket.socket(fileno=link)
        os.register_at_fork(after_in_child=self._link.close)
        self.generation: Generation | None = None  # that it takes part in
        self._heard = Announcement()
        self._left = 0  # the number of the last generation that it was a rank of
        self._leaving = threading.Lock()  # what makes a generation fail must not reach the next one
        # A store that ends looks for its file, and an error there ends the process: let the file have gone by then.
        self._stores: deque[object] = deque(maxlen=4)
        self._ends: list[threading.Thread] = []  # of groups that were left
        self._is_over = False
        self._program, self._progress, self._progress_s = ProgramStatus(number), (0.0, 0), time.monotonic()
        self._said: dict[str, object] = {"here": 0, "suspects": 0, "end": "", "status": asdict(RankStatus(number))}
        self._saying = threading.Lock()
        self._say()
        self._watcher = threading.Thread(target=self._watch, name="shardwise-elastic", daemon=True)
        self._watcher.start()

    def _say(self, **changes: object) -> None:
        """Tell the launcher ``here``, ``suspects``, ``end`` and ``status``.

        ``here``: the generation that this process has come to.  ``suspects``: that in which it has an error that may come of a
        lost rank.  ``end``: "over", "raised" or "left".
        """
        with self._saying, suppress(OSError):  # the launcher is gone: the kernel ends this process
            self._said |= changes
            self._link.send(json.dumps([*self._said.values()]).encode())

    # ---- the thread that follows the launcher ----

    def _watch(self) -> None:
        status_s = time.monotonic()
        while not self._is_over:
            pause_s = _AGAIN_S if self.is_superseded() else _STATUS_S
            if select.select([self._link], (), (), pause_s)[0]:
                text = self._link.recv(MOST_BYTES)
                if not text:
                    return
                self._heard = pickle.loads(text)
            self._interrupt()
            if (passed_s := time.monotonic() - status_s) > _STATUS_S:
                status_s += passed_s
                self._progress_s += max(0.0, passed_s - 5 * _STATUS_S)  # this process was stopped with its launcher
                with suppress(RuntimeError):  # a model or a group is being made
                    self._report()

    def _interrupt(self) -> None:
        """Make the main thread raise where it waits for other ranks, until it has left a generation that has lost one.

        Nothing ends a wait in C++ for a gloo message that was cut in its middle: in torch's DDP, ``dist.all_reduce``, or the
        end of a group, which waits for threads that do.  The launcher ends such a process.
        """
        with self._leaving, suppress(RuntimeError):  # the main thread makes a group meanwhile
            if self.is_superseded() and dist.is_initialized():
                abort_all_connections(range(dist.get_world_size()))
                torch_private.abort_groups()

    def _report(self) -> None:
        status = self._program.look()
        own = self._program.thread
        event_s = next((each[0] for each in reversed(entries()) if each[1] == own and each[4] != ERROR), 0.0)
        begun = collectives_begun() if dist.is_initialized() else {}
        if (progress := (event_s, sum(begun.values()))) != self._progress:
            self._progress, self._progress_s = progress, time.monotonic()
        waits_for = status.waits_for if self.generation is not None else "the launcher"
        still_s = time.monotonic() - self._progress_s
        self._say(status=asdict(replace(status, waits_for=waits_for, still_s=still_s, collectives=begun)))

    # ---- the main thread ----

    @property
    def newest(self) -> Generation:
        """The newest generation that is announced."""
        return self._heard.newest

    def is_superseded(self) -> bool:
        """Return True if a rank of the generation of this process is lost."""
        own = self.generation
        return own is not None and self.newest.lost_in > own.number

    def _refuse_superseded(self) -> None:
        if self.is_superseded():
            raise RanksChanged(f"elastic: {self.newest.cause}")

    def join(self, num_used: Callable[[int], int]) -> Generation:
        """Wait for a generation that this process is a rank of, and make its default process group.

        ``num_used``: returns how many of so many members take part; the others wait.
        Raises: RuntimeError if a rank is lost meanwhile.  StateError after the end.  SystemExit in a spare after the end.
        """
        while True:
            heard = self._heard  # one look at all of it: none is taken for the newest before it was entered
            newest, entered = heard.newest, heard.entered
            used = entered.members[: num_used(len(entered.members))]
            if self.number in used and self._left < entered.number and newest.lost_in <= entered.number:
                break
            if newest.number and not newest.members and newest.lost_in < newest.number:
                self._close()
                if self.number in used:
                    raise StateError(f"elastic: {newest.cause}, after the last step: other ranks have ended")
                raise SystemExit(0)
            if self.number in newest.members:
                self._say(here=newest.number)  # nothing of an earlier one is being written by it, also if it waits now
            waits.wait_until(lambda heard=heard: self._heard is not heard, pauses_s=_POLLS_S)
        self.generation, self._left = entered, entered.number
        waits.listen(self._refuse_superseded)
        store = dist.FileStore(f"{self._folder}/{entered.number}", -1)  # of a folder that no other user can open
        self._stores.append(store)
        # Nothing interrupts gloo while it connects, to a rank that was killed after it had come: then this is how long.
        rank, size, limit = used.index(self.number), len(used), timedelta(seconds=CONNECT_S)
        excepthook = sys.excepthook
        dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=limit)
        sys.excepthook = excepthook  # torch's adds a prefix with the rank, for each generation one
        check_peers()
        return entered

    def leave(self) -> None:
        """Leave the generation: nothing of its groups stays.

        The end of a group waits for its threads, and of one that has lost a rank they may wait for a message that was cut until
        its timeout: so groups end on a thread of their own.
        """
        with self._leaving:
            ended: list[object] = [*torch_private.all_groups()]
            self.generation = None
        waits.leave()
        if not dist.is_initialized():  # an interrupted start leaves names of groups behind, which a destruction resets
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        torch_private.abort_groups()
        dist.destroy_process_group()
        self._ends = [each for each in self._ends if each.is_alive()]
        self._ends.append(threading.Thread(target=ended.clear, daemon=True))
        self._ends[-1].start()

    def outlives(self, error: BaseException) -> bool:
        """Return True if ``error`` was raised because a rank is lost: this process is to leave and join.

        The launcher knows.  Else the error ends this process: others outlive an interrupt of it as they do a kill.
        """
        own = self.generation
        if isinstance(error, RuntimeError | OSError) and own is not None and not self.is_superseded():
            self._say(suspects=own.number)
            waits.wait_until(lambda: self.is_superseded() or self._heard.settled >= own.number, pauses_s=_POLLS_S)
        if isinstance(error, Exception) and self.is_superseded():
            return True
        if not self._is_over:  # else a spare leaves
            self._say(end="left" if isinstance(error, KeyboardInterrupt) else "raised")
            self._close()
        return False

    def finish(self) -> None:
        """Note that the run is over: from here on a lost rank ends it."""
        self._say(end="over")
        self._close()

    def _close(self) -> None:
        with self._leaving:
            self.generation, self._is_over = None, True
        waits.leave()
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RD)
        for each in (self._watcher, *self._ends):
            each.join(_END_S)

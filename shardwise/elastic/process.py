"""A rank's side of an elastic run on one host: it follows its launcher, over a socket that it has inherited.

A thread reads what the launcher announces, and interrupts what the rank does if a rank of its generation is lost.  It also
tells the launcher where the program is, which by that sees a rank that hangs.
"""

from __future__ import annotations

import json
import os
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
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from shardwise import torch_private
from shardwise.consistency import store as waits
from shardwise.consistency.failure_report import ProgramStatus
from shardwise.consistency.process_groups import abort_all_connections, check_peers, collectives_begun
from shardwise.elastic.keeper import open_files
from shardwise.elastic.membership import CONNECT_S, Generation, RanksChanged, backend
from shardwise.errors import StateError
from shardwise.observe import ERROR, entries

_AGAIN_S, _STATUS_S = 0.1, 1.0  # between two attempts to interrupt the main thread; between two reports of where it is
_END_S = 5.0  # for the end of a thread: one that wakes up in C++ while Python ends aborts the process
_POLLS_S = 2e-4, 5e-3  # first and longest pause between two looks for a key, or for a message
MOST_BYTES = 1 << 18  # of a message


class _GenerationStore(dist.Store):
    """The store of one generation: every call raises once a rank of it is lost, also one that waits."""

    def __init__(self, inner: dist.Store, process: Process, number: int) -> None:
        super().__init__()
        self._inner, self._process, self._number = inner, process, number

    def _ask(self) -> Any:
        self._process.refuse(self._number)
        return self._inner

    def set(self, key: str, value: str) -> None:
        self._ask().set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask().get(key)

    def add(self, key: str, value: int) -> int:
        return self._ask().add(key, value)

    def append(self, key: str, value: str) -> None:
        self._ask().append(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._ask().check(keys)

    def deleteKey(self, key: str) -> bool:  # C++ calls delete_key by this name
        return self._ask().delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        if not waits.wait_until(lambda: self.check(keys), timeout.total_seconds(), pauses_s=_POLLS_S):
            raise dist.DistStoreError(f"wait timeout after {timeout.total_seconds():g} s, keys: {', '.join(keys)}")


class Process:
    """This process, which is a rank of some generations.

    Attributes:
        fds: descriptors of the memory files for the state.
        timeout_s: of process groups, once build() has returned.

    Args:
        number: of the process.
        told: by the launcher: the descriptor of its link, the folder of the run, and after how many seconds a rank that hangs
            is ended.
    """

    def __init__(self, number: int, told: Mapping[str, Any]) -> None:
        self.number, self.fds, self._folder = number, open_files(os.getppid()), told["folder"]
        # Hangs are left to the launcher, and what waits for a message that was cut does not last.
        self.timeout_s = min(default_pg_timeout.total_seconds(), 2 * told["stuck_s"] or float("inf"))
        self._link = socket.socket(fileno=told["link"])
        os.set_inheritable(told["link"], False)
        os.register_at_fork(after_in_child=self._link.close)  # else it would outlive this process in a DataLoader's
        self.generation: Generation | None = None  # that it takes part in
        # The newest generation that the launcher has announced, and the newest that all members have come to: one look at
        # both, so that none is taken for the newest before it was entered.
        self._heard = (Generation(0, (), 0, ""), Generation(0, (), 0, ""))
        self._left = 0  # the number of the last generation that it was a rank of
        self._own_in = 0  # the newest generation in which the launcher knows of no lost rank
        self._leaving = threading.Lock()  # what makes a generation fail must not reach the next one
        # C++ does not keep the Python part of a store, and a thread that posts may hold that of the last generation.
        self._stores: deque[object] = deque(maxlen=4)
        self._ends: list[threading.Thread] = []  # of groups that were left
        self._is_over = False
        self._program, self._progress, self._progress_s = ProgramStatus(number), (0.0, 0), time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="shardwise-elastic", daemon=True)
        self._watcher.start()
        self._send("ready")

    def _send(self, *words: object) -> None:
        with suppress(OSError):  # the launcher is gone: the kernel ends this process
            self._link.send(json.dumps(words).encode())

    # ---- the thread that follows the launcher ----

    def _watch(self) -> None:
        status_s = time.monotonic()
        while not self._is_over:
            pause_s = _AGAIN_S if self.is_superseded() else _STATUS_S
            if select.select([self._link], (), (), pause_s)[0]:
                text = self._link.recv(MOST_BYTES)
                if not text:
                    return
                self._hear(*json.loads(text))
            self._interrupt()
            if (passed_s := time.monotonic() - status_s) > _STATUS_S:
                status_s += passed_s
                self._progress_s += max(0.0, passed_s - 5 * _STATUS_S)  # this process was stopped with its launcher
                with suppress(RuntimeError):  # a model or a group is being made
                    self._report()

    def _hear(self, what: str, fields: dict[str, Any]) -> None:
        fields |= {"members": tuple(fields["members"]), "seen_s": time.monotonic()}
        found = Generation(**fields)
        if what == "generation":
            self._heard = found, self._heard[1]
        elif what == "enter":  # the one that was announced last
            self._heard = self.newest, self.newest
        else:
            self._own_in = found.number

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
        self._send("status", asdict(replace(status, waits_for=waits_for, still_s=still_s, collectives=begun)))

    # ---- the main thread ----

    @property
    def newest(self) -> Generation:
        """The newest generation that is announced."""
        return self._heard[0]

    def is_superseded(self) -> bool:
        """Return True if a rank of the generation of this process is lost."""
        own = self.generation
        return own is not None and self.newest.lost_in > own.number

    def refuse(self, number: int) -> None:
        """Raise if a rank of generation ``number`` is lost.  Raises: RanksChanged."""
        if self.newest.lost_in > number:
            raise RanksChanged(f"elastic: {self.newest.cause}")

    def join(self, num_used: Callable[[int], int]) -> Generation:
        """Wait for a generation that this process is a rank of, and make its default process group.

        ``num_used``: returns how many of so many members take part; the others wait.
        Raises: RanksChanged if a rank is lost meanwhile.  StateError after the end.  SystemExit in a spare after the end.
        """
        is_spare, told = not self._left, 0
        while True:
            newest, entered = heard = self._heard
            used = entered.members[: num_used(len(entered.members))]
            if self.number in used and self._left < entered.number and newest.lost_in <= entered.number:
                break
            is_spare = is_spare or (self._left < entered.number and self.number not in used)
            if newest.number and not newest.members and newest.lost_in < newest.number:
                self._close()
                if not is_spare:
                    raise StateError(f"elastic: {newest.cause}, after the last step: other ranks have ended")
                raise SystemExit(0)
            if self.number in newest.members and told != newest.number:
                told = newest.number  # nothing of an earlier one is being written by it, also if it waits now
                self._send("here", told)
            waits.wait_until(lambda heard=heard: self._heard is not heard, pauses_s=_POLLS_S)
        self.generation, self._left = entered, entered.number
        waits.listen(lambda: self.refuse(entered.number))
        inner = dist.FileStore(f"{self._folder}/{entered.number}", -1)  # of a folder that no other user can open
        self._stores.append(_GenerationStore(inner, self, entered.number))
        # Nothing interrupts gloo while it connects, to a rank that was killed after it had come: then this is how long.
        rank, size, limit = used.index(self.number), len(used), timedelta(seconds=CONNECT_S)
        store = cast(dist.Store, self._stores[-1])
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

    def is_lost(self, error: BaseException) -> bool:
        """Return True if ``error`` was raised because a rank is lost, and this process stays: it is to leave and join.

        The launcher knows.
        """
        own = self.generation
        if not isinstance(error, Exception) or own is None:
            return False
        if isinstance(error, RuntimeError | OSError) and not self.is_superseded():
            self._send("suspects", own.number)
            waits.wait_until(lambda: self.is_superseded() or self._own_in >= own.number, pauses_s=_POLLS_S)
        return self.is_superseded()

    def raised(self, error: BaseException) -> None:
        """Note that ``error`` ends this process; an interrupt of this process alone is outlived as a kill is."""
        if self._is_over:  # a spare that leaves
            return
        is_interrupt = isinstance(error, KeyboardInterrupt)
        self._send("left" if is_interrupt else "raised", type(error).__name__)
        self._close()

    def finish(self) -> None:
        """Note that the run is over: from here on a lost rank ends it."""
        self._send("over")
        self._close()

    def _close(self) -> None:
        with self._leaving:
            self.generation, self._is_over = None, True
        waits.leave()
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RD)
        for each in (self._watcher, *self._ends):
            each.join(_END_S)

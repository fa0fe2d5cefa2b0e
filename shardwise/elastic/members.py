"""Which processes are the ranks of a run, from one generation of its groups to the next.

One launcher decides it alone: it sees at once that a process has ended, and it has the store, so that any rank can be lost.
Those of other hosts report to it, and start processes when it says so.
A generation is one key of that store, which is never written again.  A thread of each rank waits for the next one and
interrupts what the rank does if a rank of its generation is lost.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from shardwise import torch_private
from shardwise.consistency import store as waits
from shardwise.consistency.process_groups import abort_all_connections
from shardwise.errors import ConfigError, RankError, StateError, TransportError
from shardwise.loop.launch import GRACE_S, POLL_S, FailedRank, LaunchContext, describe, open_store
from shardwise.one_host import read_proc

VARIABLE = "SHARDWISE_ELASTIC"  # of a rank's environment: the store's address, the terms, the descriptors of the memory
_NUM_SETS = 2
_OVER, _READY, _FORMED, _STUCK = "elastic/over", "elastic/ready/{}", "elastic/formed/{}", "elastic/stuck/{}"
_GENERATION = "elastic/generation/{}"
_TERMS, _CAME, _REPORT, _ORDER = "elastic/terms", "elastic/came/{}", "elastic/report/{}", "elastic/order/{}"
_SILENT_S, _COME_S = 8.0, 600.0  # a host is lost that has not reported for so long, or has not come
_AGAIN_S = 0.1  # between two attempts to interrupt the main thread
_STUCK_S, _STUCK_USE = 15.0, 0.05  # a rank that has used less than this part of its time for so long will not leave
_CONNECT_S, _BUILD_S = 10.0, 60.0  # for ranks that have come to connect; for groups that build() makes
_END_S = 5.0  # for the end of the watching thread: one that wakes up in C++ while Python ends aborts the process
_POLLS_S = 2e-4, 5e-3  # first and longest pause between two looks for a key


@dataclass(frozen=True, slots=True)
class Generation:
    """The processes that are ranks from here on.

    Attributes:
        number: counts from 1.  members: their numbers, in the order of ranks.
        is_urgent: a member of the generation before is lost; else it ends after a step.
        cause: in words.  seen_s: when this process learnt of it, by the host's monotonic clock.
    """

    number: int
    members: tuple[int, ...]
    is_urgent: bool
    cause: str
    seen_s: float = 0.0


# ---- The launcher's side.


@dataclass(frozen=True, slots=True)
class ElasticTerms:
    """How many processes a run may have, on all hosts together.

    Attributes:
        num_ranks: at the start, and the most later on.  num_spares: that wait to take the place of a lost rank.
        num_new: to start in place of lost processes, until the run ends.  min_ranks: the run ends with fewer.
        num_hosts: each has as many of the ranks at the start.
    """

    num_ranks: int
    num_spares: int = 0
    num_new: int = 0
    min_ranks: int = 1
    num_hosts: int = 1

    @property
    def num_each(self) -> int:
        """Ranks of a host at the start."""
        return self.num_ranks // self.num_hosts

    def host_of(self, process: int) -> int:
        """Return the host of a process: they are numbered in turn."""
        return process % self.num_hosts


def meet(endpoint: tuple[str, int], host: int, received: Sequence[int]) -> dist.TCPStore:
    """Return the store of a run of several hosts, of which the first one has it.

    Raises: ConfigError if that host does not come within ten minutes.  KeyboardInterrupt after a signal.
    """
    if not host:
        return open_store(*endpoint)

    def is_listening() -> bool:
        with suppress(OSError), socket.create_connection(endpoint, 2.0):
            return True
        return bool(received)

    if not waits.wait_until(is_listening, _COME_S, pauses_s=(POLL_S, 1.0)):
        raise ConfigError(f"--rdzv-endpoint: nothing listens at {endpoint}, expected --node-rank 0; start it there")
    if received:
        raise KeyboardInterrupt
    return dist.TCPStore(*endpoint, None, False)


def outliving(
    terms: ElasticTerms, host: int, address: str, store: dist.TCPStore, place: LaunchContext
) -> LaunchContext:
    """Return ``place`` for ranks that outlive each other: with the memory for their state, and who decides.

    ``address``: of the store.  Raises: ConfigError where the system has no memory files, or if hosts do not fit.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("--elastic needs memory that outlives a process (memfd_create), which only Linux has.")
    fds = [[os.memfd_create("shardwise-elastic", 0) for _ in range(terms.num_ranks)] for _ in range(_NUM_SETS)]
    told = {"address": address, "port": store.port, "terms": asdict(terms), "fds": fds}
    shared = tuple(fd for each in fds for fd in each)
    env = {"MASTER_ADDR": address, "GROUP_RANK": host, "WORLD_SIZE": terms.num_ranks, VARIABLE: json.dumps(told)}
    decides = _OtherLauncher(store, terms, host) if host else Membership(store, terms)
    place = replace(
        place, told={**place.told, **env}, shared=shared, number=lambda index: index * terms.num_hosts + host
    )
    return replace(place, outlives=decides.outlives, more=decides.more)


class _OtherLauncher:
    """The launcher of another host than the first one: it reports to that one and does what that one says."""

    def __init__(self, store: dist.TCPStore, terms: ElasticTerms, host: int) -> None:
        self._store, self._host = waits.JobStore(store, _SILENT_S), host
        first = json.loads(store.get(_TERMS))
        if odd := [f"{name} {mine} and {first[name]}" for name, mine in asdict(terms).items() if mine != first[name]]:
            raise ConfigError(f"--node-rank {host} and the first host have {odd}: start all with the same options")
        if self._store.add(_CAME.format(host), 1) > 1:
            raise ConfigError(
                f"--node-rank {host} has come before: give each host its own. A lost one cannot come back"
            )
        self._ended: dict[int, int] = {}
        self._started = self._ordered = terms.num_each
        self._end: str | None = None

    def outlives(self, process: int, code: int) -> bool:
        """Return True unless ``code`` ends the run; the first host's launcher decides whether a signal does."""
        if process not in self._ended:
            self._ended[process] = code
            if code >= 0:
                self._report(False, True)
        return code < 0

    def more(self, is_running: bool) -> int | None:
        """Return how many processes are to be started; None: none, and the run is not over.

        Raises: TransportError if the first host is lost.  RankError if the run has ended on another one.
        """
        num_more, self._started = self._ordered - self._started, self._ordered
        is_running = is_running or num_more > 0
        has_left = self._end is not None and not is_running
        self._report(is_running, has_left)
        if self._end:
            raise RankError(self._end)
        return num_more or (0 if has_left else None)

    def _report(self, is_running: bool, has_left: bool) -> None:
        try:
            report = json.dumps([time.monotonic(), self._started, is_running, has_left, self._ended])
            self._store.set(_REPORT.format(self._host), report)
            if not has_left:  # else the first host may have ended by now
                self._ordered, self._end = json.loads(cast(str, self._store.peek(_ORDER.format(self._host))))
        except TransportError as error:
            raise TransportError(
                f"the launcher of the first host, which has the run's store, is lost ({error}); the ranks of this host have "
                "been stopped. Start all hosts again: elastic(folder=...) goes on from the newest checkpoint"
            ) from None


class Membership:
    """Decides on generations; ``store``: that of the launcher."""

    def __init__(self, store: dist.Store, terms: ElasticTerms) -> None:
        self._store, self._terms = store, terms
        self._waiting: list[int] = []  # spares, ready or not
        self._lost: set[int] = set()
        self._started = [terms.num_each] * terms.num_hosts
        self._num_stuck = 0  # ended themselves, and are replaced besides what the terms allow
        self._end: str | None = None  # why the run ends; "": it is over
        self._others = dict.fromkeys(range(1, terms.num_hosts), (0, time.monotonic()))  # their last report
        for host in self._others:
            store.set(_REPORT.format(host), json.dumps([0, 0, True, False, {}]))
        self._order()
        store.set(_TERMS, json.dumps(asdict(terms)))
        self._generation = Generation(0, (), False, "")
        self._announce(range(terms.num_ranks), False, "the start")

    @property
    def _num_startable(self) -> int:
        terms = self._terms
        return terms.num_ranks + terms.num_spares + terms.num_new + self._num_stuck - sum(self._started)

    def outlives(self, process: int, code: int) -> bool:
        """Return True if the others go on without a process that has ended with ``code``; they are told."""
        if process in self._lost:
            return True
        if code >= 0 or self._end or self._is_over():
            return self._fail(f"{describe(FailedRank(process, code))}; all ranks have been stopped")
        self._num_stuck += self._store.check([_STUCK.format(process)])
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return self._lose([process], f"process {process} was ended by {how}")

    def _lose(self, processes: Iterable[int], cause: str) -> bool:
        lost = {*self._lost, *processes}
        left = [each for each in self._generation.members if each not in lost]
        waiting = [each for each in self._waiting if each not in lost]
        num_left = len(left) + len(waiting) + self._num_startable
        if num_left < self._terms.min_ranks and len(left) < len(self._generation.members):
            print(f"shardwise: {num_left} ranks are left, --min-nproc is {self._terms.min_ranks}", file=sys.stderr)
            return self._fail(f"{cause}, and fewer than --min-nproc ranks are left: all have been stopped")
        self._lost, self._waiting = lost, waiting
        if len(left) < len(self._generation.members):
            self._announce([*left, *self._ready()[: self._terms.num_ranks - len(left)]], True, cause)
        return True

    def _fail(self, cause: str) -> bool:
        """Let the other hosts leave, too; return False."""
        if not self._end:
            self._end = cause
            self._order()
            waits.wait_until(lambda: all(self._report(host)[3] for host in self._others), GRACE_S)
        return False

    def _order(self) -> None:
        for host in self._others:
            self._store.set(_ORDER.format(host), json.dumps([self._started[host], self._end]))

    def _report(self, host: int) -> list[Any]:
        return json.loads(self._store.get(_REPORT.format(host)))

    def _hear(self) -> None:
        """Note what the other hosts report.  Raises: RankError if the run ends by it."""
        for host, (last, seen_s) in [*self._others.items()]:
            number, _, _, has_left, ended = self._report(host)
            if number != last:
                last, seen_s = self._others[host] = number, time.monotonic()
            goes_on = all(self.outlives(int(process), code) for process, code in ended.items())
            if goes_on and (has_left or time.monotonic() - seen_s > (_SILENT_S if last else _COME_S)):
                del self._others[host]
                cause = f"host {host} " + ("is silent" if last else "has not come")
                self._store.set(_ORDER.format(host), json.dumps([0, f"{cause}: the others go on without it"]))
                goes_on = self._end == "" or self._lose(self._present(host), cause)
            if not goes_on:
                raise RankError(self._end)

    def more(self, is_running: bool) -> int | None:
        """Let processes that are ready join; return how many are to be started here, as :class:`LaunchContext` says."""
        self._hear()
        if self._is_over():
            if self._generation.members:  # also for those that others were to let join
                self._announce((), False, "the run is over")
                self._waiting.clear()
            return self._finish()
        members = self._generation.members
        joining = self._ready()[: self._terms.num_ranks - len(members)]
        # A rank may take up the newest generation only: one that others are still entering must not have a successor
        # that does not interrupt them.
        if joining and (not members or self._store.check([_FORMED.format(self._generation.number)])):
            self._announce([*members, *joining], False, f"{len(joining)} joined")
        terms, before = self._terms, [*self._started]
        for host in (0, *self._others):
            wanted = terms.num_each + len(range(host, terms.num_spares, terms.num_hosts)) - len(self._present(host))
            num_more = max(0, min(wanted, self._num_startable))
            first = before[host] * terms.num_hosts + host
            self._waiting += range(first, first + num_more * terms.num_hosts, terms.num_hosts)
            self._started[host] += num_more
        if self._started != before:
            self._order()
        elif not is_running and all(self._report(host)[1:3] == [before[host], False] for host in self._others):
            return self._finish()  # a program that makes no elastic run
        return self._started[0] - before[0] or (None if self._others else 0)

    def _finish(self) -> int | None:
        if self._end is None:
            self._end = ""
            self._order()
        return None if self._others else 0

    def _present(self, host: int) -> list[int]:
        return [each for each in (*self._generation.members, *self._waiting) if self._terms.host_of(each) == host]

    def _ready(self) -> list[int]:
        return [each for each in self._waiting if self._store.check([_READY.format(each)])]

    def _is_over(self) -> bool:
        return self._store.check([_OVER])

    def _announce(self, members: Iterable[int], is_urgent: bool, cause: str) -> None:
        ranks = tuple(sorted(members, key=self._terms.host_of))
        self._generation = Generation(self._generation.number + 1, ranks, is_urgent, cause)
        self._waiting = [each for each in self._waiting if each not in ranks]
        self._store.set(_GENERATION.format(self._generation.number), json.dumps(asdict(self._generation)))


# ---- A rank's side.


class RanksChanged(RuntimeError):
    """What a rank waits for will not come: a rank of its generation is lost."""


class _GenerationStore(dist.Store):
    """The launcher's store for one generation: every call raises once a rank of it is lost, also one that waits."""

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


def _used_s() -> float:
    """Return the CPU time that the other threads of this process have used, and how long the main one waited for a core."""
    fields = read_proc("self/schedstat").split()  # on a busy machine a rank that computes has little CPU time
    return time.process_time() - time.thread_time() + (int(fields[1]) / 1e9 if fields else 0.0)


class Process:
    """This process, which is a rank of some generations and a spare in others.

    Attributes:
        number: of the process.
        generation: the one that it takes part in; None between two.  newest: that the launcher has announced.
    """

    def __init__(self, number: int, address: str, port: int) -> None:
        self.number = number
        self._store = dist.TCPStore(address, port, None, False)
        self.generation: Generation | None = None
        self.newest = Generation(0, (), True, "", 0.0)
        self._phase = ""  # "entering" a generation, "leaving" one, or neither
        # C++ does not keep the Python part of a store.  The end of a group waits for its threads: of one that has lost a rank
        # they may wait for a message that was cut, for half an hour, whenever the user's last reference goes.
        self._kept: list[object] = []
        self._left = 0  # the number of the last generation that it was a rank of
        self._lost_in = 0  # the newest generation that begins with a loss
        self._leaving = threading.Lock()  # what makes a generation fail must not reach the next one
        store = dist.TCPStore(address, port, None, False)
        self._watcher = threading.Thread(target=self._watch, args=(store,), daemon=True)
        self._watcher.start()
        self._store.set(_READY.format(self.number), "")

    # ---- the thread that waits for the next generation ----

    def _watch(self, store: dist.TCPStore) -> None:
        while self.newest.members or self.newest.is_urgent:  # of none without a loss: the end of the run
            key = _GENERATION.format(self.newest.number + 1)
            with suppress(dist.DistStoreError):
                try:
                    store.wait([key], timedelta(days=1))
                except dist.DistNetworkError:
                    return  # the launcher, which ends this process, may be that of another host
                fields: dict[str, Any] = json.loads(store.get(key))
                fields |= {"members": tuple(fields["members"]), "seen_s": time.monotonic()}
                newest = Generation(**fields)
                if newest.is_urgent:
                    self._lost_in = newest.number
                self.newest = newest
                self._interrupt(store)

    def _interrupt(self, store: dist.Store) -> None:
        """Make the main thread raise where it waits for other ranks, until it has left its generation.

        Nothing ends a wait in C++ for a gloo message that was cut in its middle: in torch's DDP, ``dist.all_reduce``, or the
        end of a group, which waits for threads that do.  A process that is in one uses no CPU time: it ends itself, and is
        replaced.
        """
        begin_s, used_s = time.monotonic(), _used_s()
        while True:
            with self._leaving, suppress(RuntimeError):  # the main thread makes a group meanwhile
                if not (self.is_superseded() or self._phase == "leaving"):
                    return
                if dist.is_initialized() and self._phase != "leaving":
                    abort_all_connections(range(dist.get_world_size()))
                    torch_private.abort_groups()
            if _used_s() - used_s > _STUCK_USE * _STUCK_S:
                begin_s, used_s = time.monotonic(), _used_s()
            elif time.monotonic() - begin_s > _STUCK_S:
                print(
                    f"shardwise: process {self.number} waits for a lost rank where nothing can interrupt it:",
                    file=sys.stderr,
                )
                faulthandler.dump_traceback()
                store.set(_STUCK.format(self.number), "")
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(_AGAIN_S)

    # ---- the main thread ----

    def is_superseded(self) -> bool:
        """Return True if a rank of the generation of this process is lost."""
        own = self.generation
        return own is not None and self._has_lost(own.number)

    def _has_lost(self, number: int) -> bool:
        # Ranks that have left the loop do not enter; those that are about to leave it are not to be interrupted.
        is_left_alone = self._phase == "entering" and self.newest.number > number and not self.newest.members
        return is_left_alone or self._lost_in > number

    def refuse(self, number: int) -> None:
        """Raise if a rank of generation ``number`` is lost.  Raises: RanksChanged."""
        if self._has_lost(number):
            raise RanksChanged(f"elastic: {self.newest.cause}")

    def join(self, backend: str, num_used: Callable[[int], int]) -> Generation:
        """Wait for a generation that this process is a rank of, and make its default process group.

        ``num_used``: returns how many of so many members are ranks; the others wait.
        Raises: RanksChanged if a rank is lost meanwhile.  StateError after the end.  SystemExit in a spare after the end.
        """
        is_spare = not self._left
        while True:
            newest = self.newest
            used = newest.members[: num_used(len(newest.members))]
            is_spare = is_spare or bool(newest.number > self._left and used and self.number not in used)
            if self._store.check([_OVER]):
                if not is_spare:
                    raise StateError(f"elastic: {newest.cause}, after the last step: other ranks have left the loop")
                self._watcher.join(_END_S)
                raise SystemExit(0)
            if self.number in newest.members:  # nothing of an earlier one is being written by it, also if it waits now
                self._store.set(f"elastic/{newest.number}/here/{self.number}", "")
            if self.number in used and newest.number > self._left:
                break
            waits.wait_until(lambda newest=newest: self.newest is not newest, waits.LOOK_S, pauses_s=_POLLS_S)
        self.generation = replace(newest, members=used)
        self._phase = "entering"
        self.listen()
        joined = _GenerationStore(self._store, self, newest.number)
        self._kept.append(joined)
        store = dist.PrefixStore(f"elastic/{newest.number}", joined)
        store.wait([f"here/{each}" for each in newest.members], timedelta(days=1))
        # Nothing interrupts gloo while it connects, to a rank that was killed after it had come: then this is how long.
        rank, size, limit = used.index(self.number), len(used), timedelta(seconds=_CONNECT_S)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        self.set_timeouts(_BUILD_S)
        return self.generation

    def set_timeouts(self, seconds: float = default_pg_timeout.total_seconds()) -> None:
        """Set the timeout of all groups; by default to torch's."""
        for group in torch_private.all_groups():
            group.set_timeout(timedelta(seconds=seconds))

    def note_formed(self) -> None:
        """Note that all ranks of the generation have entered it."""
        self._phase, self._left = "", cast(Generation, self.generation).number
        self._store.set(_FORMED.format(self._left), "")

    def listen(self) -> None:
        """Interrupt polls of the main thread, too."""
        number = cast(Generation, self.generation).number
        waits.listen(lambda: self.refuse(number))

    def leave(self) -> None:
        """Leave the generation: nothing of its groups stays."""
        with self._leaving:
            self._kept += torch_private.all_groups() if self.is_superseded() else []
            self.generation, self._phase = None, "leaving"
        waits.leave()
        if not dist.is_initialized():  # an interrupted start leaves names of groups behind, which a destruction resets
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        torch_private.abort_groups()
        dist.destroy_process_group()  # waits for gloo's threads
        self._phase = ""

    def is_lost(self, error: BaseException, limit_s: float) -> bool:
        """Return True if ``error`` was raised because a rank is lost; wait at most ``limit_s`` for the launcher's word."""
        if not isinstance(error, RuntimeError | OSError):
            return self.is_superseded() and isinstance(error, Exception)
        return bool(waits.wait_until(self.is_superseded, limit_s, pauses_s=_POLLS_S))

    def finish(self) -> None:
        """Note that the run is over: from here on a lost rank ends it."""
        with self._leaving:
            self.generation, self._lost_in = None, -1
        waits.leave()
        self._store.set(_OVER, str(os.getpid()))
        self._watcher.join(_END_S)

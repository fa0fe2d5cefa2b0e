"""A pool of worker processes that act as ranks, kept over a whole test session.

Importing torch takes seconds, so the processes are started once; each call gets a new default process group.

Example:
    >>> from shardwise.testing import WorkerPool
    >>> with WorkerPool(max_ranks=2) as pool:  # doctest: +SKIP
    ...     pool.run(check_parity, num_ranks=2, width=8)  # check_parity(width=8) runs on both ranks
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwise.one_host import stay_on_loopback

GRACE_S = 5.0  # time for the others to notice after one rank has failed


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not return in time; the message has each rank's traceback or stack."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One rank's result of a call: its value, or the text of its traceback, of its stack if it hung, or of its exit code."""

    value: Any
    error: str | None
    is_gone: bool = False  # it hung, died or got no group, so the processes were replaced


@dataclass(frozen=True, slots=True)
class _Task:
    payload: bytes
    rank: int
    num_ranks: int
    store: tuple[int, str]  # the port of the pool's store, and a prefix of this call in it
    backend: str
    timeout_s: float
    keeps_group: bool


def _serve(pipe: Connection, stack_path: str) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    stay_on_loopback(os.environ)
    import torch

    torch.set_num_threads(1)
    stack_file = open(stack_path, "w")  # noqa: SIM115  kept open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    num_modules = 0
    while True:
        try:
            task: _Task | None = pipe.recv()
        except EOFError:
            return
        if task is None:
            return
        answer = _run_task(task)
        try:
            pipe.send(answer)
        except Exception:  # the result cannot be pickled
            pipe.send(Answer(None, traceback.format_exc()))
        if not task.keeps_group:
            gc.collect()  # an ended group that is still referenced keeps threads, hundreds of which slow the machine down
            if len(sys.modules) != num_modules:  # garbage collection need not scan what modules reference again
                num_modules = len(sys.modules)
                gc.freeze()


def _run_task(task: _Task) -> Answer:
    import torch.distributed as dist

    from shardwise.torch_private import forget_meshes

    has_group = False
    try:
        function, kwargs = pickle.loads(task.payload)
        if task.backend != "none" and not dist.is_initialized():
            _make_group(task)
        has_group = True
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(task.rank), str(task.num_ranks)
        os.environ["LOCAL_RANK"] = str(task.rank)
        return Answer(function(**kwargs), None)
    except BaseException:
        # torch numbers the groups of a process: after a failure here, this process would lag behind the others.
        return Answer(None, traceback.format_exc(), is_gone=not has_group)
    finally:
        if dist.is_initialized() and not task.keeps_group:
            dist.destroy_process_group()
            forget_meshes()


def share_gpus(rank: int, num_ranks: int) -> Any:
    """Choose the GPU of ``rank`` of ``num_ranks`` on this host, before it has a group; return it.  Ranks may share one."""
    import torch

    num_gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % num_gpus)
    if num_ranks > num_gpus:  # NCCL refuses ranks of one host that share a GPU, not those of several hosts
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    return torch.device("cuda", rank % num_gpus)


def _make_group(task: _Task) -> None:
    import torch
    import torch.distributed as dist

    if "nccl" in task.backend:
        share_gpus(task.rank, task.num_ranks)
    dist.init_process_group(
        task.backend,
        store=dist.PrefixStore(task.store[1], dist.TCPStore("127.0.0.1", task.store[0], wait_for_workers=False)),
        rank=task.rank,
        world_size=task.num_ranks,
        timeout=timedelta(seconds=task.timeout_s),
    )
    if "gloo" in task.backend:
        # A rank that finishes before another one is connected would close the connection that the other waits for.
        dist.all_reduce(torch.zeros(()))


class WorkerPool:
    """Run functions on ``num_ranks`` processes with a new group per call: gloo's, or as requested.

    Args:
        max_ranks: the largest ``num_ranks`` of :meth:`run`.
        timeout_s: seconds a call may take before the ranks' stacks are collected and the processes replaced.
        keeps_group: create one group that lives as long as the processes; every call then has ``max_ranks`` ranks.
        preload: modules that a server imports once, from which new processes are forked: they start in milliseconds,
            and sets of strings have one order in all of them.  One server serves all pools of a process: it imports what
            was requested before it started.
    """

    def __init__(
        self, max_ranks: int = 4, timeout_s: float = 120.0, *, keeps_group: bool = False, preload: Sequence[str] = ()
    ) -> None:
        self._context: Any = mp.get_context("forkserver" if preload else "spawn")
        if preload:
            self._context.set_forkserver_preload(list(preload))
        self._preload = preload
        self._max_ranks = max_ranks
        self._keeps_group = keeps_group
        self._timeout_s = timeout_s
        self._directory = TemporaryDirectory(prefix="shardwise-pool-")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None
        self._num_calls = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *, num_ranks: int = 2, **options: Any) -> list[Any]:
        """Call ``function`` on every rank, with those of ``options`` that are not of :meth:`attempt`; return results by rank.

        Raises: RankFailure with every rank's traceback (or stack, if it hung).
        """
        answers = self.attempt(function, num_ranks=num_ranks, **options)
        failures = {rank: answer.error for rank, answer in enumerate(answers) if answer.error is not None}
        if failures:
            report = "\n".join(
                f"--- rank {rank} of {num_ranks} ---\n{error}" for rank, error in sorted(failures.items())
            )
            raise RankFailure(f"{getattr(function, '__name__', function)}({options}) failed\n{report}")
        return [answer.value for answer in answers]

    def attempt(
        self,
        function: Callable[..., Any],
        *,
        num_ranks: int = 2,
        backend: str = "gloo",
        timeout_s: float | None = None,
        group_timeout_s: float | None = None,
        fresh: bool = False,
        is_failure: Callable[[Any], bool] = lambda _: False,
        **kwargs: Any,
    ) -> list[Answer]:
        """Call ``function(**kwargs)`` on every rank; return every rank's answer, in rank order, whatever happened.

        Args:
            function: importable (module-level); it and its arguments must be picklable.
            backend: of the group; "none" creates no process group.  With NCCL every rank has a GPU, or shares one.
            timeout_s: after how many seconds the pool gives up.  group_timeout_s: the timeout of collectives.
            fresh: call it in new processes: DTensor caches meshes with the names of their groups, and a later group of
                the same shape may have other names.  With ``preload`` the workers stay; else they are replaced, so that
                their memory is free.
            is_failure: returns True for a value after which other ranks may wait for this one in vain: as after an
                exception, they get a few seconds.
        """
        if num_ranks > self._max_ranks or (self._keeps_group and num_ranks != self._max_ranks):
            limit = "the group that is kept has" if self._keeps_group else "max_ranks is"
            raise ValueError(f"num_ranks is {num_ranks}, but {limit} {self._max_ranks}")
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if fresh and not self._preload:
            self.replace()
        elif fresh:
            options: dict[str, Any] = {"num_ranks": num_ranks, "backend": backend, "is_failure": is_failure}
            with WorkerPool(num_ranks, limit_s, preload=self._preload) as own:
                return own.attempt(function, **options, group_timeout_s=group_timeout_s, **kwargs)
        self._start(num_ranks)
        self._num_calls += 1
        payload = pickle.dumps((function, kwargs))
        store = self._store_port(), f"{self._num_calls}"
        try:
            for rank in range(num_ranks):
                task = _Task(payload, rank, num_ranks, store, backend, group_timeout_s or limit_s, self._keeps_group)
                self._pipes[rank].send(task)
            answers = self._collect(num_ranks, limit_s, is_failure)
        except BaseException:  # an interrupt: the next call would get the answers of this one
            self.replace()
            raise
        return [answers[rank] for rank in range(num_ranks)]

    def replace(self) -> None:
        """Kill the processes; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def close(self) -> None:
        """End the worker processes; the pool cannot be used afterwards."""
        for pipe in self._pipes:
            with suppress(OSError):  # it has ended
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=5)
        self.replace()
        self._store = None
        self._directory.cleanup()

    def _store_port(self) -> int:
        """Return the port of a store for all groups of this pool: a file's readers would look every 10 ms what has come."""
        from torch.distributed import TCPStore

        if self._store is None:
            server = socket.create_server(("127.0.0.1", 0))
            place = "127.0.0.1", server.getsockname()[1]
            self._store = TCPStore(*place, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        return self._store.port

    def _start(self, num_ranks: int) -> None:
        if not all(process.is_alive() for process in self._processes):
            self.replace()
        for index in range(len(self._processes), num_ranks):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._stack_path(index)), daemon=False)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, num_ranks: int, limit_s: float, is_failure: Callable[[Any], bool]) -> dict[int, Answer]:
        results: dict[int, Answer] = {}
        deadline = time.monotonic() + limit_s
        waiting = {self._pipes[rank]: rank for rank in range(num_ranks)}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=1)
                    text = f"the process ended (exit code {self._processes[rank].exitcode})"
                    results[rank] = Answer(None, text, is_gone=True)
                if results[rank].error is not None or is_failure(results[rank].value):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            results[rank] = Answer(None, f"did not return; its stack:\n{self._stack(rank)}", is_gone=True)
        if any(answer.is_gone for answer in results.values()):
            self.replace()
        return results

    def _stack_path(self, rank: int) -> str:
        return f"{self._directory.name}/stack-{rank}"

    def _stack(self, rank: int) -> str:
        process = self._processes[rank]
        if not process.is_alive():
            return f"the process ended (exit code {process.exitcode})"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return Path(self._stack_path(rank)).read_text()

"""Jobs of short-lived processes: unlike a pool's workers, their ranks may be killed or stopped, and the others report."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.testing import WorkerPool

SEGMENT = "memfd:shardwise"
# What takes a process seconds to import, and leaves CUDA alone: processes that are forked later could not use it.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "pytest",
    "shardwise.cli.main",
    "shardwise.cli.train",
    "shardwise.prove.plain",
    "torch.distributed.optim",
    "shardwise.recipes.train",
    "shardwise.recipes.report",
    "helpers.models",
    "helpers.frozen",
)


class SessionPool(WorkerPool):
    """Workers that are forked, but for rank 1: its sets of strings have an order of their own, as in ranks of a launcher."""

    def __init__(self, max_ranks: int) -> None:
        super().__init__(max_ranks, preload=PRELOAD)

    def _start(self, num_ranks: int) -> None:
        super()._start(1)
        forked, self._context = self._context, mp.get_context("spawn")
        super()._start(min(num_ranks, 2))
        self._context = forked
        super()._start(num_ranks)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended: what it returned, or its exception as (type, text)."""

    value: Any = None
    error: tuple[type[BaseException], str] | None = None
    trace: str = ""


class Job:
    """``function(*args)`` on every rank of a gloo group of new processes.

    The processes are forked from a server that has imported torch, so that starting one takes milliseconds.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, num_ranks: int, group_timeout_s: float = 60.0) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self._directory = tempfile.TemporaryDirectory(prefix="shardwise-job-")
        store = str(Path(self._directory.name) / "store")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            place = (rank, num_ranks, store, group_timeout_s)
            process = context.Process(target=_run_rank, args=(theirs, place, function, args))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def message(self, rank: int, limit_s: float = 60.0) -> Any:
        """Return the next thing that ``rank`` says; an Outcome is its last."""
        assert self.pipes[rank].poll(limit_s), f"rank {rank} has said nothing within {limit_s:g} s"
        return self.pipes[rank].recv()

    def outcome(self, rank: int, limit_s: float = 60.0) -> Outcome:
        while not isinstance(message := self.message(rank, limit_s), Outcome):
            continue
        return message

    def values(self) -> list[Any]:
        """Return what the ranks have returned, in rank order."""
        outcomes = [self.outcome(rank) for rank in range(len(self.processes))]
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is None, f"rank {rank}:\n{outcome.trace}"
        return [outcome.value for outcome in outcomes]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()
        self._directory.cleanup()


def _run_rank(
    pipe: Connection, place: tuple[int, int, str, float], function: Callable[..., Any], args: Sequence[Any]
) -> None:
    rank, num_ranks, store, timeout_s = place
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    dist.all_reduce(torch.zeros(()))  # all are connected: one that ended before would take the others along
    _to_test.append(pipe)
    try:
        pipe.send(Outcome(function(*args)))
    except Exception as error:
        pipe.send(Outcome(error=(type(error), str(error)), trace=traceback.format_exc()))
    finally:
        pipe.close()
    os._exit(0)  # a group that has lost a rank is not waited for


def tell(value: Any) -> None:
    """Send ``value`` from a rank to its test, which reads it with :meth:`Job.message`."""
    _to_test[0].send(value)


_to_test: list[Connection] = []


def segments_of(pid: int) -> int:
    """Return how many mappings and descriptors of shared segments process ``pid`` has; 0 if it is gone."""
    try:
        found = Path(f"/proc/{pid}/maps").read_text().count(SEGMENT)
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found += SEGMENT in os.readlink(fd)
            except FileNotFoundError:
                continue
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return found

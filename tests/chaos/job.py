"""One job: fresh processes that run a program, one of them with a fault; how each of them ended."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from helpers.store_exchanges import on_host

from chaos.program import DIVERGENCES, Program
from chaos.rank_program import train
from shardwise import record, set_wait_report
from shardwise.consistency.failure_report import leave_job
from shardwise.consistency.recorder import BLACK_BOX, PATTERN, diagnose, in_words, read_record
from shardwise.errors import ShardwiseError
from shardwise.one_host import PREFIX, stay_on_loopback
from shardwise.testing.faults import Fault, inject

_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "chaos.rank_program",
    "helpers.frozen",
)
_STALL_S = 4.0
_LEAVE_S = 5.0  # for ranks that have said how they ended to end
_PROCESSES = threading.Lock()  # multiprocessing asks after all children of this process, whichever thread started them


@dataclass(frozen=True, slots=True)
class Job:
    """A program on some ranks, and what goes wrong.

    Attributes:
        fault: strikes one rank; or ``divergence``: what is different on rank ``num_ranks - 1``.
        store: where ranks meet: a file, or a server in the process of rank 0.
        timeout_s: of the process group.
        limit_s: for all ranks to end, counted from the fault.
        name: of the fault or divergence in the matrix.
        seed: of what is drawn for a job of the API "elastic", a program of its own.
    """

    program: Program
    num_ranks: int
    fault: Fault | None = None
    divergence: str = ""
    store: Literal["file", "tcp"] = "file"
    timeout_s: float = 30.0
    limit_s: float = 15.0
    name: str = "nothing"
    seed: int = 0

    @property
    def struck(self) -> int:
        """The rank that the fault is of."""
        if self.fault is not None and self.fault.rank is not None:
            return self.fault.rank
        return self.num_ranks - 1

    @property
    def text(self) -> str:
        """The job in one line."""
        program, fault = self.program, self.fault
        if program.api == "elastic":
            return f"elastic: {self.name}, seed {self.seed}"
        place = f" at {fault.at} of rank {self.struck}" if fault is not None else f" of rank {self.struck}"
        hosts = (
            f" {program.ranks_per_host} per host" * (program.ranks_per_host > 0)
            + ", different ways" * program.takes_ways
        )
        return f"{program.api} {program.transport} W={self.num_ranks}{hosts} {self.store} store: {self.name}{place}"

    @property
    def whole(self) -> Program:
        """What all ranks must have done where they recover: without a fault, and without transactions."""
        fault, left_out = self.fault, 0
        if fault is not None and fault.kind == "raise" and self.program.transacts == "skip":
            # ZeRO sends parameters once its inner optimizer has stepped, with which a step ends for faults.
            left_out = (fault.step or 0) - (fault.at == "all-gather" and self.program.api == "zero1")
        return replace(self.program, transacts="", left_out_step=left_out)

    @property
    def must_recover(self) -> bool:
        """True if no rank may end with an error: an exception is undone by a transaction."""
        return bool(self.program.transacts) and self.fault is not None and self.fault.kind in ("raise", "delay")


@dataclass(frozen=True, slots=True)
class Ending:
    """How one rank ended.

    Attributes:
        code: exit code, negative for a signal; None if it had to be killed.
        digest: what the program returned.
        error: name of the class of what it raised.  is_ours: a ShardwiseError.  text: its message.
        trace: with the stack.
        seconds: after the fault, or after the start where the program itself diverges; None if it has said nothing.
        printed: what came to standard error, cut.
    """

    code: int | None
    digest: str = ""
    error: str = ""
    is_ours: bool = False
    text: str = ""
    trace: str = ""
    seconds: float | None = None
    printed: str = ""


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank tells before it ends."""

    digest: str = ""
    error: str = ""
    is_ours: bool = False
    text: str = ""
    trace: str = ""
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """How every rank of a job has ended, in rank order, and what ``shardwise diagnose`` says of that."""

    endings: tuple[Ending, ...]
    report: tuple[str, ...]


def _context() -> Any:
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    return context


def warm_up() -> None:
    """Start the process that all ranks are forked from: its imports are not to be taken for a fault's time."""
    with _PROCESSES:
        process = _context().Process(target=int)
        process.start()
        process.join()


def run_job(job: Job) -> Run:
    """Run ``job`` to its end.  Threads may run several beside each other."""
    context = _context()
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}chaos-") as name:
        place = Path(name)
        store = str(place / "store")
        pipes: list[Connection] = []
        processes: list[Any] = []
        started = time.monotonic()
        for rank in range(job.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(job, rank, store, str(place), theirs))
            with _PROCESSES:
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            struck, said = _listen(job, pipes, started)
            codes = _end(processes)
        finally:
            with _PROCESSES:
                for process in processes:
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()
        ranks = range(job.num_ranks)
        endings = [_ending(said.get(rank), codes[rank], struck, place / f"stderr-{rank}") for rank in ranks]
        records = [
            each for path in sorted((place / BLACK_BOX).glob(PATTERN)) if (each := read_record(path)) is not None
        ]
        return Run(tuple(endings), tuple(in_words(diagnose(records))) if records else ())


def _listen(job: Job, pipes: Sequence[Connection], started: float) -> tuple[float, dict[int, _Said]]:
    """Return when the fault struck and what the ranks have said, once all that can say anything have, or time is up."""
    struck = started if job.divergence or job.fault is None else None
    said: dict[int, _Said] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = started + job.timeout_s + 2 * job.limit_s
    if job.divergence:
        deadline = started + job.timeout_s + job.limit_s
    mute = {job.struck} if job.fault is not None and job.fault.kind == "stop" else set[int]()
    while set(waiting.values()) - mute and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=0.2):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except (EOFError, ConnectionResetError):
                del waiting[pipe]
                continue
            if isinstance(message, _Said):
                said[waiting.pop(pipe)] = message
            elif struck is None:
                struck = float(message)
                deadline = struck + job.limit_s
    return struck or started, said


def _end(processes: Sequence[Any]) -> list[int | None]:
    deadline = time.monotonic() + _LEAVE_S
    while True:
        with _PROCESSES:
            alive = [process.pid for process in processes if process.is_alive()]
            codes = [process.exitcode for process in processes]
        if all(_is_stopped(pid) for pid in alive) or time.monotonic() >= deadline:
            return codes
        time.sleep(0.01)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def _ending(said: _Said | None, code: int | None, struck: float, printed: Path) -> Ending:
    text = printed.read_text(errors="replace")[-4000:] if printed.exists() else ""
    if said is None:
        return Ending(code, printed=text)
    seconds = max(said.time_s - struck, 0.0)
    return Ending(code, said.digest, said.error, said.is_ours, said.text, said.trace, seconds, text)


def _run_rank(job: Job, rank: int, store: str, folder: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    _quiet(Path(folder) / f"stderr-{rank}")
    pipe.send(_outcome(job, rank, store, folder, pipe))
    pipe.close()
    leave_job()  # as at the end of a program
    os._exit(0)  # a group that has lost a rank is not waited for


def _outcome(job: Job, rank: int, store: str, folder: str, pipe: Connection) -> _Said:
    program = job.program
    if job.divergence and rank == job.struck:
        program = DIVERGENCES[job.divergence](program)
    per_host = program.ranks_per_host
    set_wait_report(_STALL_S)
    digest = ""
    try:
        _join(job, rank, store)
        where = on_host(f"host {rank // per_host}") if per_host else contextlib.nullcontext()
        with where, record(Path(folder) / BLACK_BOX), _fault(job, rank, pipe):
            digest = train(program, Path(folder) / "checkpoints")
        return _Said(digest, time_s=time.monotonic())
    except BaseException as error:
        now = time.monotonic()
        is_ours = isinstance(error, ShardwiseError)
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return _Said("", type(error).__name__, is_ours, text, traceback.format_exc(), now)


def _join(job: Job, rank: int, store: str) -> None:
    timeout = timedelta(seconds=job.timeout_s)
    met: dist.Store
    if job.store == "file":
        met = dist.FileStore(store, job.num_ranks)
        met.set_timeout(timeout)
    else:
        met = _serve(Path(store), job, rank, timeout)
    dist.init_process_group("gloo", store=met, rank=rank, world_size=job.num_ranks, timeout=timeout)
    dist.all_reduce(torch.zeros(()))  # all are connected


@contextlib.contextmanager
def _fault(job: Job, rank: int, pipe: Connection) -> Generator[None, None, None]:
    if job.fault is None or rank != job.struck:
        yield
        return
    with inject(job.fault) as injected:
        injected.tell = _teller(pipe)
        yield


def _teller(pipe: Connection) -> Callable[[], None]:
    return lambda: pipe.send(time.monotonic())


def _quiet(path: Path) -> None:
    """Let what this process prints go to a file; keep its threads and ports to itself."""
    stay_on_loopback(os.environ)
    torch.set_num_threads(1)
    random.seed(0)
    warnings.simplefilter("ignore")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


def _serve(place: Path, job: Job, rank: int, timeout: timedelta) -> dist.Store:
    """Return the store that rank 0 keeps, at a port that it was given and has written to the file ``place``."""
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, job.num_ranks, True, timeout, wait_for_workers=False)
        part = place.with_suffix(".part")
        part.write_text(str(server.port))
        part.replace(place)
        return server
    while not place.exists():
        time.sleep(0.002)  # the job ends this process if rank 0 has not come
    return dist.TCPStore("127.0.0.1", int(place.read_text()), job.num_ranks, False, timeout)

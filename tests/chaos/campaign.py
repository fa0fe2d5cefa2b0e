"""Draw jobs, run them, judge them."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chaos.job import Job, Run, run_job
from chaos.judge import Verdict, judge
from chaos.program import APIS, DIVERGENCES, DIVERGING_APIS, ENGINE_APIS, Outcome, Program
from shardwise.collectives.routes import TRANSPORTS
from shardwise.testing.faults import Fault, Kind

# How each fault of the matrix is written.
FAULTS: dict[str, tuple[Kind, type[BaseException]]] = {
    "kill": ("kill", RuntimeError),
    "stop": ("stop", RuntimeError),
    "SIGTERM": ("terminate", RuntimeError),
    "SIGINT": ("interrupt", RuntimeError),
    "raise": ("raise", ValueError),
    "MemoryError": ("raise", MemoryError),
    "late": ("delay", RuntimeError),
    "drop": ("drop", RuntimeError),
}
# In transactions: the fault, and what is done with the step.
TRANSACTED: tuple[tuple[str, Outcome], ...] = (("raise", "retry"), ("MemoryError", "skip"), ("kill", "retry"))
_STEP_OF = {"init": 1, "checkpoint save": 2, "checkpoint load": 3, "consolidation": 5}
_SHORT_TIMEOUT_S, _LONG_TIMEOUT_S = 6.0, 30.0
_PROMPT_S, _AFTER_TIMEOUT_S = 12.0, 14.0


@dataclass(frozen=True, slots=True)
class Result:
    """A job, how its ranks ended, and what is wrong with that."""

    job: Job
    run: Run
    verdict: Verdict


def places_of(program: Program, num_ranks: int) -> tuple[str, ...]:
    """Return the places that ranks come to behind this API."""
    # Where ranks take different ways, the first forward makes a group: who waits in that for a rank that ends sees a timeout.
    found = [
        *["init"] * (not program.takes_ways),
        "between steps",
        "forward",
        "evaluation",
        "backward",
        "optimizer step",
    ]
    if program.api in ("fully_shard", "whole_matrix", "zero2") or (program.api == "hsdp" and num_ranks > 2):
        found += ["all-gather", "reduction"]
    elif program.api in ("hsdp", "replicate"):
        found += ["reduction"]
    elif program.api == "zero1":
        found += ["all-gather", "consolidation"]
    if program.api == "whole_matrix":
        found += ["exchange"]
    return (*found, "checkpoint save", "checkpoint load")


def places_in_step(program: Program, num_ranks: int) -> tuple[str, ...]:
    """Return the places that ranks come to within a step, where a transaction undoes what they raise."""
    others = ("init", "evaluation", "consolidation", "checkpoint save", "checkpoint load")
    return tuple(place for place in places_of(program, num_ranks) if place not in others)


def transacting(job: Job, outcome: Outcome) -> Job:
    """Return ``job`` with its steps in transactions."""
    return replace(job, program=replace(job.program, transacts=outcome), name=f"{job.name}, {outcome}")


def draw(rng: random.Random) -> Job:
    """Return a random job with a fault or a divergence."""
    if rng.random() < 0.1:
        return elastic(rng.randrange(2**31))
    api = rng.choice(APIS)
    transport = rng.choice(TRANSPORTS) if api in ENGINE_APIS else TRANSPORTS[0]
    program = Program(api, transport)
    num_ranks = rng.choice((2, 2, 4))
    if num_ranks == 4 and rng.random() < 0.5:
        program = replace(program, ranks_per_host=2)
    if api in DIVERGING_APIS and rng.random() < 0.25:
        program = replace(program, takes_ways=True)
    elif rng.random() < 0.25:
        return diverging(program, num_ranks, rng.choice(sorted(DIVERGENCES)))
    if rng.random() < 0.25:
        (name, outcome), place = rng.choice(TRANSACTED), rng.choice(places_in_step(program, num_ranks))
        return transacting(faulty(program, num_ranks, name, place, rank=rng.randrange(num_ranks)), outcome)
    name, place = rng.choice(sorted(FAULTS)), rng.choice(places_of(program, num_ranks))
    if name == "drop":
        place = "all-gather" if "all-gather" in places_of(program, num_ranks) else "reduction"
    return faulty(program, num_ranks, name, place, rank=rng.randrange(num_ranks), store=rng.choice(("file", "tcp")))


def elastic(seed: int) -> Job:
    """Return a job whose ranks are killed one after another and outlive each other."""
    return Job(Program("elastic", "auto"), 0, name="kills", seed=seed)


def _run_elastic(job: Job) -> Result:
    words = [sys.executable, "-m", "chaos.elastic", str(job.seed)]
    begin_s = time.monotonic()
    ended = subprocess.run(words, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    faults = (ended.stdout + ended.stderr,) if ended.returncode else ()
    return Result(job, Run((), ()), Verdict(faults, "recovered", time.monotonic() - begin_s, ended.stdout.strip()))


def diverging(program: Program, num_ranks: int, name: str) -> Job:
    """Return a job whose last rank runs another program."""
    limit_s = _SHORT_TIMEOUT_S + _AFTER_TIMEOUT_S
    return Job(program, num_ranks, None, name, "file", _SHORT_TIMEOUT_S, limit_s, f"diverge: {name}")


def faulty(program: Program, num_ranks: int, name: str, place: str, *, rank: int, store: str = "file") -> Job:
    """Return a job with the fault called ``name`` at ``place``, in the middle of its run."""
    kind, error = FAULTS[name]
    step = _STEP_OF.get(place, 3)
    call = 2 if place in ("forward", "backward", "all-gather", "reduction", "init") else 1
    if place == "init" and program.api == "zero1":
        call = 1
    if program.api == "zero1" and place in ("all-gather", "reduction"):
        call = 1
    if place == "reduction" and (program.api == "replicate" or (program.api == "hsdp" and num_ranks == 2)):
        call = 1  # units of which nothing is cut share an all-reduce
    fault = Fault(kind, place, rank, step=step, call=call, error=error)
    needs_timeout = kind in ("stop", "drop")  # an alive process that does not come
    timeout_s = _SHORT_TIMEOUT_S if needs_timeout else _LONG_TIMEOUT_S
    limit_s = timeout_s + _AFTER_TIMEOUT_S if needs_timeout else _PROMPT_S
    return Job(program, num_ranks, fault, "", "tcp" if store == "tcp" else "file", timeout_s, limit_s, name)


def matrix(sizes: Sequence[int]) -> Iterator[Job]:
    """Yield every job of the matrix, with the fault on rank 1, or on rank 0 where that keeps the store."""
    number = 0
    for num_ranks in sizes:
        for api in APIS:
            for transport in TRANSPORTS if api in ENGINE_APIS else TRANSPORTS[:1]:
                program = Program(api, transport)
                for name in FAULTS:
                    for place in places_of(program, num_ranks):
                        if name != "drop" or place in ("all-gather", "reduction"):
                            number += 1
                            store, rank = ("tcp", 0) if number % 3 == 0 else ("file", 1)
                            yield faulty(program, num_ranks, name, place, rank=rank, store=store)
                for place in places_in_step(program, num_ranks):
                    for name, outcome in TRANSACTED:
                        number += 1
                        store, rank = ("tcp", 0) if number % 3 == 0 else ("file", 1)
                        yield transacting(faulty(program, num_ranks, name, place, rank=rank, store=store), outcome)
                for name in DIVERGENCES:
                    if name != "other mesh" or num_ranks > 2:
                        yield diverging(program, num_ranks, name)
                for place in places_of(program, num_ranks) if api in DIVERGING_APIS else ():
                    for name in ("kill", "raise", "late"):
                        yield faulty(replace(program, takes_ways=True), num_ranks, name, place, rank=1)
    yield from _matrix_of_hosts(sizes)


def _matrix_of_hosts(sizes: Sequence[int]) -> Iterator[Job]:
    """Yield jobs on two hosts of several ranks, behind the APIs that gather."""
    for num_ranks in (size for size in sizes if size >= 4):
        for api in ("fully_shard", "whole_matrix"):
            program = Program(api, "auto", ranks_per_host=num_ranks // 2)
            for name in FAULTS:
                for place in places_of(program, num_ranks):
                    if name != "drop" or place in ("all-gather", "reduction"):
                        yield faulty(program, num_ranks, name, place, rank=1)
            for place in places_in_step(program, num_ranks):
                for name, outcome in TRANSACTED:
                    yield transacting(faulty(program, num_ranks, name, place, rank=1), outcome)
            for name in DIVERGENCES:
                yield diverging(program, num_ranks, name)


class Campaign:
    """Runs jobs; remembers the numbers of undisturbed runs."""

    def __init__(self) -> None:
        self._undisturbed: dict[tuple[Program, int], tuple[str, ...]] = {}

    def run(self, job: Job) -> Result:
        """Run and judge ``job``; one that cannot be run is wrong, and says why."""
        try:
            return self._run(job)
        except Exception as error:
            text = f"the job itself broke: {type(error).__name__}: {error}"
            return Result(job, Run((), ()), Verdict((text,), "named", 0.0, ""))

    def _run(self, job: Job) -> Result:
        if job.program.api == "elastic":
            return _run_elastic(job)
        run = run_job(job)
        expected = ("",) * job.num_ranks  # of no rank that has numbers
        if any(ending.digest for ending in run.endings):
            expected = self.undisturbed(job.whole, job.num_ranks)
        return Result(job, run, judge(job, run.endings, expected))

    def undisturbed(self, program: Program, num_ranks: int) -> tuple[str, ...]:
        """Return the digests of a run of ``program`` without a fault."""
        key = (program, num_ranks)
        if key not in self._undisturbed:
            endings = run_job(Job(program, num_ranks, timeout_s=60.0, limit_s=60.0)).endings
            wrong = [each.trace or f"code {each.code}" for each in endings if not each.digest]
            if wrong:
                raise RuntimeError(f"{program} fails without a fault:\n{wrong[0]}")
            self._undisturbed[key] = tuple(each.digest for each in endings)
        return self._undisturbed[key]


def until(jobs: Iterable[Job], minutes: float, now: Callable[[], float] = time.monotonic) -> Iterator[Job]:
    """Yield ``jobs`` until ``minutes`` are over."""
    end = now() + 60 * minutes
    for job in jobs:
        if now() >= end:
            return
        yield job

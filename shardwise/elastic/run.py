"""``elastic``: a loop of steps whose ranks may be lost, and may join, between any two lines of it."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from shardwise.arguments import explains_arguments
from shardwise.checkpoint.contents import Windows, merged
from shardwise.checkpoint.files import Files, list_checkpoints
from shardwise.checkpoint.format import Held, Write, held_from_text, held_to_text, share_out, sum_of
from shardwise.checkpoint.load import load
from shardwise.checkpoint.save import finish_all
from shardwise.checkpoint.state import BufferCheck, contents_of
from shardwise.checks.optimizers import OptimizerSteps
from shardwise.consistency.process_groups import all_have_come, gather_objects, group_of, largest_words
from shardwise.elastic.members import VARIABLE, ElasticTerms, Generation, Process
from shardwise.elastic.memory import CommitMark, StateMemory
from shardwise.errors import ConfigError, StateError, UsageError
from shardwise.observe import note
from shardwise.torch_private import is_gloo

T = TypeVar("T")
# For the launcher to say that a rank is lost, after an error that may come of it; the second one with several hosts.
_PATIENCE_S, _HOSTS_PATIENCE_S = 3.0, 12.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What followed a loss, or a rank that joined.

    Attributes:
        step: steps that were done and stay.  num_ranks: from then on.  cause: "process 2 was ended by SIGKILL".
        seconds: "detection", from the launcher's notice until this rank had left its groups; "groups", "build" and
            "shards", until the state was loaded.
    """

    step: int
    num_ranks: int
    cause: str
    seconds: Mapping[str, float]


class ElasticStep(Generic[T]):
    """One pass of a step: ``with step as state: ...``; if a rank is lost within it, the loop makes the step again.

    Attributes:
        number: steps done before it, 0 for the first.  state: what ``build()`` returned.
    """

    def __init__(self, process: Process, number: int, state: T, patience_s: float) -> None:
        self._process, self.number, self.state, self._patience_s = process, number, state, patience_s
        self.outcome = ""  # "entered", "done" or "lost"

    def __enter__(self) -> T:
        self.outcome = "entered"
        self._process.listen()
        return self.state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.outcome = "done" if error is None else "lost"
        return error is None or self._process.is_lost(error, self._patience_s)


@dataclass(slots=True)
class _Commits:
    """Writes the state after a step; all ranks together.  ``held``, ``writes``: as of the last commit."""

    memory: StateMemory
    group: dist.ProcessGroup
    held: dict[str, Held] = field(default_factory=dict[str, Held])
    writes: tuple[Write, ...] = ()
    windows: Windows = field(default_factory=Windows)

    def commit(self, state: Mapping[str, Any], step: int, process: Process) -> bool:
        """Return True if another generation is announced: all ranks return the same.

        After the exchange all ranks have ended the step, so the set of the step before is complete, without any one host,
        and the one before that is written over.  Raises: ConfigError on every rank if values differ between ranks.
        """
        self.memory.receive()
        rank, size = self.group.rank(), self.group.size()
        contents = contents_of(state, rank, size, self.windows)
        BufferCheck(contents, "per_rank", rank)
        common = {name: value for name, value in contents.values.items() if name not in contents.divided}
        digest = int(sum_of(json.dumps(common).encode())[:15], 16)
        number = cast(Generation, process.generation).number
        facts = [process.newest.number, int(contents.held != self.held), digest, -digest]
        words = torch.tensor(facts, dtype=torch.int64, device="cpu")
        largest_words(words, self.group)
        newest, is_new, most, least = words.tolist()
        if most != -least:
            merged(gather_objects(common, self.group))
        if is_new:
            texts = gather_objects(held_to_text(contents.held.values()), self.group)
            writes = share_out([held_from_text(text) for text in texts])
            self.held, self.writes = contents.held, tuple(write for write in writes if write.rank == rank)
        self.memory.write(CommitMark(step, number, size), self.writes, contents)
        if newest > number:
            self.memory.receive()
        return newest > number


class ElasticRun(Generic[T]):
    """The loop of :func:`elastic`.

    Attributes:
        state: what ``build()`` returned last; None before.  number: steps that are done.
        recoveries: of this rank, in order.
    """

    def __init__(
        self, build: Callable[[], T], num_steps: int, num_used: Callable[[int], int], folder: Path | None
    ) -> None:
        self._build, self._num_steps, self._num_used, self._folder = build, num_steps, num_used, folder
        told = json.loads(os.environ[VARIABLE])
        self._terms = ElasticTerms(**told["terms"])
        self._process = Process(int(os.environ["RANK"]), told["address"], told["port"])
        self._commits: _Commits | None = None
        self.state: T | None = None
        self.number = 0
        self.recoveries: list[Recovery] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of this host's memory that the states of the last two steps take, of all ranks."""
        return 0 if self._commits is None else self._commits.memory.num_bytes

    def __iter__(self) -> Iterator[ElasticStep[T]]:
        is_done = False
        patience_s = _PATIENCE_S if self._terms.num_hosts == 1 else _HOSTS_PATIENCE_S
        while True:
            try:
                if self._commits is None:
                    self._begin()
                elif is_done:
                    is_done = False
                    if self._commit(self.number + 1):
                        self._leave()
                        continue
                if self.number >= self._num_steps:
                    commits = cast(_Commits, self._commits)
                    commits.memory.receive()
                    all_have_come(commits.group)
                    self._process.finish()
                    return
            except Exception as error:
                if not self._process.is_lost(error, patience_s):
                    raise
            else:
                step = ElasticStep(self._process, self.number, cast(T, self.state), patience_s)
                try:
                    yield step
                except GeneratorExit:  # the program leaves the loop
                    if step.outcome == "done":
                        self._process.finish()
                    raise
                if not step.outcome:
                    raise UsageError(
                        "elastic: the step was not entered; write: for step in run: with step as state: ..."
                    )
                is_done = step.outcome == "done"
                del step
                if is_done:
                    continue
            self._leave()

    def _commit(self, number: int) -> bool:
        assert self._commits is not None
        has_next = self._commits.commit(_named(self.state), number, self._process)
        self.number = number
        return has_next

    def _leave(self) -> None:
        with suppress(RuntimeError):
            if self._commits is not None:  # what has come may be needed
                self._commits.memory.receive(may_wait=False)
        self.state, self._commits = None, None
        finish_all()  # no save of a lost group is in flight, which would remove the next one's folder
        gc.collect()  # modules and their hooks refer to each other, and to groups
        self._process.leave()

    def _begin(self) -> None:
        """Join the next generation and restore the newest state that all ranks of an earlier one have written."""
        left_s = time.monotonic()
        process = self._process
        generation = process.join("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", self._num_used)
        joined_s = time.monotonic()
        world = cast(dist.ProcessGroup, dist.group.WORLD)
        group = world if is_gloo(world) else group_of(range(world.size()), "gloo")
        all_have_come(group)  # so that no rank of an earlier generation still writes
        process.note_formed()
        note("elastic recovery", f"generation {generation.number}")
        self.state = self._build()
        process.set_timeouts()
        named = _named(self.state)
        built_s = time.monotonic()
        hosts = [self._terms.host_of(each) for each in generation.members]
        memory = StateMemory(json.loads(os.environ[VARIABLE])["fds"], hosts, group)
        saved = memory.read()
        self._commits = _Commits(memory, group)
        if saved is not None:
            saved.load(named, group, memory.num_hosts)
            self.number = saved.moment.step
        else:
            self.number = 0
            if self._folder is not None and list_checkpoints(Files(), self._folder):
                self.number = load(self._folder, named, fallback=True).step
            self._note_loss(memory.lost_step)
            self._commit(self.number)
        seconds = {
            "detection": left_s - generation.seen_s,
            "groups": joined_s - left_s,
            "build": built_s - joined_s,
            "shards": time.monotonic() - built_s,
        }
        if generation.number > 1:
            self.recoveries.append(Recovery(self.number, world.size(), generation.cause, seconds))
            if not world.rank():
                after = f"after step {self.number}" if self.number else "from the beginning"
                logger.warning("elastic: %s; %d ranks go on %s", generation.cause, world.size(), after)

    def _note_loss(self, lost_step: int) -> None:
        lost = f"elastic: the state after step {lost_step} is lost with the hosts that had both copies of a part of it"
        if lost_step and not self.number:
            raise StateError(f"{lost}: give elastic() the folder= of checkpoints, and start again")
        if lost_step and not dist.get_rank():
            logger.warning("%s; going on from the checkpoint after step %d", lost, self.number)


def _named(state: object) -> Mapping[str, Any]:
    if isinstance(state, Mapping):
        return cast(Mapping[str, Any], state)
    if isinstance(state, tuple) and len(cast(tuple[Any, ...], state)) == 2:
        return dict(zip(("model", "optimizer"), cast(tuple[Any, ...], state), strict=True))
    raise ConfigError(
        f"elastic: build() returned a {type(state).__name__}, expected (model, optimizer), or a dict of what outlives a rank, "
        "as {'model': model, 'optimizer': optimizer, 'scheduler': scheduler}"
    )


@explains_arguments
def elastic(
    build: Callable[[], T],
    *,
    num_steps: int,
    num_microbatches: int | None = None,
    folder: str | Path | None = None,
) -> ElasticRun[T]:
    """Make ``num_steps`` steps on ranks that may be killed and may join: the others go on, without reading a file.

    Run the program with ``shardwise run --elastic``.  After a loss, ranks make a new default process group, call ``build``
    again, take the state after the newest step that all had ended from the launcher's memory, and make the step again, whatever
    their number now is.

    Args:
        build: makes the model and the optimizer on the present default process group, which exists when it is called; it
            returns ``(model, optimizer)``, or a dict of all that outlives a rank, as for :func:`shardwise.checkpoint.save`.
        num_microbatches: of a step.  Only a number of ranks that divides it takes part; the others wait.
        folder: of checkpoints.  The newest that verifies is where a run begins that has no state in memory.

    Raises: StateError unless ``shardwise run --elastic`` has started this process, or if a default process group exists.

    Example:
        >>> for step in shardwise.elastic(build, num_steps=1000):  # doctest: +SKIP
        ...     with step as (model, optimizer):
        ...         model(batch_of(step.number)).backward()
        ...         optimizer.step()
    """
    if VARIABLE not in os.environ:
        raise StateError(
            "elastic: this process was not started by shardwise run --elastic -n N SCRIPT. Other launchers (torchrun) end all "
            "ranks when one is lost, so that none could go on"
        )
    if dist.is_initialized():
        raise StateError("elastic: a default process group exists; do not make one, elastic makes one after each loss")
    if num_steps < 0 or (num_microbatches is not None and num_microbatches < 1):
        raise ConfigError(
            f"elastic: num_steps is {num_steps} and num_microbatches {num_microbatches}, expected 0 or more, and 1 or more"
        )

    OptimizerSteps.is_on = False

    def num_used(num_ranks: int) -> int:
        return max(n for n in range(num_ranks + 1) if n == 0 or not (num_microbatches or n) % n)

    return ElasticRun(build, num_steps, num_used, None if folder is None else Path(folder))

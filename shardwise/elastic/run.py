"""``elastic``: steps whose ranks may be lost, and may join, between any two lines of them."""

from __future__ import annotations

import base64
import gc
import json
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.arguments import explains_arguments
from shardwise.checkpoint.files import Files, list_checkpoints
from shardwise.checkpoint.load import load
from shardwise.checkpoint.save import finish_all
from shardwise.consistency.process_groups import all_have_come, group_of
from shardwise.elastic.membership import BUILD_S, VARIABLE, Generation, set_timeouts
from shardwise.elastic.memory import OVER, TOLD, StateMemory
from shardwise.elastic.process import Process
from shardwise.elastic.torchrun import RestartedRanks
from shardwise.errors import ConfigError, StateError
from shardwise.formatting import format_ranks
from shardwise.observe import note
from shardwise.torch_private import is_gloo


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


class ElasticRun:
    """The run of :func:`elastic`.

    Attributes:
        state: what ``build()`` returned last.  recoveries: of this rank, in order.
        number: steps that are done and stay: k in the step after the k-th, and k + 1 in its ``on_commit``.
    """

    def __init__(self, build: Callable[[], Any], step: Callable[..., Any], terms: _Terms) -> None:
        self._build, self._step, self._terms = build, step, terms
        self._membership = _open_membership()
        self._memory: StateMemory | None = None  # that the present ranks write into
        self._earlier: weakref.WeakSet[Any] = weakref.WeakSet()  # modules and optimizers of lost ranks
        self._kept: list[dist.ProcessGroup] = []  # those of ranks before a loss whose models the program keeps
        self._untold: list[Any] = []  # what on_commit is to get, if it is to be called
        self._is_last = False
        self._num_waiting = self._num_kept = 0
        self.state: Any = None
        self.number = 0
        self.recoveries: list[Recovery] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of this host's memory that the states of the last two steps take, of all ranks."""
        return 0 if self._memory is None else self._memory.num_bytes

    def stop(self) -> None:
        """Make this step the last one; call it on every rank, within a step."""
        self._is_last = True

    def run(self) -> None:
        """Make all steps."""
        has_next = True
        while has_next or not self._is_done:
            try:
                has_next = self._go_on()
            except BaseException as error:
                if not self._membership.outlives(error):
                    raise
                has_next = True
            if has_next:  # not while the exception holds frames, and they hold models
                self._leave()
        self._membership.finish()

    @property
    def _is_done(self) -> bool:
        return self._is_last or self.number >= self._terms.num_steps

    def _go_on(self) -> bool:
        """Make a step, or what is to be made before or after it; return whether the next generation waits."""
        has_next = False
        memory = self._memory or self._begin()
        if not (self._is_done or self._untold):
            state = self.state
            result = self._step(self, **state) if isinstance(state, Mapping) else self._step(self, *state)
            newest = self._membership.newest.number
            has_next = memory.commit(_named(state), self.number + 1, newest, self._packed(result))
            self.number += 1
            self._untold = [result]
        if self._untold:
            if self._terms.on_commit is not None:
                all_have_come(memory.group)  # all have written the step, so that it stays
                self._terms.on_commit(self, self._untold[0])
            memory.note(TOLD)
            self._untold = []
        if self._is_done and not has_next:
            if self._terms.after is not None:
                self._terms.after(self)
            all_have_come(memory.group)
            memory.note(OVER)
        return has_next

    def _packed(self, result: Any) -> str:
        found = result if self._terms.on_commit is not None else None
        try:
            return base64.b64encode(pickle.dumps((self._is_last, found))).decode()
        except Exception as error:
            raise ConfigError(
                f"elastic: step() returned a {type(result).__name__} that cannot be pickled ({error}): on_commit() may get it "
                "in another process. Return numbers and tensors"
            ) from error

    def _leave(self) -> None:
        named = {} if self.state is None else _named(self.state)
        found = weakref.WeakSet(each for each in named.values() if isinstance(each, nn.Module | torch.optim.Optimizer))
        for each in found:
            if isinstance(each, nn.Module):
                each.register_forward_pre_hook(_refuse, prepend=True)
            else:
                each.register_step_pre_hook(_refuse)
                with suppress(AttributeError, StateError):  # one that copies them
                    each.param_groups = _Earlier()
        each = named = self.state = self._memory = None
        self._untold = []
        finish_all()  # no save of a lost group is in flight, which would remove the next one's folder
        # A backward that was cut leaves tasks in autograd's queue, which hold the graph, and by hooks the model: another one
        # takes them out.
        torch.ones((), requires_grad=True, device="cpu").backward()
        gc.collect()  # modules and their hooks refer to each other, and to groups
        self._num_kept = sum(type(each) is DTensor for each in gc.get_objects())
        self._earlier.update(found)
        if len(found):
            # DDP's reducer ends its group while it holds the GIL, which a thread of the group may need to end.
            self._kept += torch_private.all_groups()
        self._membership.leave()

    def _begin(self) -> StateMemory:
        """Join the next generation and restore the newest state that all ranks of an earlier one have written."""
        moments, membership = [time.monotonic()], self._membership
        generation = membership.join(self._terms.num_used)
        moments.append(time.monotonic())
        set_timeouts(BUILD_S)
        world = cast(dist.ProcessGroup, dist.group.WORLD)
        group = world if is_gloo(world) else group_of(range(world.size()), "gloo")
        all_have_come(group)  # so that no rank of an earlier generation still writes
        note("elastic recovery", f"generation {generation.number}")
        self.state = self._build()
        set_timeouts(membership.timeout_s)
        named = _named(self.state)
        if again := [name for name, value in named.items() if id(value) in map(id, self._earlier)]:
            raise StateError(f"elastic: build() returned {again} of an earlier call: it belongs to {_BEFORE}")
        moments.append(time.monotonic())
        self._memory = memory = StateMemory(membership.fds, generation, group)
        saved = memory.load(named)
        if saved is not None:
            self.number, text = saved
            self._is_last, result = pickle.loads(base64.b64decode(text))
            self._untold = [] if memory.is_told else [result]
        else:
            self.number, self._is_last = 0, False
            if self._terms.folder is not None and list_checkpoints(Files(), self._terms.folder):
                self.number = load(self._terms.folder, named, fallback=True).step
            lost = f"elastic: the state after step {memory.lost_step} is lost with the hosts that had both copies of a part"
            if memory.lost_step and not self.number:
                raise StateError(f"{lost}: give elastic() the folder= of checkpoints, and start again")
            if memory.lost_step and not world.rank():
                say(f"{lost}; going on from the checkpoint after step {self.number}")
            memory.commit(named, self.number, generation.number, self._packed(None))
            memory.note(TOLD)
        if generation.number > 1:
            parts = [after - before for before, after in pairwise([generation.begin_s, *moments, time.monotonic()])]
            seconds: dict[str, float] = dict(zip(("detection", "groups", "build", "shards"), parts, strict=True))
            self.recoveries.append(Recovery(self.number, world.size(), generation.cause, seconds))
        if not world.rank():
            self._say(generation)
        return memory

    def _say(self, generation: Generation) -> None:
        used, num_ranks = generation.members, dist.get_world_size()
        if generation.number > 1:
            after = f"after step {self.number}" if self.number else "from the beginning"
            go_on = "1 rank goes on" if num_ranks == 1 else f"{num_ranks} ranks go on"
            say(f"{generation.cause}; {go_on} {after}: {format_ranks(used[:num_ranks], 'process', 'processes')}")
        if self._num_kept:
            kept = f"{self._num_kept} shards are kept outside of what build() returned, as by an average of weights"
            say(f"{kept}: they belong to {_BEFORE}")
        if self._untold and self._terms.on_commit is not None:
            say(f"on_commit of step {self.number} was cut, and is made again")
        before, self._num_waiting = self._num_waiting, len(used) - num_ranks
        if self._num_waiting not in (0, before):
            waiting = f"{self._num_waiting} of {len(used)} processes wait"
            say(f"{waiting}: num_microbatches is divisible by {num_ranks}, not by more")


_BEFORE = "the ranks before the loss. Make all that outlives a rank in build(), and use what step() gets"


def _refuse(of_earlier: object, *_: Any) -> None:
    what = "model" if isinstance(of_earlier, nn.Module) else "optimizer, or what a scheduler or scaler steers,"
    raise StateError(f"elastic: this {what} is of an earlier call of build(): it belongs to {_BEFORE}")


class _Earlier(list[dict[str, Any]]):
    """The parameter groups of an optimizer of earlier ranks: whatever steps it, or steers it, reads them."""

    __iter__ = __getitem__ = __len__ = cast(Any, _refuse)


def say(text: str) -> None:
    """Print a line about the run."""
    print(f"shardwise: {text}", file=sys.stderr, flush=True)


def _open_membership() -> Process | RestartedRanks:
    told = os.environ.get(VARIABLE)
    if told is None:
        if not RestartedRanks.are_here():
            raise StateError(
                "elastic: no launcher that outlives its ranks has started this process. Start it with: shardwise run --elastic "
                "-n N SCRIPT, on several hosts with: torchrun --max-restarts K ... SCRIPT, or by Ray Train"
            )
        return RestartedRanks()
    if dist.is_initialized():
        raise StateError("elastic: a default process group exists; do not make one, elastic makes one after each loss")
    if not told:
        raise StateError("elastic: this process has made an elastic run; a program makes one. Make further steps of it")
    os.environ[VARIABLE] = ""
    return Process(int(os.environ["RANK"]), json.loads(told))


def _named(state: object) -> Mapping[str, Any]:
    if isinstance(state, Mapping):
        return cast(Mapping[str, Any], state)
    if isinstance(state, tuple) and len(cast(tuple[Any, ...], state)) == 2:
        return dict(zip(("model", "optimizer"), cast(tuple[Any, ...], state), strict=True))
    raise ConfigError(
        f"elastic: build() returned a {type(state).__name__}, expected (model, optimizer), or a dict of what outlives a rank, "
        "as {'model': model, 'optimizer': optimizer, 'scheduler': scheduler}"
    )


@dataclass(frozen=True, slots=True)
class _Terms:
    """Arguments of :func:`elastic`."""

    num_steps: int
    num_microbatches: int | None
    on_commit: Callable[[ElasticRun, Any], object] | None
    after: Callable[[ElasticRun], object] | None
    folder: Path | None

    def num_used(self, num_ranks: int) -> int:
        """Return how many of so many ranks take part."""
        return max(n for n in range(num_ranks + 1) if n == 0 or not (self.num_microbatches or n) % n)


@explains_arguments
def elastic(
    build: Callable[[], Any],
    step: Callable[..., Any],
    *,
    num_steps: int,
    num_microbatches: int | None = None,
    on_commit: Callable[[ElasticRun, Any], object] | None = None,
    after: Callable[[ElasticRun], object] | None = None,
    folder: str | Path | None = None,
) -> ElasticRun:
    """Make ``num_steps`` steps on ranks that may be killed and may join: the others go on, without reading a file.

    Run the program with ``shardwise run --elastic``, whose survivors stay alive, or with torchrun or Ray Train, which start all
    ranks again.  After a loss, ranks make a new default process group, call ``build``
    again, take the state after the newest step that all had ended from the launcher's memory, and call ``step`` again, whatever
    their number now is.  What raises in one of the functions because a rank was lost is caught, wherever it was raised.

    Args:
        build: makes the model and the optimizer on the present default process group, which exists when it is called; it
            returns ``(model, optimizer)``, or a dict of all that outlives a rank, as for :func:`shardwise.checkpoint.save`.
        step: makes a step, as ``step(run, model, optimizer)``, or ``step(run, **state)`` with the dict; may be called again.
        num_microbatches: of a step.  Only a number of ranks that divides it takes part; the others wait.
        on_commit: is called as ``on_commit(run, result)`` once a step stays, with what it returned on the rank of this number;
            it logs, evaluates and saves.  If a rank is lost within it, it is made again.
        after: is called as ``after(run)`` after the last step; if a rank is lost within it, it is made again.
        folder: of checkpoints.  The newest that verifies is where a run begins that has no state in memory.

    Returns: the run.  From then on a lost rank ends it.
    Raises: StateError unless one of them has started this process.  ``shardwise run``: or if a default process group exists.

    Example:
        >>> def step(run, model, optimizer):  # doctest: +SKIP
        ...     loss = model(batch_of(run.number)).mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss.item()
        >>> shardwise.elastic(build, step, num_steps=1000, on_commit=log)  # doctest: +SKIP
    """
    if num_steps < 0 or (num_microbatches is not None and num_microbatches < 1):
        raise ConfigError(
            f"elastic: num_steps is {num_steps} and num_microbatches {num_microbatches}, expected 0 or more, and 1 or more"
        )
    terms = _Terms(num_steps, num_microbatches, on_commit, after, None if folder is None else Path(folder))
    run = ElasticRun(build, step, terms)
    run.run()
    return run

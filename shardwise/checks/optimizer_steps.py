"""Checks that all ranks step their optimizers alike: as often, and with the same learning rates."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from shardwise.consistency.agreement import MismatchCheck, first_difference
from shardwise.errors import DesyncError
from shardwise.fsdp.unit import Unit

_logger = logging.getLogger("shardwise.checks")
_OPTIONS = ("lr", "weight_decay", "momentum", "betas")
_watches: list[RemovableHandle] = []  # at most one entry
_of_roots: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()


class OptimizerSteps:
    """The steps of the optimizers of one root.  Ranks compare them when they change, so the usual step costs nothing.

    That is if steps come after another number of backwards than the last ones, or do not come, and if options have changed for
    the first, second, fourth, eighth... time, since schedules change them in every step.  No rank waits: one with news posts
    them at the end of a backward, and reads those of the next rank at the end of its next backward, which that rank has begun,
    so that it has posted its own, or has none.
    """

    # Set by elastic runs: ranks that join, or go back, initialize their optimizers by a step, and commits compare the states.
    is_on = True

    def __init__(self, units: Sequence[Unit]) -> None:
        self._ids = {id(param.sharded) for unit in units for param in unit.params}
        self._units: Sequence[Unit] = units  # none once the warning about unsynced gradients was given
        self._new: list[tuple[str, list[tuple[str, Any]]]] = []  # steps since the last backward, with their options
        self._last: list[tuple[str, list[tuple[str, Any]]]] = []
        self._num_steps = self._num_changes = 0
        self._num_backwards = self._usual = 1  # since the last step, that included; and between that and the one before
        self._posted: list[str] = []
        _of_roots.add(self)
        if not _watches:
            _watches.append(register_optimizer_step_post_hook(_see_step))

    def see(self, optimizer: Optimizer) -> None:
        """Note a step of ``optimizer``, if it has parameters of the root."""
        groups = optimizer.param_groups
        if self.is_on and any(id(param) in self._ids for group in groups for param in group["params"]):
            found = [(name, group.get(name)) for group in groups for name in _OPTIONS]
            unsynced = [p.fqn for unit in self._units for p in unit.earlier.unsynced if p.sharded.grad is not None]
            if unsynced:
                self._units = ()
                _logger.warning(
                    "an optimizer steps on %s, whose gradient has microbatches without sync, not averaged over ranks: each "
                    "rank trains a model of its own. The last microbatch before a step must sync",
                    min(unsynced),
                )
            # Not tensors, since to read one may wait for a device.
            self._new.append((type(optimizer).__name__, [e for e in found if isinstance(e[1], int | float | tuple)]))

    def compare(self, check: MismatchCheck, number: int) -> None:
        """Compare the steps before the last backward; post those before this one, the ``number``-th, if they are unusual.

        Raises: DesyncError on ranks whose next rank has made other steps, if this rank's have changed.
        """
        if self._posted:
            mine, self._posted = self._posted, []
            other = check.members[(check.members.index(check.rank) + 1) % len(check.members)]
            last, *theirs = json.loads(check.posted(f"steps/{1 - number % 2}", other) or "[0]")
            theirs = theirs if last == number - 1 else ["steps and options as before"]
            if mine != theirs:
                raise DesyncError(
                    f"ranks do not step their optimizers alike: {first_difference({check.rank: mine, other: theirs})}. Skip a "
                    "step, or change a learning rate, by a value that all ranks have: all_reduce it first"
                )
        is_news, new, self._new = False, self._new, []
        if new:
            self._num_steps += 1
            is_news = self._num_steps == 1 or self._num_backwards != self._usual
            self._usual, self._num_backwards = self._num_backwards, 0
            if new != self._last:
                self._num_changes, self._last = self._num_changes + 1, new
                is_news |= _is_rare(self._num_changes)
        self._num_backwards += 1
        if is_news or (self._num_steps and _is_rare(self._num_backwards - self._usual)):
            steps = f"{self._num_steps} steps, the last one {self._num_backwards} backwards ago"
            self._posted = [f"{steps}: {name}({', '.join(f'{k}={v}' for k, v in each)})" for name, each in self._last]
            check.post(f"steps/{number % 2}", json.dumps([number, *self._posted]))


def _is_rare(number: int) -> bool:
    return number > 0 and not number & (number - 1)


def _see_step(optimizer: Optimizer, *_: Any) -> None:
    for each in list(_of_roots):
        each.see(optimizer)

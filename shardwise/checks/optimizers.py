"""Checks of optimizers: their steps reshard units, count as writes, are refused where they would be lost, and are compared."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwise import observe
from shardwise.consistency.agreement import MismatchCheck, first_difference
from shardwise.errors import ConfigError, DesyncError, StateError
from shardwise.fsdp.engine import Engine, live_engines, on_new_units
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.roots import serve_others
from shardwise.fsdp.unit import Unit
from shardwise.observe import unit_in_words

_logger = logging.getLogger("shardwise.checks")
_warned: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines with a warning about steps without any gradient
# The optimizers that were checked, with the number of their parameters then: none of these is an outdated form of a parameter
# of the living engines.
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_watches: list[RemovableHandle] = []  # made by watch_optimizers alone


def register() -> None:
    """Watch the optimizers of every process that has units."""
    on_new_units.append(watch_optimizers)


def watch_optimizers() -> None:
    """Install global optimizer hooks that reshard units, count steps as writes, and note them."""
    _checked.clear()  # a new engine may have other forms of their parameters
    if not _watches:
        _watches.append(register_optimizer_step_pre_hook(before_optimizer_step))
        _watches.append(register_optimizer_step_post_hook(after_optimizer_step))
        _watches.append(register_optimizer_step_post_hook(_see_step))


def before_optimizer_step(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Reshard units before the optimizer steps on their shards, so that writes to full parameters are copied first.

    Full parameters would be stale after the step, and gathered again in any case.

    Raises: StateError if gradients of these parameters wait for ``finalize_backward`` or for a backward with sync.
    """
    observe.note("optimizer steps", type(optimizer).__name__)
    given = _given_to(optimizer)
    _check_forms(optimizer, given)
    serve_others(given)
    engines = [*filter(_heeds_steps, live_engines)]
    ids = {*map(id, given)} if engines else set[int]()
    for engine in engines:
        stepped = [param for unit in engine.units for param in unit.params if id(param.sharded) in ids]
        _refuse_early(engine, stepped)
        if engine.awaits_backward:
            _look_for_gradients(engine, stepped)
        for unit in () if engine.is_in_step else dict.fromkeys(param.unit() for param in stepped):
            if unit.has_copies:
                unit.reshard()


def _heeds_steps(engine: Engine) -> bool:
    """Return True if a step may be too early, or makes registered full parameters stale."""
    is_early = engine.forwards or engine.awaits_backward or engine.manual.awaits_completion
    return bool(is_early) or any(u.has_copies or u.earlier.waiting or u.has_gradients for u in engine.units)


def _given_to(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# Optimizers of torch whose own step raises in DTensor, or is another update, over shards: what to write instead.
_IN_A_SHARDED_OPTIMIZER = "write shardwise.ShardedOptimizer(dict(model.named_parameters()), torch.optim.{}, ...)"
_NOT_OVER_SHARDS: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: f"it takes norms over whole matrices; {_IN_A_SHARDED_OPTIMIZER}",
    torch.optim.LBFGS: "its history takes inner products over all parameters; take another optimizer, or keep whole, plain "
    "parameters: shardwise.replicate(model, parameters='plain')",
    torch.optim.Rprop: f"it writes to single elements, which DTensor refuses; {_IN_A_SHARDED_OPTIMIZER}",
}


def _check_forms(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """Raise StateError for ``params`` that a step would not reach, ConfigError for a class that cannot step on shards."""
    if _checked.get(optimizer) == len(params):
        return
    kind = next((kind for kind in _NOT_OVER_SHARDS if isinstance(optimizer, kind)), None)
    given = {*map(id, params)}
    unknown = {id(param) for param in params if kind is not None and isinstance(param, DTensor)}
    early: list[str] = []
    for param in (param for engine in live_engines for unit in engine.units for param in unit.params):
        sharded = param.sharded
        if param.original() is not sharded and id(param.original()) in given:
            early.append(param.fqn)
        unknown.discard(id(sharded))
        is_cut = isinstance(sharded, DTensor) and any(place.is_shard() for place in sharded.placements)
        if kind is not None and id(sharded) in given and is_cut:
            reason = _NOT_OVER_SHARDS[kind].format(kind.__name__)
            raise ConfigError(f"{kind.__name__} cannot step on {param.fqn}, which is sharded: {reason}")
        if any(each is not sharded and id(each) in given for each in (param.full, param.registered_form)):
            raise StateError(
                f"an optimizer was given the full form of {param.fqn}, or its form on a smaller mesh: its steps would not "
                "reach the model. Build the optimizer before forward; after an interrupt call reset_iter_state()"
            )
    if early:
        raise StateError(
            f"an optimizer was built before fully_shard and holds the unsharded {early[:4]}{'...' if len(early) > 4 else ''}; "
            "its steps would not reach the model. Build the optimizer after fully_shard."
        )
    if not unknown:  # else the closure runs the first forward: it is checked after the step
        _checked[optimizer] = len(params)


def _refuse_early(engine: Engine, stepped: Sequence[ShardedParam]) -> None:
    """Raise StateError if an optimizer steps on parameters of ``engine`` too early."""
    for param in stepped:
        where = unit_in_words(param.unit().name)
        if param.full is not None and param.full is not param.sharded and param.full.grad is not None:
            engine.forget_step()
            raise StateError(
                f"a backward has computed a gradient of {param.fqn} without reaching an output of {where}, from a tensor that "
                "forward has left elsewhere: it is not reduced. Return it from forward, or keep it in a module's attribute"
            )
        if engine.forwards:
            raise StateError(
                f"an optimizer steps inside a forward of {unit_in_words(engine.forwards[0][0].name)}, or an interrupt has "
                "ended that. Step after it; after an interrupt call reset_iter_state() on the root module first"
            )
        if engine.manual.awaits_completion:
            verb = "call" if engine.manual.completion is None else "wait() for"
            raise StateError(
                f"an optimizer steps on {param.fqn} ({where}) before the gradients of its last backward are complete, in "
                f"manual backward finalization; {verb} finalize_backward() on the root module first"
            )
        mark = param.unit().earlier.waiting.get(param)
        if mark is not None and param.sharded.grad is mark:
            raise StateError(f"an optimizer steps too early: {mark.why}")


def _look_for_gradients(engine: Engine, stepped: Sequence[ShardedParam]) -> None:
    """Warn of an optimizer step on parameters without any gradient, after a forward whose backward did not run."""
    trained = [param for param in stepped if param.sharded.requires_grad]
    engine.awaits_backward = False
    if trained and engine not in _warned and all(param.sharded.grad is None for param in trained):
        _warned.add(engine)
        _logger.warning(
            "an optimizer steps on %s and %d other sharded parameters, none of which has a gradient, although a forward has "
            "built a graph. backward(inputs=...) and torch.autograd.grad do not find them: call backward() without inputs",
            *(trained[0].fqn, len(trained) - 1),
        )


def after_optimizer_step(optimizer: Optimizer, *_: Any) -> None:
    """Bump the version counters of shards after a step: torch's multi-tensor and fused steps do not."""
    given = _given_to(optimizer)
    _check_forms(optimizer, given)
    if written := [param for param in given if isinstance(param, DTensor)]:
        torch.autograd.graph.increment_version(written)


# ---- Do all ranks step their optimizers alike: as often, and with the same learning rates?

_OPTIONS = ("lr", "weight_decay", "momentum", "betas")
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
        self._units, self._has_warned = units, False
        self.look_again()
        self._new: list[tuple[str, list[tuple[str, Any]]]] = []  # steps since the last backward, with their options
        self._last: list[tuple[str, list[tuple[str, Any]]]] = []
        self._num_steps = self._num_changes = 0
        self._num_backwards = self._usual = 1  # since the last step, that included; and between that and the one before
        self._posted: list[str] = []
        _of_roots.add(self)

    def look_again(self) -> None:
        """Take the parameters that the units have now: user code may have put others in their place."""
        self._ids = {id(param.sharded) for unit in self._units for param in unit.params}

    def see(self, optimizer: Optimizer) -> None:
        """Note a step of ``optimizer``, if it has parameters of the root."""
        if self.is_on and not self._ids.isdisjoint(map(id, _given_to(optimizer))):
            found = [(name, group.get(name)) for group in optimizer.param_groups for name in _OPTIONS]
            unsynced = [p.fqn for unit in self._units for p in unit.earlier.unsynced if p.sharded.grad is not None]
            if unsynced and not self._has_warned:
                self._has_warned = True
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

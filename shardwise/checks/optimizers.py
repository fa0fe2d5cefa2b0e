"""Checks of optimizers: their steps reshard units, count as writes, and are refused where they would not reach the model."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwise import observe
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.engine import Engine, live_engines, on_new_units
from shardwise.fsdp.roots import serve_others
from shardwise.observe import unit_in_words

_logger = logging.getLogger("shardwise")
_warned: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines with a warning about steps without any gradient
# By id and number of parameters, the optimizers that were checked: none of their parameters is an outdated form of a
# parameter of the living engines.
_checked: dict[tuple[int, int], weakref.ref[torch.optim.Optimizer]] = {}
_watches: list[RemovableHandle] = []  # two entries, made by watch_optimizers alone


def register() -> None:
    """Watch the optimizers of every process that has units."""
    on_new_units.append(watch_optimizers)


def watch_optimizers() -> None:
    """Install global optimizer hooks that reshard units and count steps as writes."""
    _checked.clear()  # a new engine may have other forms of their parameters
    if not _watches:
        _watches.append(register_optimizer_step_pre_hook(before_optimizer_step))
        _watches.append(register_optimizer_step_post_hook(after_optimizer_step))


def before_optimizer_step(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Reshard units before the optimizer steps on their shards, so that writes to full parameters are copied first.

    Full parameters would be stale after the step, and gathered again in any case.

    Raises: StateError if gradients of these parameters wait for ``finalize_backward`` or for a backward with sync.
    """
    observe.note("optimizer steps", type(optimizer).__name__)
    if _key_of(optimizer) not in _checked:
        _check_forms(optimizer)
    serve_others([param for group in optimizer.param_groups for param in group["params"]])
    engines = [engine for engine in live_engines if engine.heeds_steps]
    stepped = _stepped(optimizer) if engines else set[int]()
    for engine in engines:
        _refuse_early(engine, stepped)
        if engine.awaits_backward:
            _look_for_gradients(engine, stepped)
        if not engine.is_in_step:
            engine.reshard_stepped(stepped)


def _stepped(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


# Optimizers of torch whose own step raises in DTensor, or is another update, over shards: what to write instead.
_IN_A_SHARDED_OPTIMIZER = "write shardwise.ShardedOptimizer(dict(model.named_parameters()), torch.optim.{}, ...)"
_NOT_OVER_SHARDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adafactor: f"it takes norms over whole matrices; {_IN_A_SHARDED_OPTIMIZER}",
    torch.optim.LBFGS: "its history takes inner products over all parameters; take another optimizer, or keep whole, plain "
    "parameters: shardwise.replicate(model, parameters='plain')",
    torch.optim.Rprop: f"it writes to single elements, which DTensor refuses; {_IN_A_SHARDED_OPTIMIZER}",
}


def _key_of(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return what changes when an optimizer is another one or has got more parameters."""
    return id(optimizer), sum(len(group["params"]) for group in optimizer.param_groups)


def _check_forms(optimizer: torch.optim.Optimizer) -> None:
    key = _key_of(optimizer)
    stepped = _stepped(optimizer)
    kind = next((kind for kind in _NOT_OVER_SHARDS if isinstance(optimizer, kind)), None)
    unknown = {id(p) for group in optimizer.param_groups for p in group["params"] if kind and isinstance(p, DTensor)}
    early: list[str] = []
    for param in (param for engine in live_engines for unit in engine.units for param in unit.params):
        original = param.original()
        if original is not None and original is not param.sharded and id(original) in stepped:
            early.append(param.fqn)
        unknown.discard(id(param.sharded))
        placements = param.sharded.placements if isinstance(param.sharded, DTensor) else ()
        if kind is not None and id(param.sharded) in stepped and any(place.is_shard() for place in placements):
            reason = _NOT_OVER_SHARDS[kind].format(kind.__name__)
            raise ConfigError(f"{kind.__name__} cannot step on {param.fqn}, which is sharded: {reason}")
        forms = (each for each in (param.full, param.registered_form) if each is not param.sharded)
        if any(each is not None and id(each) in stepped for each in forms):
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
        _checked[key] = weakref.ref(optimizer, lambda _: _checked.pop(key, None))


def _refuse_early(engine: Engine, stepped: set[int]) -> None:
    """Raise StateError if an optimizer steps on a parameter of ``engine``, one of the ids ``stepped``, too early."""
    for param in [param for unit in engine.units for param in unit.params if id(param.sharded) in stepped]:
        where = unit_in_words(param.unit().name)
        if param.full is not None and param.full is not param.sharded and param.full.grad is not None:
            engine.forget_step()
            raise StateError(
                f"a backward has computed a gradient of {param.fqn} without reaching an output of {where}, from a tensor that "
                "forward has left elsewhere: it is not reduced. Return that tensor from forward, or keep it in an attribute of "
                "the module"
            )
        if engine.forwards:
            raise StateError(
                f"an optimizer steps inside a forward of {unit_in_words(engine.forwards[0][0].name)}, or an interrupt has "
                "ended that. Step after it; after an interrupt call reset_iter_state() on the root module first"
            )
        if engine.manual.awaits_completion:
            raise StateError(
                f"an optimizer steps on {param.fqn} ({where}) before the gradients of its last backward are complete, in "
                f"manual backward finalization; {engine.manual.missing} on the root module first"
            )
        mark = param.unit().earlier.waiting.get(param)
        if mark is not None and param.sharded.grad is mark:
            raise StateError(f"an optimizer steps too early: {mark.why}")


def _look_for_gradients(engine: Engine, stepped: set[int]) -> None:
    """Warn of an optimizer step on parameters without any gradient, after a forward whose backward did not run."""
    params = [param for unit in engine.units for param in unit.params if id(param.sharded) in stepped]
    trained = [param for param in params if param.sharded.requires_grad]
    engine.awaits_backward = False
    if trained and engine not in _warned and all(param.sharded.grad is None for param in trained):
        _warned.add(engine)
        _logger.warning(
            "an optimizer steps on %s and %d other sharded parameters, none of which has a gradient, although a forward has "
            "built a graph. backward(inputs=...) and torch.autograd.grad do not find them: call backward() without inputs",
            trained[0].fqn,
            len(trained) - 1,
        )


def after_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Bump the version counters of shards after a step: torch's multi-tensor and fused steps do not."""
    if _key_of(optimizer) not in _checked:
        _check_forms(optimizer)
    written = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    if written:
        torch.autograd.graph.increment_version(written)

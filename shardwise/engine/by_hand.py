"""Ends of steps that somebody asks for: ``finalize_backward``, and stages of pipelines after their last microbatch."""

from __future__ import annotations

from shardwise.engine.engine import Engine
from shardwise.engine.staged import check_weights
from shardwise.errors import StateError
from shardwise.units.unit import is_in_backward


def set_manual(engine: Engine, is_manual: bool) -> None:
    """Let :func:`complete` set gradients, or the end of every backward.

    Raises: StateError if that would change while gradients of a backward are on their way.
    """
    engine.manual.set_on(is_manual, engine.watch.is_running or is_in_backward(), engine.reductions.has_deferred)


def end_step(engine: Engine) -> None:
    """Reduce what backwards without sync have left, and set gradients.

    Gradients count that backwards have accumulated, and those that somebody has assigned to full parameters.

    Raises: StateError in a backward, or if some of the weights' gradients are lost.
    """
    if engine.watch.is_running or is_in_backward():
        raise StateError("a step cannot be ended during backward; end it after the last backward()")
    if engine.watch.has_raised:
        engine.abort_backward()
    try:
        _reduce_rest(engine)
        params = engine.commit()
    except BaseException:
        engine.abort_backward()
        raise
    engine.run_hooks(params)


def launch_rest(engine: Engine) -> object | None:
    """Reduce what backwards have left; return what :func:`complete` takes, None if no backward has come.

    Raises: StateError in a backward, without manual finalization, or before an earlier call has been completed.
    """
    manual = engine.manual
    is_open = manual.check_launch(engine.watch.is_running or is_in_backward())
    if engine.watch.has_raised:
        engine.abort_backward()
        is_open = manual.is_open
    if not is_open:
        return None
    manual.hold_open()
    try:
        _reduce_rest(engine)
        engine.defer()
    except BaseException:
        engine.abort_backward()
        raise
    return manual.launch()


def _reduce_rest(engine: Engine) -> None:
    engine.hide_gradients()
    engine.enter_span("backward")
    for unit in reversed(engine.units):
        check_weights(unit)
        gradients = unit.take_gradients()
        if unit.policy.sync and (gradients or engine.is_due(unit)):
            engine.reductions.launch(unit, gradients)
        elif gradients:
            engine.reductions.hold(unit, gradients)
        if unit.policy.reshard_after_backward and unit.is_full:
            engine.reshard_in_step(unit)


def complete(engine: Engine, completion: object) -> None:
    """Wait for reductions and set gradients.  Raises: StateError if ``completion`` has been forgotten."""
    engine.manual.check_completion(completion)
    engine.hide_gradients()
    try:
        params = engine.commit()
    except BaseException:
        engine.show_gradients()
        raise
    engine.manual.complete()
    engine.run_hooks(params)

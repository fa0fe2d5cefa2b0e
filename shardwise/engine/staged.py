"""Backwards in parts, as stages of pipelines run them: of the inputs first, of the weights later and by hand."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.errors import StateError
from shardwise.events import unit_in_words
from shardwise.units.local_gradients import lies_as
from shardwise.units.unit import Unit


def hold_assigned(units: Iterable[Unit]) -> None:
    """Get ready for one more backward without sync, outside of forward and backward.

    Gradients that somebody has computed apart and assigned to full parameters are held, so that sums are made in the order of
    microbatches.  Units whose weights' gradients are computed apart are full before that backward begins: whoever
    does so asks for their parameters first.
    """
    for unit in units:
        if unit.is_full and _has_assigned(unit) and (assigned := unit.take_gradients()):
            unit.earlier.hold(assigned)
        if unit.backward.owes_weights:
            unit.wait_with_lenders(None)
            unit.keep()


def _has_assigned(unit: Unit) -> bool:
    # Between steps a full parameter that stays shows the gradient of its shard, too: that one has been reduced.
    fulls = (param.full for param in unit.params)
    return any(full is not None and full.grad is not None and lies_as(full, full.grad) for full in fulls)


def check_weights(unit: Unit) -> None:
    """Raise StateError if gradients of the unit's weights are lost, because they were not there when backward began."""
    if not unit.backward.has_lost_weights:
        return
    unit.backward.has_lost_weights = False
    raise StateError(
        f"{unit_in_words(unit.name)} was sharded when a backward of its inputs alone began, so the gradients of its weights "
        "are lost. A schedule that computes them apart (zero bubbles) needs stages sharded with reshard_after_forward=False"
    )

"""Fixes of wrong numbers, each taken back: what the engine did before it knew better, to see that the fuzzer finds that.

They replace functions in the ranks of a runner, and nowhere else; the names in :data:`FIXES` are the rules that then hold
no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from shardwise.engine.engine import Engine
from shardwise.torch_private import parameters_of
from shardwise.units import flat_bucket
from shardwise.units.backward import Stage
from shardwise.units.group import ShardGroup
from shardwise.units.param import Slot
from shardwise.units.unit import Unit
from shardwise.zero import overlap
from shardwise.zero.stepper import ShareStepper

# What the functions of these modules look up by name.
_IN_BUCKET = cast(Any, flat_bucket)
_IN_OVERLAP = cast(Any, overlap)


def _read_buckets_row_major() -> None:
    _IN_OVERLAP._gradient_views = lambda bucket: bucket.gradients()


def _tell_no_follower() -> None:
    cast(Any, Slot).of = lambda module, name: Slot(parameters_of(module), name)


def _end_at_the_first_pass() -> None:
    inputs_done = Engine.inputs_done

    def at_once(self: Engine, unit: Unit, through: object) -> None:
        unit.backward.open_passes.clear()
        inputs_done(self, unit, through)

    cast(Any, Engine).inputs_done = at_once


def _end_before_the_borrower() -> None:
    def done(self: Engine, unit: Unit, through: object) -> None:
        backward = unit.backward
        backward.open_passes.discard(through)
        is_left = backward.stage is Stage.RUNNING and not backward.open_passes
        if is_left and (backward.arrived or not backward.expects_any):
            self.after_backward(unit)

    cast(Any, Engine).inputs_done = done


def _clip_by_own_norm() -> None:
    cast(Any, ShareStepper).sum_over_ranks = lambda self, value, is_max=False: value


def _watch_no_full_form() -> None:
    cast(Any, ShardGroup).mark_kept = lambda self: None


def _move_what_is_held() -> None:
    _IN_BUCKET.is_held = lambda tensor: False
    _IN_BUCKET.is_own = lambda tensor: False


FIXES: dict[str, Callable[[], None]] = {
    "buckets of DDP lie in the parameters' memory order": _read_buckets_row_major,
    "modules that follow a parameter are told": _tell_no_follower,
    "a unit ends when backward has left all its passes": _end_at_the_first_pass,
    "a unit that lends a weight ends after the borrower": _end_before_the_borrower,
    "owned gradients are clipped by the norm of all": _clip_by_own_norm,
    "what is done to full forms reaches the shards": _watch_no_full_form,
    "memory that somebody holds stays where it is": _move_what_is_held,
}

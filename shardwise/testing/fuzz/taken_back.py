"""Fixes of wrong numbers, each taken back: what the engine did before it knew better, to see that the fuzzer finds that.

They replace functions in the ranks of a runner, and nowhere else; the names in :data:`FIXES` are the rules that then hold
no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from shardwise.engine import build
from shardwise.engine import engine as engine_file
from shardwise.engine.engine import Engine
from shardwise.optim.named_state import OwnGroup
from shardwise.torch_private import parameters_of
from shardwise.units import shards
from shardwise.units.gradients import Reduction
from shardwise.units.group import ShardGroup
from shardwise.units.param import Slot
from shardwise.units.unit import Unit
from shardwise.zero import overlap
from shardwise.zero.stepper import ShareStepper

# What the functions of these modules look up by name.
_IN_BUILD, _IN_ENGINE, _IN_SHARDS = cast(Any, build), cast(Any, engine_file), cast(Any, shards)
_IN_OVERLAP = cast(Any, overlap)


def _use_what_was_gathered_before() -> None:
    def is_from_now(self: Unit, state: Any, span: int | None) -> bool:
        return True

    cast(Any, Unit)._is_from_now = is_from_now


def _lose_partial_sums() -> None:
    launch = _IN_ENGINE.launch_reductions
    _IN_ENGINE.launch_reductions = lambda group, gradients, terms, partial, kept=(): launch(
        group, gradients, terms, {}, kept
    )


def _read_buckets_row_major() -> None:
    _IN_OVERLAP._gradient_views = lambda bucket: bucket.gradients()


class _Forgetful(dict[int, Any]):
    def __contains__(self, key: object) -> bool:
        return False

    def get(self, key: int, default: Any = None) -> Any:
        return default


def _own_a_shared_weight_twice() -> None:
    _IN_BUILD._managed_plain = _Forgetful()


def _tell_no_follower() -> None:
    cast(Any, Slot).of = lambda module, name: Slot(parameters_of(module), name)


def _end_at_the_first_pass() -> None:
    inputs_done = Engine.inputs_done

    def at_once(self: Engine, unit: Unit, through: object) -> None:
        unit.open_passes.clear()
        inputs_done(self, unit, through)

    cast(Any, Engine).inputs_done = at_once


def _end_before_the_borrower() -> None:
    def done(self: Engine, unit: Unit, through: object) -> None:
        unit.open_passes.discard(through)
        if unit.in_backward and not unit.open_passes and (unit.gradient_arrived or not unit.num_expected):
            self.after_backward(unit)

    cast(Any, Engine).inputs_done = done


def _clip_by_own_norm() -> None:
    cast(Any, ShareStepper).sum_over_ranks = lambda self, value, is_max=False: value


def _ask_for_names() -> None:
    make = cast(Any, OwnGroup).__init__
    cast(Any, OwnGroup).__init__ = lambda self, entries, names: make(self, {**entries, "param_names": names}, names)


def _send_what_is_empty() -> None:
    make = cast(Any, Reduction).__init__

    def sending(self: Reduction, *args: Any) -> None:
        make(self, *args)
        self.has_elements = True

    cast(Any, Reduction).__init__ = sending


def _watch_no_full_form() -> None:
    cast(Any, ShardGroup).mark_kept = lambda self: None


def _move_what_is_held() -> None:
    _IN_SHARDS.is_held = lambda tensor: False
    _IN_SHARDS.is_own = lambda tensor: False


FIXES: dict[str, Callable[[], None]] = {
    "nothing gathered before a write is used after it": _use_what_was_gathered_before,
    "partial sums over replicas are kept": _lose_partial_sums,
    "buckets of DDP lie in the parameters' memory order": _read_buckets_row_major,
    "a plain weight belongs to one unit": _own_a_shared_weight_twice,
    "modules that follow a parameter are told": _tell_no_follower,
    "a unit ends when backward has left all its passes": _end_at_the_first_pass,
    "a unit that lends a weight ends after the borrower": _end_before_the_borrower,
    "owned gradients are clipped by the norm of all": _clip_by_own_norm,
    "doors read each other's groups": _ask_for_names,
    "what has no elements does not travel": _send_what_is_empty,
    "what is done to full forms reaches the shards": _watch_no_full_form,
    "memory that somebody holds stays where it is": _move_what_is_held,
}

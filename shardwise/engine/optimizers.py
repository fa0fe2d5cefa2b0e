"""Optimizers that were made before the parameters were sharded."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from shardwise.errors import StateError
from shardwise.units.param import UnitParam


def check_optimizers(params: Iterable[UnitParam]) -> None:
    """Raise StateError if an optimizer still holds parameters from before they were sharded: it would train nothing."""
    alive = {id(original): param for param in params if (original := param.original()) is not None}
    if not alive or not _held_by_optimizer(alive):
        return
    gc.collect()  # an optimizer that nobody can reach any more is no mistake
    alive = {key: param for key, param in alive.items() if param.original() is not None}
    held = _held_by_optimizer(alive)
    if held:
        raise StateError(
            f"an optimizer was built before fully_shard and holds the unsharded {held[:4]}{'...' if len(held) > 4 else ''}; "
            "its steps would not reach the model. Build the optimizer after fully_shard."
        )


def _held_by_optimizer(alive: dict[int, UnitParam]) -> list[str]:
    originals = [original for param in alive.values() if (original := param.original()) is not None]
    if not originals:
        return []
    held: list[str] = []
    for holder in gc.get_referrers(*originals):
        if type(holder) is not list or holder is originals:
            continue
        is_group = any(
            type(owner) is dict and owner.get("params") is holder and len(owner) > 1
            for owner in gc.get_referrers(holder)
        )
        if is_group:
            held += [alive[id(each)].fqn for each in holder if id(each) in alive]
    return held

"""What a step changes in units beside tensors, kept and put back; and engines made anew after a step that has failed.

Ranks that were stopped at different places know different things of each other: plans, numbers of exchanges, passes of links.
All of that belongs to an engine, so after a failure it is made again as at the first forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from shardwise.errors import StateError
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.local_gradients import Gradients
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.roots import Attachment, attachment_of
from shardwise.fsdp.unit import Unit
from shardwise.plan.schedule import UnitPolicy


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit as it was: gradients of earlier backwards, which nobody changes in place, and what it had learnt of backward."""

    unit: Unit
    held: Gradients
    partial: Gradients
    unsynced: frozenset[ShardedParam]
    policy: UnitPolicy
    counts: bool
    ended_late: bool
    num_replica_sums: tuple[int, ...]


class KeptUnits:
    """The units of ``model`` as they were when :meth:`keep` was called."""

    def __init__(self, model: nn.Module) -> None:
        found = {id(each): each for module in model.modules() if (each := attachment_of(module)) is not None}
        self._attachments = list(found.values())
        self._units: list[_Unit] = []
        self._is_last: dict[int, bool] = {}
        self._marks: list[Callable[[], None]] = []

    def keep(self) -> int:
        """Remember how they are now; return the bytes copied for that.

        Raises: StateError if gradients of a backward are on their way.
        """
        for engine in self._engines():
            if engine.is_in_step or engine.reductions.has_deferred or engine.manual.awaits_completion:
                raise StateError(
                    "a transaction begins between steps, with no gradients on their way: found a forward or backward that "
                    "has not ended, one with set_is_last_backward(False), or one that waits for finalize_backward(). Begin "
                    "the transaction before it"
                )
            self._is_last[id(engine)] = engine.is_last_backward
        self._units = [_as_it_is(each.unit) for each in self._attachments]
        groups = (group for each in self._attachments for group in each.unit.groups)
        coded = [group.compression for group in groups if group.compression is not None]
        self._marks = [each.mark() for each in coded]
        return sum(each.residual_bytes for each in coded)

    def put_back(self) -> None:
        """Bring every unit to its shards, forget the step, and let engines be made anew.  Nobody waits for this rank."""
        for engine in self._engines():
            engine.forget_step()
            engine.is_last_backward = self._is_last.get(id(engine), True)
        for was in self._units:
            was.unit.earlier.put_back(was.held, was.partial)
            was.unit.earlier.unsynced = set(was.unsynced)
            was.unit.policy = was.policy
            was.unit.backward.counts, was.unit.backward.ended_late = was.counts, was.ended_late
            for group, number in zip(was.unit.groups, was.num_replica_sums, strict=True):
                group.num_replica_sums = number
        for put_back in self._marks:
            put_back()
        for attachment in self._attachments:
            attachment.is_root = None  # the next forward makes the engine

    def _engines(self) -> list[Engine]:
        found = {id(engine): engine for each in self._attachments if (engine := _engine(each)) is not None}
        return list(found.values())


def _engine(attachment: Attachment) -> Engine | None:
    return engine_of(attachment.unit)


def _as_it_is(unit: Unit) -> _Unit:
    earlier, backward = unit.earlier, unit.backward
    unsynced = frozenset(earlier.unsynced)
    held, partial = dict(earlier.held), dict(earlier.partial)
    sums = tuple(group.num_replica_sums for group in unit.groups)
    return _Unit(unit, held, partial, unsynced, unit.policy, backward.counts, backward.ended_late, sums)

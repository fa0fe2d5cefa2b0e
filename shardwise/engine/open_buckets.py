"""The buckets of a running backward: units bring gradients, and what is complete is sent in one order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardwise.plan.buckets import UnitBucket

T = TypeVar("T")


@dataclass(slots=True)
class _OpenBucket(Generic[T]):
    awaited: set[int]
    order: tuple[int, ...]
    brought: dict[int, T] = field(default_factory=dict[int, T])
    is_sent: bool = False

    def send(self) -> list[T]:
        self.is_sent = True
        brought, self.brought = self.brought, {}
        return [brought[unit] for unit in self.order if unit in brought]


class OpenBuckets(Generic[T]):
    """What units have brought to the buckets of one backward, by numbers of units.

    A bucket is complete when backward has ended all units that it waits for, and is sent after those before it: ranks on which
    units end in different orders send the same buckets in the same order.

    Attributes:
        is_planned: it is known which units share.
        ended: units that backward has ended.  unsent: buckets that are open, in their order.
    """

    def __init__(self) -> None:
        self.is_planned = False
        self.ended: set[int] = set()
        self.unsent: list[_OpenBucket[T]] = []
        self._of: dict[int, _OpenBucket[T]] = {}

    def plan(self, buckets: Sequence[UnitBucket]) -> None:
        """Let the units of each of ``buckets`` share one."""
        self.is_planned = True
        for bucket in buckets:
            made = _OpenBucket[T]({*bucket.awaited} - self.ended, bucket.units)
            self.unsent.append(made)
            self._of.update(dict.fromkeys(bucket.units, made))

    def bring(self, unit: int, brought: T) -> bool:
        """Put ``brought`` into the bucket of ``unit``; False: it is in none, or too late, or comes again: it goes alone."""
        bucket = self._of.get(unit)
        if bucket is None or bucket.is_sent or unit in bucket.brought:
            return False
        bucket.brought[unit] = brought
        return True

    def beside(self, unit: int) -> T | None:
        """Return something that is in the bucket of ``unit`` already."""
        bucket = self._of.get(unit)
        return next(iter(bucket.brought.values()), None) if bucket is not None else None

    def end(self, unit: int) -> list[list[T]]:
        """Note that backward has ended ``unit``; return what is to be sent now, bucket by bucket."""
        self.ended.add(unit)
        bucket = self._of.get(unit)
        if bucket is not None:
            bucket.awaited.discard(unit)
        ready: list[list[T]] = []
        while self.unsent and not self.unsent[0].awaited:
            ready.append(self.unsent.pop(0).send())
        return [each for each in ready if each]

    def rest(self) -> list[list[T]]:
        """Return what has not been sent: backward is over."""
        unsent, self.unsent = self.unsent, []
        return [brought for bucket in unsent if (brought := bucket.send())]

"""Gradients of a unit that is alone in its model, in buckets that are sent while its backward still runs."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.units.param import UnitParam


class EarlyBuckets:
    """How far one backward has come with the buckets of a unit.

    They are sent in one order on every rank: each when backward has brought all of it, and those before it are sent.  What is
    left when the unit ends goes then.

    Attributes:
        buckets: the parameters of each, in the order in which they are sent.
    """

    def __init__(self, buckets: Sequence[Sequence[UnitParam]]) -> None:
        self.buckets = buckets
        self._of = {param.ordinal: number for number, bucket in enumerate(buckets) for param in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        self.begin()

    @property
    def params(self) -> frozenset[UnitParam]:
        """The parameters of all."""
        return frozenset([param for bucket in self.buckets for param in bucket])

    def begin(self) -> None:
        """A backward begins: nothing has come."""
        self._missing = self._sizes.copy()
        self._next = 0

    def come(self, ordinal: int) -> bool:
        """The gradient of a parameter is there; return True if something may be sent."""
        number = self._of.get(ordinal)
        if number is None:
            return False
        self._missing[number] -= 1
        return number == self._next and self._missing[number] == 0

    def take(self) -> list[Sequence[UnitParam]]:
        """Return what is complete and next, to be sent."""
        first = self._next
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._next += 1
        return list(self.buckets[first : self._next])

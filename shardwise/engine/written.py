"""Have all ranks written the same to parameters in forward?  Asked of the first forwards in which a module does so.

Every rank takes its own rows of what it has written to a full parameter.  Where ranks have not written the same, those of
others are lost without a word.  Nobody waits in forward: digests are posted there, and read when the gradients of the next
backward have come, for which every rank has left that forward behind.
"""

from __future__ import annotations

from shardwise.comm.bulletin import Bulletin
from shardwise.engine.journal import Journal
from shardwise.units.unit import Unit
from shardwise.units.user_writes import Written

_MAX_COMPARED = 2  # forwards per unit


class WrittenAlike:
    """What this rank has posted.

    Attributes:
        posted: places, each of one unit in one forward, and the digests that were left there.
    """

    def __init__(self) -> None:
        self.posted: list[tuple[str, list[str]]] = []

    def post(self, unit: Unit, written: Written, place: str, bulletin: Bulletin | None) -> None:
        """Leave what a forward has written to the full parameters of ``unit`` for the other ranks to read."""
        if bulletin is not None and unit.writes.num_compared < _MAX_COMPARED:
            values = unit.writes.values(written)
            if values:
                unit.writes.num_compared += 1
                bulletin.post_writes(place, values)
                self.posted.append((place, values))

    def check(self, journal: Journal) -> None:
        """Raise DesyncError if another rank has written something else."""
        posted, self.posted = self.posted, []
        for place, values in posted:
            assert journal.bulletin is not None
            journal.bulletin.check_writes(place, values, journal.position())

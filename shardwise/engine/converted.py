"""Conversions between a forward and its backward: backward gathers shards anew, and the graph wants what forward had gathered.

On one process a conversion puts other memory in place, so that what is written after it does not reach the graph.  Writes that
torch counts are found by their versions; for the others, and for what a conversion has rounded, values are compared here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.comm.digest import digest_of
from shardwise.engine.journal import Journal
from shardwise.errors import StateError
from shardwise.units.param import UnitParam

_WHAT = "values that conversions between a forward and its backward have changed"


class Converted:
    """What was converted since a forward that awaits its backward.

    Attributes:
        before: dtypes and digests of the shards before the first conversion.
    """

    def __init__(self) -> None:
        self.before: dict[UnitParam, tuple[torch.dtype, int]] = {}

    def note(self, params: Iterable[UnitParam]) -> None:
        """Remember what ``params`` are: they are about to be converted.

        Those that nobody gathers stay in the graph.  What was replaced is named where its gradient comes.
        """
        for param in params:
            is_gathered = param.full is not None and param.full is not param.sharded
            if is_gathered and param.is_registered and param not in self.before and not param.local.is_meta:
                self.before[param] = param.local.dtype, digest_of(param.local)

    def check(self, journal: Journal) -> None:
        """Raise StateError or DesyncError on every rank if something has other values than before.

        What has another dtype now is named where its gradient comes.
        """
        before, self.before = self.before, {}
        changed: list[str] = []
        for param, (dtype, digest) in before.items():
            if param.local.dtype is dtype and digest_of(param.local) != digest:
                changed.append(param.fqn)
        if journal.bulletin is not None:
            journal.bulletin.check_facts(_WHAT, changed, journal.position())
        if changed:
            raise StateError(
                f"{changed[0]} was converted between a forward and its backward, and has other values now: written to "
                "through .data, or rounded. Backward wants those of the forward, which are gone. Convert parameters, and "
                "write to them, before forward or after backward"
            )

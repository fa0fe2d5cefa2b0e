"""Conversions of shards that forwards have gathered: what has other values after them, on any rank.

On one process a conversion puts other memory in place, which leaves what a graph holds as it is.  Here backward gathers shards
anew: values that a conversion has rounded, or that were written to it through ``.data``, which torch does not count, are not
those that the graph was made with.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardwise.comm.digest import digest_of
from shardwise.engine.journal import Journal
from shardwise.errors import StateError
from shardwise.units.param import UnitParam


def _has_bits(local: torch.Tensor) -> bool:
    return type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta


class Converted:
    """What was converted since shards were last put together.

    Attributes:
        before: dtypes and digests of the shards before the first conversion.
        awaits_backward: a forward had built a graph then of which no backward had come.
    """

    def __init__(self) -> None:
        self.before: dict[UnitParam, tuple[torch.dtype, int]] = {}
        self.awaits_backward = False

    def note(self, params: Iterable[UnitParam], awaits_backward: bool) -> None:
        """Remember what ``params`` are: they are about to be converted.

        Those that nobody gathers stay in the graph.  What was replaced is named where its gradient comes.  Tensors of users'
        classes need have no bits to look at: they count as written.
        """
        self.awaits_backward = awaits_backward
        for param in params:
            is_gathered = param.full is not None and param.full is not param.sharded
            if is_gathered and param.is_registered and param not in self.before and _has_bits(param.local):
                self.before[param] = param.local.dtype, digest_of(param.local)

    def settle(self, journal: Journal, is_backward: bool) -> None:
        """Tell what has kept its values on all ranks from what is to count as written.

        Ranks ask each other about what is cut over them alone: of the rest each has all, and one may run a forward alone.

        Raises: StateError on every rank where a backward begins that needs what was; DesyncError unless all ranks convert.
        """
        before, self.before = self.before, {}
        changed = {param.fqn for param, was in before.items() if was != (param.local.dtype, digest_of(param.local))}
        if journal.bulletin is not None and any(param.shard.num_shards > 1 for param in before):
            changed = journal.bulletin.union("conversions of parameters", sorted(changed), journal.position())
        for param, (dtype, _) in before.items():
            if param.fqn not in changed:
                param.count.has_kept_values = param.local is not param.count.local()
            elif is_backward and self.awaits_backward and param.local.dtype is dtype:
                raise StateError(
                    f"{param.fqn} was converted between a forward and its backward, and has other values now: written to "
                    "through .data, or rounded. Backward wants those of the forward, which are gone. Convert parameters, "
                    "and write to them, before forward or after backward"
                )

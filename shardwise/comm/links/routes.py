"""The communicator that units talk to: the group's link where it serves, the backend's collectives elsewhere."""

from __future__ import annotations

from typing import cast

import torch

from shardwise.black_box import note
from shardwise.comm.c10d import C10dCommunicator
from shardwise.comm.links.link import Link, Spans
from shardwise.comm.protocol import GatherEnds, Pending, Scale, ScatterEnds


class LeftOut:
    """A collective that a fault has left out on this rank alone: what should have come is zeros."""

    holds_input = False

    def __init__(self, pieces: GatherEnds | ScatterEnds | None = None, num_ranks: int = 0) -> None:
        self._pieces, self._num_ranks = pieces, num_ranks

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None and self._num_ranks:
            shard = cast(GatherEnds, pieces).shard()
            pieces.deliver(shard.new_zeros(shard.numel() * self._num_ranks))
        elif pieces is not None:
            pieces.deliver(cast(ScatterEnds, pieces).target().zero_())

    def cancel(self) -> None:
        self._pieces = None


class RoutedCommunicator:
    """One group of ranks along a mesh axis, with all the ways between them.

    The way of a collective depends on its sizes and on what the ranks agreed on when the span began: it is the same on
    every rank.
    """

    def __init__(self, packed: C10dCommunicator, spans: Spans) -> None:
        self.packed = packed
        self._spans = spans

    @property
    def size(self) -> int:
        return self.packed.size

    @property
    def rank(self) -> int:
        return self.packed.rank

    @property
    def planned_link(self) -> Link | None:
        """The link that collectives are expected to use."""
        return self._spans.known_links.get(self.packed.group.group_name)

    def all_gather(self, pieces: GatherEnds) -> Pending:
        """Gather by the link or through one packed buffer."""
        if note("all-gather", "", pieces):
            return LeftOut(pieces, self.size)
        if self.packed.custom_all_gather is None:
            link = self._spans.link(self.packed.group, lambda link: link.takes_gather(pieces))
            if link is not None:
                return link.all_gather(pieces)
        return self.packed.all_gather(pieces)

    def reduce_scatter(self, pieces: ScatterEnds, scale: Scale) -> Pending:
        """Reduce by the link or through one packed buffer."""
        if note("reduction", pieces.label, pieces):
            return LeftOut(pieces)
        if self.packed.custom_reduce_scatter is None:
            link = self._spans.link(self.packed.group, lambda link: link.takes_scatter(pieces, scale))
            if link is not None:
                return link.reduce_scatter(pieces, scale)
        return self.packed.reduce_scatter(pieces, scale)

    def all_reduce(self, tensor: torch.Tensor, scale: Scale) -> Pending:
        """Reduce in place, by the backend."""
        if note("reduction", "replicas", [tensor]):
            return LeftOut()
        return self.packed.all_reduce(tensor, scale)

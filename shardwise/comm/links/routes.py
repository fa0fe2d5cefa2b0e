"""The communicator that units talk to: in a span, the group's link where it serves; the backend's collectives elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.black_box import hearers, note, now, remember, tell, thread
from shardwise.comm.c10d import C10dCommunicator
from shardwise.comm.communicator import GatherEnds, Pending, Scale, ScatterEnds, SumContents
from shardwise.comm.links.link import ByBackend, InPlaceSums, Link, SpanKind
from shardwise.errors import DesyncError


@dataclass(slots=True)
class _Entry:
    prepare: Callable[[], Link | None]
    link: Link | None = None
    is_prepared: bool = False
    is_open: bool = False
    is_agreed: bool = False
    has_sums: bool = False


class Spans:
    """The spans of one engine: a forward or a backward, from the outermost begin to its end; nobody changes shards in one.

    A link is opened by the first collective that could use it: a rank that runs a forward without collectives, as
    replicas may, waits for nobody.

    Attributes:
        number: one that no other span of this engine has; None outside of any.
        known_links: by name of their group, the links that the last spans had, for planning.
        tell: what to call with the reason when ranks find no way to talk.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._count = 0
        self._kind: SpanKind = "forward"
        self._entries: dict[str, _Entry] = {}
        self.known_links: dict[str, Link | None] = {}
        self.number: int | None = None
        self.tell: Callable[[str], None] = lambda _: None

    def register(self, group: dist.ProcessGroup, prepare: Callable[[], Link | None]) -> None:
        """Let ``prepare`` say, before each span, by which link the ranks of ``group`` talk; None: by none."""
        old = self._entries.get(group.group_name)
        self._entries[group.group_name] = _Entry(prepare, old.link if old is not None else None)

    def link(self, group: dist.ProcessGroup, takes: Callable[[Link], bool]) -> Link | None:
        """Return the link to use for the next collective of ``group``; None: use the backend's own.

        ``takes(link)`` says, alike on every rank, whether the collective is one for the link: if none is, in a whole span,
        the link stays closed.
        """
        entry = self._prepared(group)
        if entry is None or entry.link is None or not takes(entry.link):
            return None
        if not entry.is_open:
            entry.is_agreed = entry.link.open(self._kind, collectives_are_watched())
            entry.is_open = True
        return entry.link if entry.is_agreed else None

    def sums(self, group: dist.ProcessGroup, tensor: torch.Tensor, scale: Scale) -> InPlaceSums | None:
        """Return what sums ``tensor`` over ``group`` in place; None: the backend.  It waits for nobody, opens nothing."""
        entry = self._prepared(group)
        if entry is None or entry.link is None or entry.link.sums is None or not entry.link.sums.takes(tensor, scale):
            return None
        entry.has_sums = True
        return entry.link.sums

    def _prepared(self, group: dist.ProcessGroup) -> _Entry | None:
        entry = self._entries.get(group.group_name)
        if entry is None or not self._depth:
            return None
        if not entry.is_prepared:
            try:
                entry.link = self.known_links[group.group_name] = entry.prepare()
            except DesyncError as error:
                self.tell(str(error))  # ranks of other groups wait for this one, too
                raise
            entry.is_prepared = True
        return entry

    def begin(self, kind: SpanKind) -> None:
        """Enter a span, or one inside another."""
        if not self._depth:
            self._kind = kind
            self._count += 1
            self.number = self._count
        self._depth += 1

    def end(self) -> None:
        """Leave it; the outermost end waits until no peer reads this rank's shards."""
        if self._depth == 1:
            for entry in self._entries.values():
                entry.is_prepared = False
                if entry.has_sums and entry.link is not None and entry.link.sums is not None:
                    entry.link.sums.end()
                entry.has_sums = False
                if entry.is_open:
                    if entry.link is not None:
                        entry.link.close()
                    entry.is_open = entry.is_agreed = False
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            self.number = None

    def abort(self) -> None:
        """Leave all spans after a failure."""
        self._depth = 0
        self.number = None
        for entry in self._entries.values():
            entry.is_prepared = False
            if entry.is_open or entry.has_sums:
                entry.is_open = entry.is_agreed = entry.has_sums = False
                if entry.link is not None:
                    entry.link.abort()


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
        remember((now(), thread(), "", 0, "all-gather", ""))
        if hearers and tell("all-gather", "", pieces):
            return LeftOut(pieces, self.size)
        if self.packed.custom.all_gather is None:
            link = self._spans.link(self.packed.group, lambda link: link.takes_gather(pieces))
            if link is not None:
                return link.all_gather(pieces)
        return self.packed.all_gather(pieces)

    def reduce_scatter(self, pieces: ScatterEnds, scale: Scale) -> Pending:
        """Reduce by the link or through one packed buffer."""
        remember((now(), thread(), "", 0, "reduction", pieces.label))
        if hearers and tell("reduction", pieces.label, pieces):
            return LeftOut(pieces)
        if self.packed.custom.reduce_scatter is None:
            link = self._spans.link(self.packed.group, lambda link: link.takes_scatter(pieces, scale))
            if link is not None:
                return link.reduce_scatter(pieces, scale)
        return self.packed.reduce_scatter(pieces, scale)

    def all_reduce(self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None = None) -> Pending:
        """Reduce in place, by the link or by the backend."""
        if note("reduction", "replicas", [tensor]):
            return LeftOut()
        sums = self._spans.sums(self.packed.group, tensor, scale)
        if sums is not None:
            by_backend = ByBackend(collectives_are_watched(), lambda: self.packed.all_reduce(tensor, scale, contents))
            return sums.all_reduce(tensor, scale, contents, by_backend)
        return self.packed.all_reduce(tensor, scale, contents)


_WATCHED = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
)
_ORIGINALS = {name: getattr(sys.modules["torch.distributed.distributed_c10d"], name, None) for name in _WATCHED}


def collectives_are_watched() -> bool:
    """True if something on this rank counts or replaces collectives: a dispatch mode, or a wrapper around torch's functions.

    Such tools know torch's collectives alone, so they are what a watched step uses.
    """
    if torch_private.has_dispatch_mode():
        return True
    own = sys.modules["torch.distributed.distributed_c10d"]
    return any(
        getattr(dist, name, None) is not original or getattr(own, name, None) is not original
        for name, original in _ORIGINALS.items()
    )

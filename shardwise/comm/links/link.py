"""Links: ways between the ranks of a group that beat its backend's collectives, and the spans in which they may be used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch.distributed as dist

from shardwise import torch_private
from shardwise.comm.communicator import GatherEnds, Pending, Scale, ScatterEnds
from shardwise.errors import ConfigError
from shardwise.layout.bucket import Bucket

SpanKind = Literal["forward", "backward"]
Transport = Literal["auto", "gloo", "collective"]
TRANSPORTS: tuple[Transport, ...] = ("auto", "gloo", "collective")


_default: list[Transport] = ["auto"]  # one entry, set by set_default_transport alone


def check_transport(transport: str, name: str = "transport") -> Transport:
    """Return ``transport``.  Raises: ConfigError, about the argument ``name``, if there is none of that name."""
    for known in TRANSPORTS:
        if transport == known:
            return known
    raise ConfigError(f"{name} is {transport!r}; expected one of {', '.join(map(repr, TRANSPORTS))}")


def set_default_transport(transport: Transport) -> None:
    """Say how ranks exchange CPU tensors where a model does not say it (:meth:`FSDPModule.set_transport`).

    Args:
        transport: "auto": shared memory if all ranks of a group are processes of one host, else "gloo".  "gloo": messages
            over the network, parts sent from and received in place.  "collective": the backend's own collectives.  The ranks
            of a group use what all of them allow.  Models that have run keep theirs.

    Raises: ConfigError for another name.
    """
    _default[0] = check_transport(transport)


def default_transport() -> Transport:
    """Return what :func:`set_default_transport` was given last, "auto" at first."""
    return _default[0]


class Link(Protocol):
    """A fast way between the ranks of one group.

    It is used in spans: from :meth:`open` to :meth:`close` nobody changes a shard, so peers may read it at any time.
    """

    name: str
    compares_contents: bool  # ranks that come with other parameters hear of it by the link

    def open(self, kind: SpanKind, wants_collectives: bool) -> bool:
        """Enter a span with all ranks of the group; return True unless some rank wants the backend's collectives.

        Raises: TransportError if a rank does not come, has left by an exception, or comes to another kind of span.
        """
        ...

    def close(self) -> None:
        """Leave the span; returns when no rank reads this rank's shards any more."""
        ...

    def abort(self) -> None:
        """Leave the span without the others and let them know, as far as the link can."""
        ...

    def takes_gather(self, pieces: GatherEnds) -> bool:
        """True if this all-gather goes by the link; the same on every rank."""
        ...

    def takes_scatter(self, pieces: ScatterEnds, scale: Scale) -> bool:
        """True if this reduce-scatter goes by the link; the same on every rank."""
        ...

    def all_gather(self, pieces: GatherEnds) -> Pending:
        """Launch; ``wait`` delivers."""
        ...

    def reduce_scatter(self, pieces: ScatterEnds, scale: Scale) -> Pending:
        """Launch; ``wait`` delivers."""
        ...

    def gather_staging(self, layout: Bucket, itemsize: int) -> tuple[int, bool]:
        """Return the pooled bytes that the all-gather of a bucket stages, and whether they are its full parameters too."""
        ...

    def scatter_staging(self, layout: Bucket, itemsize: int) -> int:
        """Return the pooled bytes that the reduce-scatter of a bucket stages."""
        ...


@dataclass(slots=True)
class _Entry:
    prepare: Callable[[], Link | None]
    link: Link | None = None
    is_prepared: bool = False
    is_open: bool = False
    is_agreed: bool = False


class Spans:
    """The spans of one engine: a forward or a backward, from the outermost begin to its end; nobody changes shards in one.

    A link is opened by the first collective that could use it: a rank that runs a forward without collectives, as
    replicas may, waits for nobody.

    Attributes:
        number: one that no other span of this engine has; None outside of any.
        known_links: by name of their group, the links that the last spans had, for planning.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._count = 0
        self._kind: SpanKind = "forward"
        self._entries: dict[str, _Entry] = {}
        self.known_links: dict[str, Link | None] = {}
        self.number: int | None = None

    def register(self, group: dist.ProcessGroup, prepare: Callable[[], Link | None]) -> None:
        """Let ``prepare`` say, before each span, by which link the ranks of ``group`` talk; None: by none."""
        old = self._entries.get(group.group_name)
        self._entries[group.group_name] = _Entry(prepare, old.link if old is not None else None)

    def link(self, group: dist.ProcessGroup, takes: Callable[[Link], bool]) -> Link | None:
        """Return the link to use for the next collective of ``group``; None: use the backend's own.

        ``takes(link)`` says, alike on every rank, whether the collective is one for the link: if none is, in a whole span,
        the link stays closed.
        """
        entry = self._entries.get(group.group_name)
        if entry is None or not self._depth:
            return None
        if not entry.is_prepared:
            entry.link = self.known_links[group.group_name] = entry.prepare()
            entry.is_prepared = True
        if entry.link is None or not takes(entry.link):
            return None
        if not entry.is_open:
            entry.is_agreed = entry.link.open(self._kind, collectives_are_watched())
            entry.is_open = True
        return entry.link if entry.is_agreed else None

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
            if entry.is_open:
                entry.is_open = entry.is_agreed = False
                if entry.link is not None:
                    entry.link.abort()


_WATCHED = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
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

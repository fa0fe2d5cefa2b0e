"""Links: ways between the ranks of a group that beat its backend's collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from shardwise.comm.communicator import GatherEnds, Pending, Scale, ScatterEnds, SumContents
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


@dataclass(frozen=True, slots=True)
class ByBackend:
    """Another way to sum a tensor in place: ``launch()``, on all ranks if one ``is_wanted`` on any of them."""

    is_wanted: bool
    launch: Callable[[], Pending]


class InPlaceSums(Protocol):
    """How tensors are summed in place by a link, in spans, but without opening it: nobody waits for the others to begin."""

    def takes(self, tensor: torch.Tensor, scale: Scale) -> bool:
        """True if ``tensor`` goes by the link; the same on every rank."""
        ...

    def all_reduce(
        self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None, by_backend: ByBackend
    ) -> Pending:
        """Launch; ``wait``, or the end of the span, ends it."""
        ...

    def end(self) -> None:
        """Wait for all sums."""
        ...


class Link(Protocol):
    """A fast way between the ranks of one group.

    It is used in spans: from :meth:`open` to :meth:`close` nobody changes a shard, so peers may read it at any time.
    """

    name: str
    compares_contents: bool  # ranks that come with other parameters hear of it by the link

    @property
    def sums(self) -> InPlaceSums | None:
        """How tensors are summed in place; None: by the backend."""
        ...

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

"""What units need from a communicator; links, which are faster than a backend's collectives, and the choice between both.

A collective is launched with its *ends*: an object that knows where bytes come from and where they go.  The transport
decides how they travel: through one packed buffer with one equal section per rank in rank order, or in parts, straight
between full tensors and sections.  ``fsdp/flat_buffer.py::Delivery`` has the ends of an all-gather,
``fsdp/gradients.py::Reduction`` those of a reduce-scatter and an all-reduce.
"""

from __future__ import annotations

import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.collectives.streams import BufferPool, PooledBuffer
from shardwise.errors import ConfigError
from shardwise.formatting import format_ranks
from shardwise.layout import Bucket

# ---- A checksum after the summed elements: the sum itself shows when ranks sum different things, without an extra
# message.
# A backend pairs all-reduces by their sequence number in the group and does not know their contents: after a rank has
# skipped one, its next sum mixes with the others' last one, and training would continue with meaningless numbers.

MOST_RANKS = 256  # the sum of that many checksums is exact, so that a single one that differs shows in the mean
_LARGEST = 0xFFF


@dataclass(frozen=True, slots=True)
class ReductionChecksum:
    """This rank's description of a sum, as a number that is summed too.

    Attributes:
        whole: 1-D: the summed elements, then one element for the checksum.  label: what they are.
        number: how many sums of these parameters came before, including those that were skipped on purpose.
    """

    whole: torch.Tensor
    label: str
    number: int

    @property
    def _value(self) -> int:
        return zlib.crc32(f"{self.label} {self.number}".encode()) & _LARGEST

    def put(self) -> torch.Tensor:
        """Write the checksum; return the tensor to sum instead of the section alone."""
        self.whole[-1] = self._value
        return self.whole

    def check(self, scale: float, ranks: Sequence[int], mine: int) -> None:
        """Raise unless all global ``ranks`` have summed the same thing.  ``scale``: the factor that the sum was multiplied by.

        Raises: RuntimeError, as a backend raises it when the ranks of a group cannot be paired any more; the same code
        explains it.
        """
        mean = float(self.whole[-1]) / scale / len(ranks)
        if abs(mean - self._value) < 0.4 / len(ranks):
            return
        raise RuntimeError(sums_something_else(self.label, self.number, mine, [rank for rank in ranks if rank != mine]))


def sums_something_else(label: str, number: int, mine: int, others: Sequence[int]) -> str:
    """Return the error text: one of ``others`` does not sum ``label``, which rank ``mine`` sums.  Ranks are global."""
    return (
        f"rank {mine} sums gradients of {label} with its replicas, {format_ranks(others)}, as number {number + 1}, and one "
        "of them sums something else: it has left a sum out, or has other gradients (set_requires_all_reduce and the "
        "microbatches must be the same on all replicas)"
    )


# ---- Collectives of the user, in place of a backend's.


class CustomCollective(Protocol):
    """A user's all-gather or reduce-scatter, as torch's ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` take it.

    Attributes:
        __call__: ``(output_tensor, input_tensor, group, async_op=)``, which gathers the input of all ranks into the output,
            or ``(output_tensor, input_tensor, group, op, async_op=)``, which leaves this rank's section of the reduced input
            in it; returns the work, or None.
    """

    __call__: Callable[..., dist.Work | None]

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer."""
        ...


@dataclass(slots=True)
class CustomCollectives:
    """The user's choices for the collectives of some parameters.

    Attributes:
        all_gather, reduce_scatter: functions to call instead of the backend's.
        allocates_from_group: allocate staging buffers from the process group's own allocator if its backend has one.
        reduce_group: the group that runs reduce-scatters, so that they overlap all-gathers.
    """

    all_gather: CustomCollective | None = None
    reduce_scatter: CustomCollective | None = None
    allocates_from_group: bool = False
    reduce_group: dist.ProcessGroup | None = None


class Handle(Protocol):
    """A launched collective, like torch's ``Work``.

    Attributes:
        holds_input: its input stays allocated until :meth:`wait`.
    """

    holds_input: bool

    def is_done(self) -> bool:
        """True if :meth:`wait` is known not to block."""
        ...

    def wait(self) -> None:
        """Order the current stream after it (on CPU: block), deliver its result, release its buffers.  Call once."""

    def cancel(self) -> None:
        """Drop the result and release the buffers; wait only if the backend may still write to them.

        Buffers of a collective that does not end are never released.
        """


_Ends = TypeVar("_Ends")


class OnceHandle(Generic[_Ends]):
    """A handle that ends once: by :meth:`finish` when it is waited for, by :meth:`drop` when it is cancelled.

    Either gets the ends that the handle was launched with, and before that the handle lets them go: they keep gradients.
    """

    __slots__ = ("_ends",)
    holds_input = True

    def __init__(self, ends: _Ends) -> None:
        self._ends: _Ends | None = ends

    def is_done(self) -> bool:
        return self._ends is None

    def wait(self) -> None:
        ends, self._ends = self._ends, None
        if ends is not None:
            self.finish(ends)

    def cancel(self) -> None:
        ends, self._ends = self._ends, None
        if ends is not None:
            self.drop(ends)

    def finish(self, ends: _Ends) -> None:
        """Wait, deliver to ``ends``, release the buffers."""
        raise NotImplementedError

    def drop(self, ends: _Ends) -> None:
        """Release the buffers, as :meth:`Handle.cancel` says."""
        raise NotImplementedError


class NamedTensor(Protocol):
    """A tensor in a collective, compared by identity.  ``fqn``: its name in its unit."""

    fqn: str


class SectionContents(Protocol):
    """The contents of a section.  ``layout``: where the part of every tensor lies."""

    layout: Bucket

    @property
    def params(self) -> Sequence[NamedTensor]:
        """The tensors of these parts, in the order of the layout."""
        ...


class SumContents(SectionContents, Protocol):
    """The contents of a section that is summed.

    Attributes:
        label: what is summed; the same on every rank.
        number: how many sums of these parameters came before, including those that were skipped on purpose.
        checksum: by which ranks notice that they sum different things if the backend sums; None for no check.
    """

    label: str
    number: int
    checksum: ReductionChecksum | None


class BucketEnds(SectionContents, Protocol):
    """One bucket of an all-gather, for transports that move parts.

    Attributes:
        dtype: of the stored section.  full_dtype: of the full parameters; it is sent in this dtype.
    """

    dtype: torch.dtype
    full_dtype: torch.dtype

    @property
    def number(self) -> int | None:
        """Index among the sections that the ranks of a host read from each other; None if it is not one of them."""
        ...

    def section(self) -> torch.Tensor:
        """Return this rank's section in ``full_dtype``: 1-D, ``layout.section_numel`` elements."""
        ...

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        """Return, for every tensor of ``layout``, the window of the full parameter that receives ``rank``'s part."""
        ...


class GatherEnds(Protocol):
    """The two ends of an all-gather."""

    @property
    def take_over(self) -> Callable[[PooledBuffer], bool] | None:
        """Makes a pooled buffer with the result the memory of the full parameter; None: :meth:`deliver` must copy it.

        It returns False, with nothing done, if the parameter has memory already.
        """
        ...

    def buckets(self) -> Sequence[BucketEnds]:
        """Return the buckets if they can travel in parts; nothing if they must be packed."""
        ...

    def shard(self) -> torch.Tensor:
        """Return this rank's section: 1-D, contiguous, of the same dtype and length on every rank."""
        ...

    def deliver(self, packed: torch.Tensor) -> None:
        """Use the result: 1-D, ``size * len(shard)`` elements, valid only during the call."""


class ScatterEnds(SectionContents, Protocol):
    """The two ends of a reduce-scatter.

    Attributes:
        label: what is reduced; the same on every rank.  Transports that can compare contents compare it.
        dtype: in which gradients are summed.
    """

    label: str
    dtype: torch.dtype

    @property
    def section_numel(self) -> int:
        """Number of elements of one section."""
        ...

    def fill(self, packed: torch.Tensor) -> None:
        """Write every section of the 1-D buffer ``packed`` (``size * section_numel`` elements)."""

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        """Return, for every tensor of ``layout``, the window of the gradient that belongs to ``rank``."""
        ...

    def drop(self) -> None:
        """Release the gradients: all their parts are copied."""

    def target(self) -> torch.Tensor:
        """Return the destination of this rank's reduced section: 1-D, ``section_numel`` elements; always the same tensor."""
        ...

    def deliver(self, section: torch.Tensor) -> None:
        """Use this rank's reduced section: ``target()``, or another tensor, which is copied."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How a sum over ranks becomes a mean.

    Attributes:
        divisor: the divisor of the sum; None for the mean over the group that computes it.
        sum_only: the transport may use plain sums only; scaling is separate from the collective.
        split: divide by a power of two near sqrt(divisor) before the sum and by the rest after it, so that fp16 neither
            overflows nor underflows.
        add: ``add(sections, out)`` adds the sections of all ranks in an order of its own; None: they are added in rank order.
    """

    divisor: float | None = None
    sum_only: bool = False
    split: bool = False
    add: Callable[[Sequence[torch.Tensor], torch.Tensor], None] | None = None

    def over(self, size: int) -> float:
        """Return what the sum over ``size`` ranks is divided by."""
        return float(size) if self.divisor is None else self.divisor


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The steps of a scaled reduction: divide by ``before`` (None: do not), reduce by ``op``, divide by ``after``."""

    before: float | None
    op: Any
    after: float | None


def resolve_scale(scale: Scale, size: int) -> Arithmetic:
    """Return the arithmetic of ``scale`` for a group of ``size`` ranks."""
    divisor = scale.over(size)
    if scale.split:
        before = 1.0
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Arithmetic(before if before != 1 else None, dist.ReduceOp.SUM, divisor / before)
    if divisor == 1:
        return Arithmetic(None, dist.ReduceOp.SUM, None)
    if divisor == size and not scale.sum_only:
        return Arithmetic(None, dist.ReduceOp.AVG, None)
    return Arithmetic(None, dist.ReduceOp.SUM, divisor)


# ---- Shards in sections: pack them, and sum them in an order that gives the same bits over every transport.


def section_parts(layout: Bucket, section: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Return the windows of ``rank``'s shards in its 1-D section."""
    base = section.storage_offset()
    return [
        section.as_strided(move.shape, move.packed_stride, base + move.packed_offset) for move in layout.parts(rank)
    ]


def pack_parts(layout: Bucket, parts: Sequence[torch.Tensor], section: torch.Tensor, rank: int) -> None:
    """Copy ``parts``, the shards of ``rank``, into the windows of :func:`section_parts`."""
    if parts and sum(part.numel() for part in parts) == section.numel() and all(part.dim() == 1 for part in parts):
        torch.cat(list(parts), out=section)
    else:
        torch_private.copy_all(section_parts(layout, section, rank), parts)


def can_sum_in_parts(scale: Scale, size: int) -> bool:
    """Return True if :func:`sum_sections` supports ``scale``: it does not divide before the sum."""
    return resolve_scale(scale, size).before is None


def sum_sections(layout: Bucket, sections: Sequence[torch.Tensor], scale: Scale, rank: int, out: torch.Tensor) -> None:
    """Sum all ranks' sections for ``rank`` into ``out``, in rank order, so that every transport gives the same bits.

    Args:
        layout: the layout of a section.
        sections: the sections in rank order, each 1-D with ``layout.section_numel`` elements.
        scale: the divisor of the sum.
        out: 1-D, ``layout.section_numel`` elements; it may be one of ``sections``.  Padding becomes zero.
    """
    if scale.add is not None:
        scale.add(sections, out)
        return
    divisor = scale.over(len(sections))
    # Blocks of a coding may have padding of a large shard beside its elements, and user code may get the whole section.
    for offset, shard in zip(layout.offsets[: layout.num_large], layout.shards, strict=False):
        out.narrow(0, offset + (numel := shard.shard_numel(rank)), shard.section_numel - numel).zero_()
    # Sum and divide tensor by tensor, so that the division finds the sum in the cache.
    for start, numel in _extents(layout, rank):
        target = out.narrow(0, start, numel)
        terms = [target if section is out else section.narrow(0, start, numel) for section in sections]
        add_up(terms, divisor, target)


def add_up(terms: Sequence[torch.Tensor], divisor: float, out: torch.Tensor) -> None:
    """Sum two or more ``terms`` in their order and divide by ``divisor``; ``out`` may be one of the terms."""
    total = out
    if any(term is out for term in terms[2:]):
        total = torch.empty_like(out)  # the first sum must not overwrite a later term
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)
    if divisor != 1:
        torch.div(total, divisor, out=out)
    elif total is not out:
        out.copy_(total)


def _extents(layout: Bucket, rank: int) -> list[tuple[int, int]]:
    large = [
        (offset, shard.shard_numel(rank))
        for offset, shard in zip(layout.offsets[: layout.num_large], layout.shards, strict=False)
    ]
    tail = layout.tail_start, layout.section_numel - layout.tail_start  # sent as one part
    return [(start, numel) for start, numel in (*large, tail) if numel]


PassKind = Literal["forward", "backward"]
Transport = Literal["auto", "gloo", "collective"]
TRANSPORTS: tuple[Transport, ...] = ("auto", "gloo", "collective")


_default: list[Transport] = ["auto"]  # one entry, set by set_default_transport alone


def check_transport(transport: str, name: str = "transport") -> Transport:
    """Return ``transport``.  Raises: ConfigError that names the argument ``name`` if there is no such transport."""
    if transport not in TRANSPORTS:
        raise ConfigError(f"{name} is {transport!r}; expected one of {', '.join(map(repr, TRANSPORTS))}")
    return transport


def set_default_transport(transport: Transport) -> None:
    """Set the transport of CPU tensors for models without their own (:meth:`FSDPModule.set_transport`).

    Args:
        transport: "auto": shared memory if all ranks of a group are processes of one host, else "gloo".  "gloo": gloo's
            all-gather, and an all-to-all whose parts are summed in rank order.  "collective": the backend's own collectives.
            The ranks of a group use a transport that all of them allow.  Models that have run a forward keep theirs.

    Raises: ConfigError for another name.
    """
    _default[0] = check_transport(transport)


def default_transport() -> Transport:
    """Return the transport that :func:`set_default_transport` has set; "auto" at first."""
    return _default[0]


@dataclass(frozen=True, slots=True)
class ByBackend:
    """The backend's all-reduce, as the alternative to a link's: all ranks ``launch`` it if it ``is_wanted`` on any rank."""

    is_wanted: bool
    launch: Callable[[], Handle]


class InPlaceSums(Protocol):
    """In-place sums of a link.  They need a pass but not an open link, so no rank waits for others to begin the pass."""

    def takes(self, tensor: torch.Tensor, scale: Scale) -> bool:
        """Return True if the link sums ``tensor``; the same on every rank."""
        ...

    def all_reduce(
        self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None, by_backend: ByBackend
    ) -> Handle:
        """Launch the sum; it is complete after ``wait``, or at the end of the pass."""
        ...

    def end(self) -> None:
        """Wait for all sums."""


class Link(ABC):
    """A transport between the ranks of one group that is faster than its backend.

    It is used in passes: from :meth:`open` to :meth:`close` no shard changes, so peers may read shards at any time.
    """

    name: str
    compares_contents = False  # the link detects that ranks send different parameters
    is_one_sided = False  # a gather reads the shards of other ranks without their help
    sums: InPlaceSums | None = None  # None: the backend sums

    @abstractmethod
    def open(self, kind: PassKind, wants_collectives: bool) -> bool:
        """Enter a pass with all ranks of the group; return True unless some rank wants the backend's collectives.

        Raises: TransportError if a rank does not arrive, has raised an exception, or enters another kind of pass.
        """

    def close(self) -> None:
        """Leave the pass; return when no rank reads this rank's shards any more."""

    def abort(self) -> None:
        """Leave the pass after a failure on this rank, and notify the other ranks if the link can."""

    def rest(self) -> None:
        """Return memory that holds nothing between passes to the system; the next pass takes it again."""

    @abstractmethod
    def takes_gather(self, ends: GatherEnds) -> bool:
        """Return True if the link does this all-gather; the same on every rank."""

    @abstractmethod
    def takes_scatter(self, ends: ScatterEnds, scale: Scale) -> bool:
        """Return True if the link does this reduce-scatter; the same on every rank."""

    @abstractmethod
    def all_gather(self, ends: GatherEnds) -> Handle:
        """Launch the all-gather; ``wait`` delivers the result."""

    @abstractmethod
    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        """Launch the reduce-scatter; ``wait`` delivers the result."""

    def scatter_staging(self, layout: Bucket, itemsize: int) -> int:
        """Return the pooled bytes that the reduce-scatter of a bucket stages."""
        return 0


# ---- Providers of links.  The transports of a device register here, so that modules for all devices need not import them.


class LinkedBucket(Protocol):
    """The part of ``fsdp/flat_buffer.py::FlatBucket`` that links use: shards of one dtype in one section."""

    number: int | None
    place: object | None
    dtype: torch.dtype
    full_dtype: torch.dtype
    layout: Bucket
    travels: bool

    def move_to_shared_memory(self) -> None:
        """Move the section to memory of :attr:`LinkProvider.take_shareable`; ``place`` stays None if there is none."""


class LinkedUnit(Protocol):
    """The part of a unit that links use.  ``main_buckets``: the sections that are all-gathered."""

    main_buckets: Sequence[LinkedBucket]

    def largest_reductions(self) -> list[tuple[int, int]]:
        """Return (elements of a section, bytes of an element) of the reduction of all parameters, per reduce dtype."""
        ...


@dataclass(frozen=True, slots=True)
class LinkUsers:
    """The units that use a link, in their order.

    Attributes:
        gathers: units that all-gather by it.
        reduces: units that reduce-scatter by it.
        sums: units that all-reduce by it.
    """

    gathers: list[LinkedUnit] = field(default_factory=list[LinkedUnit])
    reduces: list[LinkedUnit] = field(default_factory=list[LinkedUnit])
    sums: list[LinkedUnit] = field(default_factory=list[LinkedUnit])


class LinkSource(Protocol):
    """Makes the link of one process group, and a new one when the sizes of shards have changed."""

    def prepare(self) -> Link | None:
        """Return the link at the first collective of a pass, None if there is none.  It is a collective if it makes a link."""
        ...

    def is_for(self, users: LinkUsers, transport: Transport) -> bool:
        """Return True if the source was made for exactly ``users`` and ``transport``."""
        ...


@dataclass(frozen=True, slots=True)
class LinkProvider:
    """The transports of one kind of device.

    Attributes:
        can_link: ``can_link(group, devices)`` returns True if ``group`` may have a link for tensors on ``devices``.
        take_shareable: ``take_shareable(num_bytes, folder)`` returns zeros that peers can read and their location, or None;
            they are in a file of ``folder`` unless that is "".
        make: ``make(group, users, transport, pool, timeout_s)`` returns the source of the group's links.
    """

    can_link: Callable[[dist.ProcessGroup, Collection[torch.device]], bool]
    take_shareable: Callable[[int, str], tuple[torch.Tensor, object] | None]
    make: Callable[[dist.ProcessGroup, LinkUsers, Transport, BufferPool, float], LinkSource]


link_providers: list[LinkProvider] = []  # filled when shardwise is imported (collectives/shared_memory.py)


def provider_of(group: dist.ProcessGroup, devices: Collection[torch.device]) -> LinkProvider | None:
    """Return the provider of links of ``group`` for tensors on ``devices``, or None."""
    return next((each for each in link_providers if each.can_link(group, devices)), None)


# ---- The links of the running pass.


@dataclass(slots=True)
class _LinkState:
    """The link of one process group, and how far the running pass is with it."""

    prepare: Callable[[], Link | None]
    link: Link | None = None
    is_prepared: bool = False
    has_no_link: bool = False  # the ranks have no link in this pass
    is_open: bool = False
    is_agreed: bool = False
    has_sums: bool = False


class PassTracker:
    """Tracks the passes of one engine, each a forward or a backward from its outermost begin to its end.

    The first collective that can use a link opens it, so a rank that runs a forward without collectives (replicas) waits for
    no other rank.

    Attributes:
        number: a number that no other pass of this engine has; None outside of any.
        known_links: group name -> the link of the last pass, for planning.
        entries: group name -> the state of the group's link.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._count = 0
        self._kind: PassKind = "forward"
        self.entries: dict[str, _LinkState] = {}
        self.known_links: dict[str, Link | None] = {}
        self.number: int | None = None

    def register(self, group: dist.ProcessGroup, prepare: Callable[[], Link | None]) -> None:
        """Let ``prepare`` return the link of ``group`` at its first collective in a pass; None: no link."""
        old = self.entries.get(group.group_name)
        self.entries[group.group_name] = _LinkState(prepare, old.link if old is not None else None)

    def link(self, group: dist.ProcessGroup, takes: Callable[[Link], bool]) -> Link | None:
        """Return the link to use for the next collective of ``group``; None: use the backend.

        ``takes(link)`` returns, the same on every rank, whether the link takes the collective.  The link stays closed in a
        pass in which it takes none.
        """
        entry = self.entries.get(group.group_name)
        link = None if entry is None else self._prepared(group.group_name, entry)
        if entry is None or link is None or not takes(link):
            return None
        self._open(entry, link)  # here, at the first collective that it takes, each rank learns whether any is watched
        return link if entry.is_agreed else None

    def sums(self, group: dist.ProcessGroup, tensor: torch.Tensor, scale: Scale) -> InPlaceSums | None:
        """Return the link's in-place sums if they take ``tensor``, else None; this does not open the link."""
        entry = self.entries.get(group.group_name)
        link = None if entry is None else self._prepared(group.group_name, entry)
        if entry is None or link is None or link.sums is None or not link.sums.takes(tensor, scale):
            return None
        entry.has_sums = True
        return link.sums

    def open_links(self) -> list[str]:
        """Open all links, for a pass in which ranks may take different collectives; return the names of the usable ones."""
        for name, entry in self.entries.items():
            if (link := self._prepared(name, entry)) is not None:
                self._open(entry, link)
        return [name for name, entry in self.entries.items() if entry.is_agreed]

    def _prepared(self, name: str, entry: _LinkState) -> Link | None:
        """Return the link of a group in this pass; None also outside of any."""
        if self._depth and not entry.is_prepared:
            entry.link = self.known_links[name] = entry.prepare()
            entry.is_prepared, entry.has_no_link = True, entry.link is None
        return entry.link if self._depth else None

    def _open(self, entry: _LinkState, link: Link) -> None:
        if not entry.is_open:
            entry.is_agreed, entry.is_open = link.open(self._kind, collectives_are_watched()), True

    def begin(self, kind: PassKind) -> None:
        """Enter a pass, possibly inside another one."""
        if not self._depth:
            self._kind = kind
            self._count += 1
            self.number = self._count
        self._depth += 1

    def end(self) -> None:
        """Leave a pass; the outermost end waits until no peer reads this rank's shards."""
        if self._depth == 1:
            for entry in self.entries.values():
                entry.is_prepared = entry.has_no_link = False
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
        """Leave all passes after a failure."""
        self._depth = 0
        self.number = None
        for entry in self.entries.values():
            entry.is_prepared = entry.has_no_link = False
            if entry.is_open or entry.has_sums:
                entry.is_open = entry.is_agreed = entry.has_sums = False
                if entry.link is not None:
                    entry.link.abort()


class LeftOut(OnceHandle[GatherEnds | ScatterEnds | None]):
    """A collective that an injected fault omits on this rank only; its result is zeros."""

    holds_input = False

    def __init__(self, ends: GatherEnds | ScatterEnds | None = None, num_ranks: int = 0) -> None:
        super().__init__(ends)
        self._num_ranks = num_ranks

    def is_done(self) -> bool:
        return True

    def finish(self, ends: GatherEnds | ScatterEnds | None) -> None:
        if self._num_ranks:
            shard = cast(GatherEnds, ends).shard()
            cast(GatherEnds, ends).deliver(shard.new_zeros(shard.numel() * self._num_ranks))
        else:
            scattered = cast(ScatterEnds, ends)
            scattered.deliver(scattered.target().zero_())

    def drop(self, ends: GatherEnds | ScatterEnds | None) -> None:
        pass


_WATCHED = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
)
_ORIGINALS = {name: getattr(sys.modules["torch.distributed.distributed_c10d"], name, None) for name in _WATCHED}


def collectives_are_watched() -> bool:
    """Return True if a tool on this rank counts or replaces collectives: a dispatch mode, or wrappers of torch's functions.

    Such tools see torch's collectives only, so a watched step uses these.
    """
    if torch_private.has_dispatch_mode():
        return True
    own = sys.modules["torch.distributed.distributed_c10d"]
    return any(
        getattr(dist, name, None) is not original or getattr(own, name, None) is not original
        for name, original in _ORIGINALS.items()
    )

"""Gradients of a group on their way: packed, reduced over ranks, and set on the sharded parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from shardwise import layout, torch_private
from shardwise.collectives.buffer_pool import is_own
from shardwise.collectives.protocol import MOST_RANKS, Handle, ReductionChecksum, Scale
from shardwise.collectives.streams import CommStreams, SideStream
from shardwise.fsdp.flat_buffer import KEPT_BYTES, GradientSection, ParamStorage, ReduceLayout, as_gradient
from shardwise.fsdp.local_gradients import Gradients, change_by_hooks
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import ParamGroup
from shardwise.layout import Bucket
from shardwise.plan.schedule import LEAST_BYTES, Sharing, UnitPolicy, bucket_bytes, split_unit

# ---- Gradients of a unit that is alone in its model, in buckets that are sent while its backward still runs.


class EarlyBuckets:
    """How far one backward has come with the buckets of a unit.

    They are sent in one order on every rank: each when backward has brought all of it, and those before it are sent.  What is
    left when the unit ends goes then.

    Attributes:
        buckets: the parameters of each, in the order in which they are sent.
    """

    def __init__(self, buckets: Sequence[Sequence[ShardedParam]]) -> None:
        self.buckets = buckets
        self._of = {param.ordinal: number for number, bucket in enumerate(buckets) for param in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        self.begin()

    @property
    def params(self) -> frozenset[ShardedParam]:
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

    def take(self) -> list[Sequence[ShardedParam]]:
        """Return what is complete and next, to be sent."""
        first = self._next
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._next += 1
        return list(self.buckets[first : self._next])


def layout_of(group: ParamGroup, params: list[ShardedParam], dtype: torch.dtype) -> ReduceLayout:
    """Return where gradients of ``params``, all of ``group``, lie while they are reduced in ``dtype``."""
    key = (dtype,) if params is group.by_size else (dtype, *[param.ordinal for param in params])
    layout = group.reduce_layouts.get(key)
    if layout is None:
        alignment = group.place.alignment(dtype)
        num_spare = num_spare_of(group, dtype)
        layout = group.reduce_layouts[key] = ReduceLayout(params, alignment, group.axes.shard_rank, num_spare)
    return layout


def num_spare_of(group: ParamGroup, dtype: torch.dtype) -> int:
    """Return 1 if sums over replicas have a mark behind them: where the host may look, and it is exact."""
    is_exact = dtype in (torch.float32, torch.float64) and 1 < group.axes.num_replicas <= MOST_RANKS
    return int(is_exact and not group.place.on.has_streams)


def _dtypes_of_gradients(group: ParamGroup, params: list[ShardedParam]) -> set[torch.dtype | None]:
    """Return ShardedParam.dtype_of_gradient of ``params``."""
    if params is not group.by_size:
        return {param.dtype_of_gradient for param in params}
    if group.gradient_dtypes is None:
        group.gradient_dtypes = {param.dtype_of_gradient for param in params}
    return group.gradient_dtypes


class _Packing:
    """The sending and receiving end of a reduce-scatter.

    Attributes:
        is_final: what comes out are the gradients that users see.
    """

    __slots__ = (
        "dtype",
        "gradients",
        "is_dense",
        "is_final",
        "label",
        "layout",
        "mark",
        "number",
        "place",
        "reduced",
        "result",
        "section",
        "section_numel",
    )

    def __init__(
        self,
        reduced: ReduceLayout,
        gradients: list[torch.Tensor],
        dtype: torch.dtype,
        place: ParamStorage,
        is_final: bool = False,
    ) -> None:
        self.reduced, self.gradients, self.dtype, self.place, self.is_final = reduced, gradients, dtype, place, is_final
        self.section: torch.Tensor | None = None
        self.number = 0
        self.mark: ReductionChecksum | None = None
        self.result: GradientSection | None = None
        self.is_dense = False
        self.layout: Bucket = reduced.bucket
        self.label = reduced.names
        self.section_numel = reduced.bucket.section_numel

    @property
    def params(self) -> Sequence[ShardedParam]:
        return self.reduced.params

    def fill(self, packed: torch.Tensor) -> None:
        if not self.layout.full_numel:
            pass  # nothing but shapes, of which shards have others
        elif self.result is not None and packed is self.section:  # this rank has all shards: where users see them
            self.reduced.pack_whole(self.gradients, self.result)
        else:
            self.reduced.pack(self.gradients, packed)
        self.gradients = []

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        if not self.is_dense:
            self.gradients = [gradient.contiguous() for gradient in self.gradients]
            self.is_dense = True
        return self.reduced.full_parts(self.gradients, rank)

    def drop(self) -> None:
        self.gradients = []

    def target(self) -> torch.Tensor:
        if self.section is None:
            if self.is_final:
                self.result = self.reduced.memory.take(self.dtype, self.place)
                self.section = self.result.flat
            else:
                self.section = self.reduced.places.empty(self.dtype, self.place.device)
        return self.section

    def put_mark(self) -> None:
        """Let the section be summed with a mark, if there is room for one behind it."""
        section, num_spare = self.target(), self.reduced.places.num_spare
        end = section.storage_offset() + self.section_numel + num_spare
        if num_spare and section.untyped_storage().nbytes() == end * self.dtype.itemsize:
            self.mark = ReductionChecksum(section.as_strided((self.section_numel + 1,), (1,)), self.label, self.number)

    def deliver(self, section: torch.Tensor) -> None:
        target = self.target()
        if section is not target:
            target.copy_(section)
        self.gradients = []


_DTYPE = operator.attrgetter("dtype")


@dataclass(slots=True)  # one is made in every step, and frozen ones take three times as long
class ReductionTerms:
    """How the gradients of a unit are to be reduced.

    Attributes:
        policy: of the unit.
        streams: where it happens.
        hook: what a user wants called with the flat result.
    """

    policy: UnitPolicy
    streams: CommStreams
    hook: Callable[[torch.Tensor], None] | None = None


class Reduction:
    """Gradients of one dtype of one group on their way through the ranks.

    Stages: reduce-scatter in flight, then (with replicas) all-reduce in flight, then a finished section.  On an accelerator
    all of them are given to streams at once, with the copy to the host if gradients live there; what is left is to give the
    memory of the reduce-scatter's input back.

    Attributes:
        is_over: nothing is in flight: :meth:`finish` has nothing to do.
        is_stored: the result is on its way to the host: :meth:`CommStreams.host_waits_for_copies` comes before it is read.
        params: whose gradients these are.
        awaits_all_reduce: :meth:`advance` is to launch the sum over replicas.
        is_marked: its sum over replicas has a mark behind it, where there is room.
        is_partial: replicas are not summed: the result is kept for a later backward.
        has_elements: False when all parameters are of size zero: there is nothing to send.
    """

    def __init__(
        self,
        group: ParamGroup,
        layout: ReduceLayout,
        gradients: list[torch.Tensor],
        dtype: torch.dtype,
        terms: ReductionTerms,
        partial: Gradients,
    ) -> None:
        self.group = group
        self.params = params = layout.params
        self._comm = group.bound_comm or group.comm
        self.is_partial = self._comm.replicas is not None and not terms.policy.syncs_replicas
        self._layout = layout
        self.has_elements = self._layout.bucket.full_numel > 0
        self._partial = {param: partial[param] for param in params if param in partial} if partial else partial
        self._terms = terms
        if layout.scale is None or layout.scale[0] is not terms.policy:
            layout.scale = terms.policy, scale_of(group, dtype, terms.policy)
        self._scale: Scale = layout.scale[1]
        self._scattered: Handle | None = None
        self._replicated: Handle | None = None
        self._has_all_reduced = False
        self.awaits_all_reduce = self.has_elements and self._comm.replicas is not None and not self.is_partial
        self.is_stored = self.is_over = False
        self.is_marked = True
        is_final = not self.is_partial and not group.place.is_offloaded
        dtypes = group.gradient_dtypes if params is group.by_size else None
        is_final = is_final and (dtypes or _dtypes_of_gradients(group, params)) <= {dtype, None}
        self._packing = _Packing(self._layout, gradients, dtype, group.place, is_final)
        self._stored: list[torch.Tensor] = []

    # ---- launching ----

    def scatter(self) -> None:
        """Launch the reduce-scatter."""
        assert self._comm.reduce is not None
        self._scattered = self._comm.reduce.reduce_scatter(self._packing, self._scale)
        reduce = self._terms.streams.reduce
        if reduce.is_concurrent:  # what follows need not wait for other ranks
            self._follow_on_streams(reduce)

    def reduce_here(self, in_place: bool) -> None:
        """Go on without a reduce-scatter: this rank has all shards.  ``in_place``: in the memory of the one gradient."""
        if in_place:
            self._packing.section = self._packing.gradients[0].contiguous().view(-1)
        else:
            self._packing.fill(self._packing.target())
        self._packing.drop()
        if self._comm.replicas is None and self._scale.divisor is not None:
            self._packing.target().div_(self._scale.divisor)
        if self._terms.streams.reduce.is_concurrent:
            self._follow_on_streams(None)
        else:
            self.advance()

    def _follow_on_streams(self, stream: SideStream | None) -> None:
        """Launch what follows on the stream where the section is summed, None: the current stream, and on those after it."""
        self._has_all_reduced, self.awaits_all_reduce = True, False
        with nullcontext() if stream is None else stream.run():
            self._launch_all_reduce()
        streams, hook = self._terms.streams, self._terms.hook
        if self._replicated is not None:
            stream, self._replicated = streams.replicas, None
            if hook is not None:
                with stream.run():
                    hook(self._packing.target())
        if not self.is_partial and self.group.place.is_offloaded:
            with nullcontext() if stream is None else stream.run():
                streams.store.wait_current()
            with streams.store.run():
                self._store()
            self.is_stored = True

    def _store(self) -> None:
        """Copy the result to the host, into page-locked memory if that is wanted, beside all other work."""
        place, section, packing = self.group.place, self._packing.target(), self._packing
        dtypes = {param.dtype_of_gradient or packing.dtype for param in self.params}
        if len(dtypes) == 1:
            packing.result = self._layout.memory.take(dtypes.pop(), place)
            packing.result.flat.copy_(section, non_blocking=True)
            self._stored = packing.result.gradients
            return
        for param, window in self.windows().items():
            flat = place.on.host_memory(window.numel(), param.dtype_of_gradient or packing.dtype, place.pins)
            self._stored.append(as_gradient(param, flat.view(window.shape).copy_(window, non_blocking=True)))

    # ---- waiting ----

    def advance(self) -> None:
        """Wait for the reduce-scatter and launch what follows it; does nothing the second time.

        On streams that was launched before: here the current stream waits, and the reduce-scatter's input is free again.
        """
        if self._scattered is not None:
            self._scattered.wait()
            self._scattered = None
        if not self._has_all_reduced:
            self._has_all_reduced, self.awaits_all_reduce = True, False
            if self._comm.replicas is not None or self._partial or self._terms.hook is not None:
                self._launch_all_reduce()
            self.is_over = self._replicated is None

    def _launch_all_reduce(self) -> None:
        section = self._packing.target()
        if self._partial:
            for param, window in zip(self.params, self._layout.windows(section), strict=True):
                if param in self._partial:
                    window.add_(self._partial[param])
        replicas = self._comm.replicas
        if replicas is not None and not self.is_partial and self.has_elements:
            scale = self._scale if self._comm.reduce is None else _replica_scale(self._scale)
            self._packing.number = self.group.num_replica_sums
            if self.is_marked:
                self._packing.put_mark()
            self._replicated = replicas.all_reduce(section, scale, self._packing)
        elif self._terms.hook is not None:
            self._terms.hook(section)
        self.group.num_replica_sums += replicas is not None

    def finish(self) -> None:
        """Wait for the end; on streams :meth:`CommStreams.current_waits_for_reductions` comes before the result is read."""
        self.advance()
        if self._replicated is not None:
            self._replicated.wait()
            self._replicated = None
            if self._terms.hook is not None:
                self._terms.hook(self._packing.target())

    def cancel(self) -> None:
        """Let the collective end, if it can, and forget its result."""
        handles, self._scattered, self._replicated = (self._scattered, self._replicated), None, None
        for handle in handles:
            if handle is not None:
                handle.cancel()
        self._give_back()

    # ---- the result ----

    def windows(self) -> Gradients:
        """Return this rank's reduced shards in the reduce dtype, windows of one buffer; once finished."""
        return dict(zip(self.params, self._layout.windows(self._packing.target()), strict=True))

    def set_gradients(self, is_hooked: bool) -> BaseException | None:
        """Accumulate the result into ``.grad`` of the sharded parameters; once finished.

        ``is_hooked``: users want to see, and may change, what is accumulated.  Returns: what they have raised.
        """
        olds: list[torch.Tensor] = []
        news: list[torch.Tensor] = []
        packing = self._packing
        gradients = (
            packing.result.gradients if packing.result is not None and packing.is_final else self._as_gradients()
        )
        failed = change_by_hooks(self.params, gradients) if is_hooked else None
        for param, gradient in zip(self.params, gradients, strict=True):
            sharded = param.sharded
            existing = sharded.grad
            if existing is None:
                if param.full is sharded and param.is_strided:
                    gradient = torch.empty_like(sharded, dtype=gradient.dtype).copy_(gradient)
                sharded.grad = gradient
            else:
                if isinstance(existing, DTensor) and existing.placements != param.spec.placements:
                    # Losses over shards leave what DTensor's rules say, sums of one rank among others.
                    existing = sharded.grad = existing.redistribute(placements=param.spec.placements)
                olds.append(torch_private.local_of(existing))
                news.append(torch_private.local_of(gradient))
        if olds:
            torch_private.add_all(olds, news)
        if packing.result is not None:
            packing.result.is_taken, packing.result = False, None
        return failed

    def _as_gradients(self) -> list[torch.Tensor]:
        packing = self._packing
        if self.is_stored:
            return self._stored
        if packing.result is not None:
            return packing.result.gradients
        group, section = self.group, packing.target()
        dtypes = {param.dtype_of_gradient or packing.dtype for param in self.params}
        if dtypes == {packing.dtype}:
            return GradientSection(self._layout.places, section).gradients
        if len(dtypes) > 1:
            return [
                as_gradient(param, window.to(param.dtype_of_gradient or packing.dtype, copy=True))
                for param, window in self.windows().items()
            ]
        packing.result = self._layout.memory.take(dtypes.pop(), group.place)
        packing.result.flat.copy_(section)
        return packing.result.gradients

    def _give_back(self) -> None:
        if self._packing.result is not None:
            self._packing.result.is_taken, self._packing.result = False, None

    # ---- facts ----

    @property
    def is_due(self) -> bool:
        """True if :meth:`advance` would not wait for other ranks."""
        return self._scattered is None or self._scattered.is_done()

    @property
    def holds_input(self) -> bool:
        """True while the packed or local gradients are allocated."""
        return self._scattered is not None and self._scattered.holds_input

    @property
    def label(self) -> str:
        """The parameters, for messages."""
        return self._packing.label

    @property
    def is_collective(self) -> bool:
        """True when shards of other ranks are summed."""
        return self._comm.reduce is not None and self.has_elements

    @property
    def num_bytes(self) -> int:
        """Bytes that it stages."""
        return _staging(self.group, self._packing, self._scale)


def launch_reductions(
    group: ParamGroup,
    gradients: Gradients,
    terms: ReductionTerms,
    partial: Gradients,
    kept: Collection[ShardedParam] = (),
) -> list[Reduction]:
    """Start the reduction of ``gradients``: one per dtype, parameters in the same order on every rank.

    Where there is but an all-reduce, on CPU, large gradients are reduced where they are, unless they are among ``kept``:
    packing and the page faults of new memory cost as much as the network within a host.
    """
    launched: list[Reduction] = []
    comm = group.bound_comm or group.comm
    may_stay = (
        comm.reduce is None and comm.replicas is not None and not group.place.on.has_streams and terms.hook is None
    )
    if not (partial or may_stay) and len(gradients) == len(group.by_size) and comm.reduce is not None:
        own = [*map(gradients.__getitem__, group.by_size)]
        if len({*map(_DTYPE, own)}) == 1:  # as in most steps
            dtype = own[0].dtype
            reduction = Reduction(group, layout_of(group, group.by_size, dtype), own, dtype, terms, partial)
            if reduction.has_elements:
                reduction.scatter()
                return [reduction]
    if partial:
        gradients = {param: widened(gradient, partial.get(param)) for param, gradient in gradients.items()}
    for dtype, params in by_reduce_dtype(group, {param: gradient.dtype for param, gradient in gradients.items()}):
        large: list[ShardedParam] = []
        if may_stay:
            # By size alone: what is held, or whose memory it is, is each rank's own affair, and sums pair by their sizes.
            large = [param for param in params if param.shard.numel >= layout.LARGE_NUMEL]
        packed = [param for param in params if param not in large] if large else params
        parts = [*([param] for param in large), *([packed] if packed else [])]
        for chosen in parts:
            own = [gradients[param] for param in chosen]
            reduction = Reduction(group, layout_of(group, chosen, dtype), own, dtype, terms, partial)
            launched.append(reduction)
            if comm.reduce is None or not reduction.has_elements:
                is_apart = chosen[0] in large
                reduction.is_marked = not is_apart
                reduction.reduce_here(in_place=is_apart and chosen[0] not in kept and is_own(own[0]))
            else:
                reduction.scatter()
    return launched


def widened(gradient: torch.Tensor, partial: torch.Tensor | None) -> torch.Tensor:
    """Return ``gradient`` in a dtype that holds ``partial`` too: where a parameter takes any, that may be wider."""
    if partial is None or partial.dtype is gradient.dtype:
        return gradient
    return gradient.to(torch.promote_types(gradient.dtype, partial.dtype))


def planned_scatter_bytes(group: ParamGroup, policy: UnitPolicy) -> int:
    """Return the bytes that the reduction of all trainable parameters stages."""
    if not group.is_collective:
        return 0
    trainable = {param: group.dtypes.of_reduction(param) for param in group.params if param.sharded.requires_grad}
    total = 0
    for dtype, params in by_reduce_dtype(group, trainable):
        packing = _Packing(layout_of(group, params, dtype), [], dtype, group.place)
        total += _staging(group, packing, scale_of(group, dtype, policy))
    return total


def _staging(group: ParamGroup, packing: _Packing, scale: Scale) -> int:
    itemsize = packing.dtype.itemsize
    comm = group.bound_comm
    link = comm.reduce.planned_link if comm is not None and comm.reduce is not None else None
    if link is not None and link.takes_scatter(packing, scale):
        return link.scatter_staging(packing.layout, itemsize)
    return packing.section_numel * group.axes.num_shards * itemsize


def by_reduce_dtype(
    group: ParamGroup, dtypes: Mapping[ShardedParam, torch.dtype]
) -> list[tuple[torch.dtype, list[ShardedParam]]]:
    """Return the parameters of each of ``dtypes``, in the group's order."""
    found = {*dtypes.values()}
    if len(found) == 1 and len(dtypes) == len(group.by_size):  # all of them, as in most steps
        return [(found.pop(), group.by_size)]
    by_dtype: dict[torch.dtype, list[ShardedParam]] = {}
    for param in group.by_size:
        if param in dtypes:
            by_dtype.setdefault(dtypes[param], []).append(param)
    return list(by_dtype.items())


_MEAN = Scale()  # the same object at every step: communicators remember what carries it out


def scale_of(group: ParamGroup, dtype: torch.dtype, policy: UnitPolicy) -> Scale:
    """Return the scale of the reduce-scatter; the all-reduce after it takes :func:`_replica_scale`."""
    risky = dtype not in (torch.float32, torch.float64, torch.bfloat16)
    size = group.axes.num_shards * group.axes.num_replicas
    if policy.divide_factor is not None:
        return Scale(policy.divide_factor, policy.sum_only, risky)
    if risky or policy.sum_only:
        return Scale(float(size), policy.sum_only, risky)
    return _MEAN


def _replica_scale(scale: Scale) -> Scale:
    # Without an explicit divisor both collectives average; with one the reduce-scatter has divided by all of it.
    return Scale() if scale.divisor is None else Scale(1.0, scale.sum_only)


# ---- Gradients of several units in one all-reduce, where nothing is sharded: what may share, and where it lies.

# Of the device, not measured: sums over more than two ranks depend on where an element lies, so that buckets must be the
# same in every run.  Between processes of a host, and of accelerators of one host or more.
FULL_BYTES_ON_HOST = bucket_bytes(latency_s=150e-6, bytes_per_s=1.5e9)
FULL_BYTES_ON_STREAMS = bucket_bytes(latency_s=25e-6, bytes_per_s=1e11)
LARGE_BYTES = LEAST_BYTES  # of a gradient on the host: it is a bucket of its own, in its own memory
_MOST_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class Brought:
    """What a unit brings to a bucket.

    Attributes:
        gradients: in their reduce dtypes.  partial: sums that earlier backwards have left of some of them.
        terms: of the unit.
    """

    group: ParamGroup
    gradients: Gradients
    partial: Gradients
    terms: ReductionTerms


def shares(group: ParamGroup) -> bool:
    """Return True if gradients of ``group`` take nothing but an all-reduce of what they are."""
    comm = group.bound_comm
    return comm is not None and comm.reduce is None and comm.replicas is not None and group.compression is None


def sharing_of(group: ParamGroup) -> Sharing | None:
    """Return by what the gradients of ``group`` share a bucket with those of others; None: by nothing."""
    comm = group.bound_comm
    if comm is None or comm.replicas is None or not shares(group):
        return None
    num_bytes = 0
    for param in group.params:
        dtype = group.dtypes.of_reduction(param)
        if param.sharded.requires_grad and not _is_large(group, param, dtype):
            num_bytes += param.shard.numel * dtype.itemsize
    if not num_bytes:
        return None
    place = group.place
    key = (comm.replicas.packed.group.group_name, str(place.device), place.is_offloaded, place.pins)
    return Sharing(key, num_bytes, FULL_BYTES_ON_STREAMS if place.on.has_streams else FULL_BYTES_ON_HOST)


def split(group: ParamGroup) -> EarlyBuckets:
    """Return the buckets of a group whose gradients share none with others."""
    params = [param for param in group.params if param.sharded.requires_grad]
    num_bytes = [param.shard.numel * group.dtypes.of_reduction(param).itemsize for param in params]
    limit = FULL_BYTES_ON_STREAMS if group.place.on.has_streams else FULL_BYTES_ON_HOST
    return EarlyBuckets([[params[index] for index in bucket] for bucket in split_unit(num_bytes, limit)])


def _is_large(group: ParamGroup, param: ShardedParam, dtype: torch.dtype) -> bool:
    """True for what is reduced where it is: within a host copying it costs as much as sending it."""
    return not group.place.on.has_streams and param.shard.numel * dtype.itemsize >= LARGE_BYTES


def launch_large(brought: Brought, kept: Collection[ShardedParam]) -> list[Reduction]:
    """Start the reduction of the large gradients, and take them out of ``brought``; in memory of their own if ``kept``."""
    group, launched = brought.group, list[Reduction]()
    for param in group.by_size:
        gradient = brought.gradients.get(param)
        if gradient is None or not _is_large(group, param, gradient.dtype):
            continue
        gradient = widened(brought.gradients.pop(param), brought.partial.get(param))
        layout = layout_of(group, [param], gradient.dtype)
        launched.append(Reduction(group, layout, [gradient], gradient.dtype, brought.terms, brought.partial))
        launched[-1].is_marked = False
        launched[-1].reduce_here(in_place=param not in kept and is_own(gradient))
    return launched


@dataclass(slots=True)
class _Lot:
    """What travels in one all-reduce."""

    first: Brought
    params: list[ShardedParam] = field(default_factory=list[ShardedParam])
    gradients: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    partial: Gradients = field(default_factory=Gradients)


class BucketLayouts:
    """Where gradients of several units lie in a bucket, remembered from step to step."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], ReduceLayout] = {}

    def launch(self, brought: Sequence[Brought]) -> list[Reduction]:
        """Start the reduction of what units have brought: one for each reduce dtype and scale, alike on every rank."""
        lots: dict[tuple[torch.dtype, Scale], _Lot] = {}
        for each in brought:
            gradients = each.gradients
            if each.partial:
                gradients = {param: widened(own, each.partial.get(param)) for param, own in gradients.items()}
            dtypes = {param: gradient.dtype for param, gradient in gradients.items()}
            for dtype, params in by_reduce_dtype(each.group, dtypes):
                lot = lots.setdefault((dtype, scale_of(each.group, dtype, each.terms.policy)), _Lot(each))
                lot.params += params
                lot.gradients += [gradients[param] for param in params]
                lot.partial.update(each.partial)
            each.gradients.clear()
        launched: list[Reduction] = []
        for (dtype, _), lot in lots.items():
            first, layout = lot.first, self._layout_of(lot, dtype)
            launched.append(Reduction(first.group, layout, lot.gradients, dtype, first.terms, lot.partial))
            launched[-1].reduce_here(in_place=False)
        return launched

    def _layout_of(self, lot: _Lot, dtype: torch.dtype) -> ReduceLayout:
        key = (dtype, *lot.params)
        layout = self._known.get(key)
        if layout is None:
            if len(self._known) >= _MOST_LAYOUTS:  # of units that come together in ever new ways
                self._known.clear()
            group = lot.first.group
            # On the host what is small is kept, as it was unit by unit: there are more gradients to make in a bucket.
            kept_bytes = KEPT_BYTES if group.place.on.has_streams else 2 * FULL_BYTES_ON_HOST
            alignment, num_spare = group.place.alignment(dtype), num_spare_of(group, dtype)
            layout = ReduceLayout(lot.params, alignment, group.axes.shard_rank, num_spare, kept_bytes)
            self._known[key] = layout
        return layout

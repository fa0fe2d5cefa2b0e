"""Gradient reduction of a group: pack gradients, reduce them over ranks, set ``.grad`` of the sharded parameters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.collectives.buffer_pool import is_own
from shardwise.collectives.protocol import MOST_RANKS, Handle, ReductionChecksum, Scale
from shardwise.collectives.streams import CommStreams, SideStream
from shardwise.fsdp.flat_buffer import KEPT_BYTES, GradientSection, ParamStorage, ReduceLayout, as_gradient
from shardwise.fsdp.local_gradients import Gradients, change_by_hooks
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import ParamGroup
from shardwise.layout import Bucket
from shardwise.plan.schedule import LEAST_BYTES, Sharing, UnitPolicy, bucket_bytes, split_unit

# ---- The buckets of a model with a single unit, which are reduced while backward still runs.


class EarlyBuckets:
    """The progress of one backward through the buckets of a unit.

    Buckets are reduced in the same order on every rank: a bucket is launched when all its gradients have arrived and the
    buckets before it are launched.  The rest is launched when the unit's backward ends.

    Attributes:
        buckets: the parameters of each bucket, in the order of the launches.
    """

    def __init__(self, buckets: Sequence[Sequence[ShardedParam]]) -> None:
        self.buckets = buckets
        self._of = {param.ordinal: number for number, bucket in enumerate(buckets) for param in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        self.begin()

    @property
    def params(self) -> frozenset[ShardedParam]:
        """The parameters of all buckets."""
        return frozenset([param for bucket in self.buckets for param in bucket])

    def begin(self) -> None:
        """Begin a backward, in which no gradient has arrived."""
        self._missing = self._sizes.copy()
        self._next = 0

    def count(self, ordinal: int) -> bool:
        """Count the gradient of parameter ``ordinal``; return True if a bucket may be launched."""
        number = self._of.get(ordinal)
        if number is None:
            return False
        self._missing[number] -= 1
        return number == self._next and self._missing[number] == 0

    def take(self) -> list[Sequence[ShardedParam]]:
        """Return the buckets to launch now: complete, and next in order."""
        first = self._next
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._next += 1
        return list(self.buckets[first : self._next])


_DTYPE = operator.attrgetter("dtype")


def layout_of(group: ParamGroup, params: list[ShardedParam], dtype: torch.dtype) -> ReduceLayout:
    """Return the layout in which gradients of ``params`` are reduced in ``dtype``; ``group`` caches it.

    ``params``: of the group, and in a bucket of several units of other groups after these.
    """
    key = (dtype,) if params is group.by_size else (dtype, *params)
    layout = group.reduce_layouts.get(key)
    if layout is None:
        if len(group.reduce_layouts) >= _MOST_LAYOUTS:  # a model whose execution order keeps changing
            group.reduce_layouts.clear()
        # On the host sections of a whole bucket are reused, too: a bucket has more gradients to make than a unit.
        is_bucket = shares(group) and not group.place.on.has_streams
        kept_bytes = 2 * FULL_BYTES_ON_HOST if is_bucket else KEPT_BYTES
        alignment, num_spare = group.place.alignment(dtype), num_spare_of(group, dtype)
        layout = ReduceLayout(params, alignment, group.axes.shard_rank, num_spare, kept_bytes)
        group.reduce_layouts[key] = layout
    return layout


def num_spare_of(group: ParamGroup, dtype: torch.dtype) -> int:
    """Return 1 if all-reduces over replicas carry a checksum element: on the host, in dtypes that represent it exactly."""
    is_exact = dtype in (torch.float32, torch.float64) and 1 < group.axes.num_replicas <= MOST_RANKS
    return int(is_exact and not group.place.on.has_streams)


def _dtypes_of_gradients(group: ParamGroup, params: list[ShardedParam]) -> set[torch.dtype | None]:
    """Return the set of ``dtype_of_gradient`` of ``params``; cached if these are all parameters."""
    if params is not group.by_size:
        return {param.dtype_of_gradient for param in params}
    if group.gradient_dtypes is None:
        group.gradient_dtypes = {param.dtype_of_gradient for param in params}
    return group.gradient_dtypes


@dataclass(slots=True, eq=False)
class _Packing:
    """The sending and receiving side of a reduce-scatter.

    Attributes:
        is_final: the section that is received holds the gradients that users see, without another copy.
    """

    reduced: ReduceLayout
    gradients: list[torch.Tensor]
    dtype: torch.dtype
    place: ParamStorage
    is_final: bool = False
    section: torch.Tensor | None = None
    number: int = 0
    mark: ReductionChecksum | None = None
    result: GradientSection | None = None
    is_dense: bool = False
    layout: Bucket = field(init=False)
    label: str = field(init=False)
    section_numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.layout, self.label = self.reduced.bucket, self.reduced.names
        self.section_numel = self.layout.section_numel

    @property
    def params(self) -> Sequence[ShardedParam]:
        return self.reduced.params

    def fill(self, packed: torch.Tensor) -> None:
        if not self.layout.full_numel:
            pass  # parameters without elements: nothing to copy
        elif self.result is not None and packed is self.section:  # this rank has all shards: write the final gradients
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
                self.result = self.reduced.take(self.dtype, self.place)
                self.section = self.result.flat
            else:
                self.section = self.reduced.empty(self.dtype, self.place.device)
        return self.section

    def give_back(self) -> None:
        """Let a later reduction use the memory of the result, once user code references no gradient in it."""
        if self.result is not None:
            self.result.is_taken, self.result = False, None

    def put_mark(self) -> None:
        """Include a checksum element in the all-reduce, if the section has room for it."""
        section, num_spare = self.target(), self.reduced.num_spare
        end = section.storage_offset() + self.section_numel + num_spare
        if num_spare and section.untyped_storage().nbytes() == end * self.dtype.itemsize:
            self.mark = ReductionChecksum(section.as_strided((self.section_numel + 1,), (1,)), self.label, self.number)

    def deliver(self, section: torch.Tensor) -> None:
        target = self.target()
        if section is not target:
            target.copy_(section)
        self.gradients = []


@dataclass(slots=True)  # not frozen: frozen dataclasses take three times as long to make
class ReductionTerms:
    """How the gradients of a unit are reduced.

    Attributes:
        policy: the policy of the unit.
        streams: the streams of the collectives.
        hook: the user's all-reduce hook, called with the flat result; None if there is none.
    """

    policy: UnitPolicy
    streams: CommStreams
    hook: Callable[[torch.Tensor], None] | None = None


class Reduction:
    """The reduction of the gradients of one dtype of one group.

    Stages: reduce-scatter in flight, then (with replicas) all-reduce in flight, then a finished section.  On an accelerator
    all stages are enqueued on streams at once, with the copy to the host if gradients are offloaded; then only the memory of
    the reduce-scatter's input remains to be freed.

    Attributes:
        is_over: nothing is in flight, and :meth:`finish` has nothing to do.
        is_stored: a copy of the result to the host is enqueued; call :meth:`CommStreams.host_waits_for_copies` before a read.
        params: the parameters whose gradients are reduced.
        awaits_all_reduce: :meth:`advance` will launch the all-reduce over replicas.
        is_marked: the all-reduce carries a checksum, if there is room.
        is_partial: the gradients are reduced over the shard axis only; a later backward reduces them over replicas.
        has_elements: False when all parameters have size zero, so that there is nothing to send.
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
        self._scale = scale_of(group, dtype, terms.policy)
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
        if reduce.is_concurrent:  # streams order what follows, so the host does not wait
            self._follow_on_streams(reduce)

    def reduce_here(self, in_place: bool) -> None:
        """Skip the reduce-scatter, since this rank has all shards, and continue with the next stage.

        ``in_place``: the single gradient is reduced in its own memory.
        """
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
        """Enqueue all later stages; ``stream`` is where the section is summed, None for the current stream."""
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
        """Copy the result to the host on the current stream, into page-locked memory if the policy says so."""
        place, packing = self.group.place, self._packing
        if (result := self._converted()) is not None:
            self._stored = result.gradients
            return
        for param, window in self.windows().items():
            flat = place.on.host_memory(window.numel(), param.dtype_of_gradient or packing.dtype, place.pins)
            self._stored.append(as_gradient(param, flat.view(window.shape).copy_(window, non_blocking=True)))

    def _converted(self) -> GradientSection | None:
        """Return the result in the dtype of ``.grad`` and on the device of the shards; None if the dtypes differ."""
        packing, section = self._packing, self._packing.target()
        dtypes = {param.dtype_of_gradient or packing.dtype for param in self.params}
        if len(dtypes) > 1:
            return None
        if dtypes == {packing.dtype} and not self.group.place.is_offloaded:
            return self._layout.section_in(section)
        packing.result = self._layout.take(dtypes.pop(), self.group.place)
        packing.result.flat.copy_(section, non_blocking=self.group.place.is_offloaded)
        return packing.result

    # ---- waiting ----

    def advance(self) -> None:
        """Wait for the reduce-scatter and launch the next stage; a second call does nothing.

        On streams the next stage is enqueued already: the current stream waits, and the reduce-scatter's input is freed.
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
        """Wait for all stages; on streams call :meth:`CommStreams.current_waits_for_reductions` before reading the result."""
        self.advance()
        if self._replicated is not None:
            self._replicated.wait()
            self._replicated = None
            if self._terms.hook is not None:
                self._terms.hook(self._packing.target())

    def cancel(self) -> None:
        """Cancel the collectives in flight and drop the result; a handle may have to wait for the backend first."""
        handles, self._scattered, self._replicated = (self._scattered, self._replicated), None, None
        for handle in handles:
            if handle is not None:
                handle.cancel()
        self._packing.give_back()

    # ---- the result ----

    def windows(self) -> Gradients:
        """Return this rank's reduced shards in the reduce dtype, windows of one buffer; call it after :meth:`finish`."""
        return dict(zip(self.params, self._layout.windows(self._packing.target()), strict=True))

    def scale_result(self, factor: float) -> None:
        """Multiply the result by ``factor``."""
        packing = self._packing
        for tensor in (
            self._stored if self.is_stored else [packing.target() if packing.result is None else packing.result.flat]
        ):
            tensor.mul_(factor)

    def set_gradients(self, is_hooked: bool, unused: Collection[ShardedParam] = ()) -> BaseException | None:
        """Accumulate the result into ``.grad`` of the sharded parameters; call it once, after :meth:`finish`.

        ``is_hooked``: run the users' gradient hooks first, which may change the result.  ``unused``: leave these as they are.
        Returns: the exception of a hook.
        """
        olds: list[torch.Tensor] = []
        news: list[torch.Tensor] = []
        packing = self._packing
        gradients = (
            packing.result.gradients if packing.result is not None and packing.is_final else self._as_gradients()
        )
        params: Sequence[ShardedParam] = self.params
        if unused:
            kept = [number for number, param in enumerate(params) if param not in unused]
            params, gradients = [params[number] for number in kept], [gradients[number] for number in kept]
        failed = change_by_hooks(params, gradients) if is_hooked else None
        for param, gradient in zip(params, gradients, strict=True):
            sharded = param.sharded
            existing = sharded.grad
            if existing is None:
                if param.full is sharded and param.is_strided:
                    gradient = torch.empty_like(sharded, dtype=gradient.dtype).copy_(gradient)
                sharded.grad = gradient
            else:
                if isinstance(existing, DTensor) and existing.placements != param.spec.placements:
                    # A loss on the shards themselves may leave a gradient with other placements, by DTensor's rules.
                    existing = sharded.grad = existing.redistribute(placements=param.spec.placements)
                olds.append(torch_private.local_of(existing))
                news.append(torch_private.local_of(gradient))
        if olds:
            torch_private.add_all(olds, news)
        packing.give_back()
        return failed

    def _as_gradients(self) -> list[torch.Tensor]:
        packing = self._packing
        if self.is_stored:
            return self._stored
        if packing.result is not None:
            return packing.result.gradients
        if (result := self._converted()) is not None:
            return result.gradients
        return [
            as_gradient(param, window.to(param.dtype_of_gradient or packing.dtype, copy=True))
            for param, window in self.windows().items()
        ]

    # ---- queries ----

    @property
    def is_due(self) -> bool:
        """True if :meth:`advance` would not wait for other ranks."""
        return self._scattered is None or self._scattered.is_done()

    @property
    def holds_input(self) -> bool:
        """True while the input of the reduce-scatter is allocated."""
        return self._scattered is not None and self._scattered.holds_input

    @property
    def label(self) -> str:
        """The names of the parameters, for messages."""
        return self._packing.label

    @property
    def is_collective(self) -> bool:
        """True if it takes a reduce-scatter."""
        return self._comm.reduce is not None and self.has_elements

    @property
    def num_bytes(self) -> int:
        """Bytes of its staging buffers."""
        return _staging(self.group, self._packing, self._scale)


@dataclass(frozen=True, slots=True)
class Brought:
    """The gradients of a group that are reduced now, or with those of other units.

    Attributes:
        gradients: the gradients in their reduce dtypes.
        partial: sums over the shard axis from earlier backwards, of some of the parameters.
        terms: the terms of the unit.
    """

    group: ParamGroup
    gradients: Gradients
    partial: Gradients
    terms: ReductionTerms


def launch_reductions(brought: Sequence[Brought]) -> list[Reduction]:
    """Launch the reductions of gradients that are sent together: one per dtype and scale, the same on every rank.

    They are removed from ``brought``, so that their memory is free once they are packed.
    """
    lots: dict[object, tuple[Brought, torch.dtype, list[ShardedParam], list[torch.Tensor], Gradients]] = {}
    for each in brought:
        group, gradients = each.group, each.gradients
        if each.partial:
            gradients = {param: widened(gradient, each.partial.get(param)) for param, gradient in gradients.items()}
        for dtype, params in by_reduce_dtype(group, dict(zip(gradients, map(_DTYPE, gradients.values()), strict=True))):
            key = dtype if len(brought) == 1 else (dtype, scale_of(group, dtype, each.terms.policy))
            own, lot = [*map(gradients.__getitem__, params)], lots.get(key)
            if lot is None:
                lots[key] = each, dtype, params, own, each.partial
            else:
                lots[key] = lot[0], dtype, [*lot[2], *params], [*lot[3], *own], {**lot[4], **each.partial}
        each.gradients.clear()
    launched: list[Reduction] = []
    while lots:
        first, dtype, params, own, partial = lots.pop(next(iter(lots)))
        group = first.group
        launched.append(Reduction(group, layout_of(group, params, dtype), own, dtype, first.terms, partial))
        del own
        if launched[-1].has_elements and group.is_collective:
            launched[-1].scatter()
        else:
            launched[-1].reduce_here(in_place=False)
    return launched


def widened(gradient: torch.Tensor, partial: torch.Tensor | None) -> torch.Tensor:
    """Return ``gradient`` in a dtype that can represent ``partial`` too; they differ only if ``grad_dtype`` is None."""
    if partial is None or partial.dtype is gradient.dtype:
        return gradient
    return gradient.to(torch.promote_types(gradient.dtype, partial.dtype))


def planned_scatter_bytes(group: ParamGroup, policy: UnitPolicy) -> int:
    """Return the staging bytes of the reduction of all trainable parameters."""
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
    """Return the parameters of ``dtypes`` by their dtype, in the group's order."""
    found = {*dtypes.values()}
    if len(found) == 1 and len(dtypes) == len(group.by_size):  # the usual case
        return [(found.pop(), group.by_size)]
    by_dtype: dict[torch.dtype, list[ShardedParam]] = {}
    for param in group.by_size:
        if param in dtypes:
            by_dtype.setdefault(dtypes[param], []).append(param)
    return list(by_dtype.items())


_MEAN = Scale()
_scale = functools.lru_cache(maxsize=64)(Scale)  # the same object in every step, since communicators cache by it


def scale_of(group: ParamGroup, dtype: torch.dtype, policy: UnitPolicy) -> Scale:
    """Return the scale of the reduce-scatter; the all-reduce after it takes :func:`_replica_scale`."""
    risky = dtype not in (torch.float32, torch.float64, torch.bfloat16)
    size = group.axes.num_shards * group.axes.num_replicas
    if policy.divide_factor is not None:
        return _scale(policy.divide_factor, policy.sum_only, risky)
    if risky or policy.sum_only:
        return _scale(float(size), policy.sum_only, risky)
    return _MEAN


def _replica_scale(scale: Scale) -> Scale:
    # Without an explicit divisor both collectives average; with one the reduce-scatter has already divided.
    return Scale() if scale.divisor is None else Scale(1.0, scale.sum_only)


# ---- Buckets that several units share, where nothing is sharded: one all-reduce for the gradients of all.

# Bucket sizes follow from the device and are not measured: sums over more than two ranks depend on the offset of an element
# in the buffer, so buckets must be the same in every run.
FULL_BYTES_ON_HOST = bucket_bytes(latency_s=150e-6, bytes_per_s=1.5e9)
FULL_BYTES_ON_STREAMS = bucket_bytes(latency_s=25e-6, bytes_per_s=1e11)
LARGE_BYTES = LEAST_BYTES  # on the host a gradient of this size is a bucket of its own, reduced in its own memory
_MOST_LAYOUTS = 64


def shares(group: ParamGroup) -> bool:
    """Return True if gradients of ``group`` take an all-reduce and nothing else: no reduce-scatter, no compression."""
    comm = group.bound_comm
    return comm is not None and comm.reduce is None and comm.replicas is not None and group.compression is None


def sharing_of(group: ParamGroup) -> Sharing | None:
    """Return the key and size by which gradients of ``group`` share buckets with other units; None if they share none."""
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
    """Return the buckets of a group that shares none with other units."""
    params = [param for param in group.params if param.sharded.requires_grad]
    num_bytes = [param.shard.numel * group.dtypes.of_reduction(param).itemsize for param in params]
    limit = FULL_BYTES_ON_STREAMS if group.place.on.has_streams else FULL_BYTES_ON_HOST
    return EarlyBuckets([[params[index] for index in bucket] for bucket in split_unit(num_bytes, limit)])


def _is_large(group: ParamGroup, param: ShardedParam, dtype: torch.dtype) -> bool:
    """Return True if the gradient of ``param`` is reduced in its own memory: within a host a copy costs as much as sending."""
    return not group.place.on.has_streams and param.shard.numel * dtype.itemsize >= LARGE_BYTES


def launch_large(brought: Brought, kept: Collection[ShardedParam]) -> list[Reduction]:
    """Launch the reductions of the large gradients and remove them from ``brought``; those in ``kept`` are copied first."""
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

"""The reduction of a unit's gradients: pack gradients, reduce them over ranks, set ``.grad`` of the sharded parameters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.collectives.routes import MOST_RANKS, Handle, ReductionChecksum, Scale
from shardwise.collectives.streams import SideStream, is_own
from shardwise.fsdp.flat_buffer import KEPT_BYTES, GradientSection, ReduceLayout, as_gradient
from shardwise.fsdp.local_gradients import Gradients, change_by_hooks
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.unit import Unit
from shardwise.plan.schedule import LEAST_BYTES, bucket_bytes, split_unit

_DTYPE = operator.attrgetter("dtype")
_MOST_LAYOUTS = 64


@dataclass(slots=True, eq=False)  # not frozen: frozen dataclasses take three times as long to make
class Launch:
    """Uncommitted reductions of a unit, and the earlier gradients that they include.

    Attributes:
        syncs_replicas: reduce over replicas, too; where ranks may diverge, all of them do so, or none.
        held, partial: gradients of earlier backwards that were taken from the unit.
        unused: parameters that have a gradient on no rank.
        factor: the gradients are multiplied by it.
    """

    unit: Unit
    syncs_replicas: bool
    held: Gradients
    partial: Gradients
    reductions: list[Reduction] = field(default_factory=list["Reduction"])
    unused: Set[ShardedParam] = frozenset()
    factor: float = 1.0

    @property
    def params(self) -> frozenset[ShardedParam]:
        """The parameters whose gradients are being reduced."""
        return frozenset([param for reduction in self.reductions for param in reduction.params])


def _make_layout(unit: Unit, params: list[ShardedParam], dtype: torch.dtype, key: tuple[object, ...]) -> ReduceLayout:
    """Return the layout in which gradients of ``params`` are reduced in ``dtype``; ``unit`` caches it by ``key``."""
    if len(unit.reduction.layouts) >= _MOST_LAYOUTS:  # a model whose execution order keeps changing
        unit.reduction.layouts.clear()
    storage, axes, comm = unit.settings.storage, unit.settings.axes, unit.memory.comm
    on_host = not storage.on.has_streams
    # On the host sections of a whole bucket are reused, too: a bucket has more gradients to make than a unit.
    kept_bytes = 2 * FULL_BYTES_ON_HOST if on_host and is_summed(unit) else KEPT_BYTES
    # On the host all-reduces over replicas carry a checksum element, in dtypes that represent it exactly.
    is_exact = dtype in (torch.float32, torch.float64) and 1 < axes.num_replicas <= MOST_RANKS
    num_spare = int(is_exact and on_host and not (len(params) == 1 and _is_large(unit, params[0], dtype)))
    alignment = storage.alignment(dtype, are_full=comm.reduce is comm.replicas is None)
    layout = ReduceLayout(params, alignment, axes.shard_rank, num_spare, kept_bytes)
    unit.reduction.layouts[key] = layout
    return layout


# Called with parameters and their reduced gradients before ``.grad`` is set, which for most is while backward still runs.  They
# belong to optimizers that update while backward runs, and change nothing.  The last argument: an event after which memory has
# the values; None if it has them.
early_readers: list[Callable[[Sequence[ShardedParam], Sequence[torch.Tensor], Any], None]] = []


class Reduction:
    """The reduction of the gradients of one dtype, and both ends of its collectives (``ScatterEnds``, ``SumContents``).

    Stages: reduce-scatter in flight, then (with replicas) all-reduce in flight, then a finished section.  On an accelerator
    all stages are enqueued on streams at once, with the copy to the host if gradients are offloaded; then only the memory of
    the reduce-scatter's input remains to be freed.

    Attributes:
        unit: the unit whose gradients it reduces.
        params: the parameters whose gradients are reduced.
        gradients: the full gradients, until they are packed.
        layout, label, section_numel: for the transports; :meth:`target` is the section that they reduce into.
        number, checksum: of the all-reduce; see :class:`ReductionChecksum`.
        has_elements: False when all parameters have size zero, so that there is nothing to send.
        has_next: :meth:`advance` will launch the stage after the reduce-scatter.
        is_partial: the gradients are reduced over the shard axis only; a later backward reduces them over replicas.
        holds_input: the input of the reduce-scatter is allocated.
        is_over: nothing is in flight, and :meth:`finish` has nothing to do.
    """

    def __init__(
        self, launch: Launch, dtype: torch.dtype, params: list[ShardedParam], gradients: list[torch.Tensor]
    ) -> None:
        unit = self.unit = launch.unit  # not the launch: that owns the reduction, and a cycle would keep memory
        self.dtype, self.gradients, self._storage = dtype, gradients, unit.settings.storage
        axes, policy = unit.settings.axes, unit.policy
        self._scale = scale_of(axes.num_shards * axes.num_replicas, dtype, policy.divide_factor, policy.sum_only)
        # In the usual case ``params`` is this very list, which saves hashing every parameter.
        # The layout depends on which parameters have gradients, mostly on all of them.
        known = unit.reduction
        key = (dtype,) if params is known.by_size else (dtype, *params)
        reduce_layout = known.layouts.get(key) or _make_layout(unit, params, dtype, key)
        self._reduce_layout = reduce_layout
        self.params, self.layout, self.label = reduce_layout.params, reduce_layout.bucket, reduce_layout.names
        self.section_numel, self.has_elements = self.layout.section_numel, self.layout.full_numel > 0
        self._hook, self._partial = unit.settings.all_reduce_hook, launch.partial
        self._comm = comm = unit.memory.bound_comm or unit.memory.comm
        self.is_partial = comm.replicas is not None and not launch.syncs_replicas
        self.has_next = comm.replicas is not None or bool(self._partial) or self._hook is not None
        dtypes = known.gradient_dtypes if params is known.by_size else {param.dtype for param in params}
        # The section that is received then holds the gradients that users see, without another copy.
        self._is_final = not self.is_partial and not self._storage.is_offloaded and dtypes == {dtype}
        # Handles of the two stages while they are in flight: the reduce-scatter, and the all-reduce over replicas.
        self._scattered: Handle | None = None
        self._replicated: Handle | None = None
        self.is_over = self.holds_input = self._is_dense = self._is_shown = False
        self.section: torch.Tensor | None = None
        self.number, self.checksum = 0, None
        self._result: GradientSection | None = None
        self._stored: list[torch.Tensor] | None = None
        launch.reductions.append(self)  # at once: should the next one raise, this one is cancelled

    # ---- the ends of the collectives ----

    def fill(self, packed: torch.Tensor) -> None:
        """Write every section of ``packed``, and release the gradients."""
        # A rank alone on its shard axis packs into the very memory that becomes ``.grad``: one copy, not two.
        if self.has_elements and self._result is not None and packed is self.section:
            # This rank has all shards: write the final gradients.
            if self.layout.has_padding:
                packed.zero_()
            torch_private.copy_all(self._result.windows, self.gradients)
        elif self.has_elements:
            self._reduce_layout.pack(self.gradients, packed)
        self.gradients.clear()

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        """Return the windows of the gradients that belong to ``rank``."""
        if not self._is_dense:
            self.gradients, self._is_dense = [gradient.contiguous() for gradient in self.gradients], True
        return self._reduce_layout.full_parts(self.gradients, rank)

    def drop(self) -> None:
        """Release the gradients."""
        self.gradients.clear()

    def target(self) -> torch.Tensor:
        """Return the section."""
        if self.section is None:
            if self._is_final:
                self._result = self._reduce_layout.take(self.dtype, self._storage)
                self.section = self._result.flat
            else:
                self.section = self._reduce_layout.empty(self.dtype, self._storage.device)
        return self.section

    def deliver(self, section: torch.Tensor) -> None:
        """Take the reduced section."""
        if section is not self.section:
            self.target().copy_(section)
        self.gradients.clear()

    # ---- launching ----

    def scatter(self) -> None:
        """Launch the reduce-scatter."""
        assert self._comm.reduce is not None
        self._scattered = self._comm.reduce.reduce_scatter(self, self._scale)
        # A link that reads gradients where they are has no input to hold, so it does not count against ``max_inputs``.
        self.holds_input = self._scattered.holds_input
        reduce = self._comm.streams.reduce
        if reduce.is_concurrent:  # streams order what follows, so the host does not wait
            self._follow_on_streams(reduce)

    def reduce_here(self, in_place: bool = False) -> None:
        """Skip the reduce-scatter, since this rank has all shards, and continue with the next stage.

        ``in_place``: the single gradient is reduced in its own memory.
        """
        if in_place:
            self.section = self.gradients.pop().contiguous().view(-1)
        else:
            self.fill(self.target())
        if self._comm.replicas is None and self._scale.divisor is not None:
            self.target().div_(self._scale.divisor)
        if self._comm.streams.reduce.is_concurrent:
            self._follow_on_streams(None)
        else:
            self.advance()

    def _follow_on_streams(self, stream: SideStream | None) -> None:
        """Enqueue all later stages; ``stream`` is where the section is summed, None for the current stream."""
        self.has_next = False
        with nullcontext() if stream is None else stream.run():
            self._launch_next()
        if self._replicated is not None:
            stream, self._replicated = self._comm.streams.replicas, None
            # torch's contract for this hook: it runs on the stream of the all-reduce, behind it.
            if self._hook is not None:
                with stream.run():
                    self._hook(self.target())
        if not self.is_partial and self._storage.is_offloaded:
            store = self._comm.streams.store
            with nullcontext() if stream is None else stream.run():
                store.wait_current()
            with store.run():
                self._stored = self._as_gradients()
            if early_readers:
                self.show(store.mark())
        elif early_readers and self._is_final:
            with nullcontext() if stream is None else stream.run():
                self.show()

    def _launch_next(self) -> None:
        """Add partial sums of earlier backwards, then launch the all-reduce over replicas or run the user's hook."""
        section, replicas, known = self.target(), self._comm.replicas, self.unit.reduction
        self.number = known.num_replica_sums
        known.num_replica_sums += replicas is not None  # ``cancel`` takes it back
        # Earlier backwards without replicas have left sums over the shard axis: one all-reduce serves all of them.
        if self._partial:
            for param, window in self.windows().items():
                if param in self._partial:
                    window.add_(self._partial[param])
        if replicas is not None and not self.is_partial and self.has_elements:
            scale = self._scale
            if self._comm.reduce is not None:
                # Without an explicit divisor both collectives average; with one the reduce-scatter has already divided.
                scale = Scale() if scale.divisor is None else Scale(1.0, scale.sum_only)
            num_spare = self._reduce_layout.num_spare
            end = section.storage_offset() + self.section_numel + num_spare
            if num_spare and section.untyped_storage().nbytes() == end * self.dtype.itemsize:
                whole = section.as_strided((self.section_numel + 1,), (1,))
                self.checksum = ReductionChecksum(whole, self.label, self.number)
            self._replicated = replicas.all_reduce(section, scale, self)
        elif self._hook is not None:
            self._hook(section)

    # ---- waiting ----

    def advance(self) -> None:
        """Wait for the reduce-scatter and launch the next stage; a second call does nothing.

        On streams the next stage is enqueued already: the current stream waits, and the reduce-scatter's input is freed.
        """
        if self._scattered is not None:
            self._scattered.wait()
            self._scattered, self.holds_input = None, False
        if self.has_next:
            self.has_next = False
            self._launch_next()
        self.is_over = self._replicated is None

    def finish(self) -> None:
        """Wait for all stages; on streams call :meth:`CommStreams.current_waits_for_reductions` before reading the result."""
        self.advance()
        if self._replicated is not None:
            self._replicated.wait()
            self._replicated = None
            if self._hook is not None:
                self._hook(self.target())

    def cancel(self) -> None:
        """Cancel the collectives in flight and drop the result; a handle may have to wait for the backend first."""
        handles, self._scattered, self._replicated = (self._scattered, self._replicated), None, None
        for handle in handles:
            if handle is not None:
                handle.cancel()
        if self._comm.replicas is not None and not self.has_next:
            self.unit.reduction.num_replica_sums -= 1
        if self._result is not None:
            self._result.is_taken = False

    # ---- the result ----

    def windows(self) -> Gradients:
        """Return this rank's shards in the reduce dtype, windows of one buffer; reduced after :meth:`finish`."""
        return dict(zip(self.params, self._reduce_layout.windows(self.target()), strict=True))

    def set_gradients(self, is_hooked: bool, launch: Launch) -> BaseException | None:
        """Accumulate the result into ``.grad`` of the sharded parameters; call it once, after :meth:`finish`.

        Args:
            is_hooked: run the users' gradient hooks first, which may change the result.
            launch: says by which factor the result is multiplied, and which parameters are left as they are.

        Returns: the exception of a hook.
        """
        olds: list[torch.Tensor] = []
        news: list[torch.Tensor] = []
        params: Sequence[ShardedParam] = self.params
        gradients = self._as_gradients() if self._stored is None else self._stored
        # Where ranks take different ways a parameter may have a gradient on none of them: ``.grad`` then stays what it was,
        # None included, and an optimizer skips it as on one process.
        if launch.unused:
            kept = [number for number, param in enumerate(params) if param not in launch.unused]
            params, gradients = [params[number] for number in kept], [gradients[number] for number in kept]
        if self._stored is None and self._comm.reduce is None:  # full ones; an all-reduce has padded none of them
            for number, each in enumerate(gradients := [*gradients]):
                if torch_private.local_of(each).data_ptr() % self._storage.on.alignment:
                    gradients[number] = each.clone()
        for gradient in gradients if launch.factor != 1.0 else ():
            torch_private.local_of(gradient).mul_(launch.factor)
        failed = change_by_hooks(params, gradients) if is_hooked else None
        for param, gradient in zip(params, gradients, strict=True):
            sharded = param.sharded
            existing = sharded.grad
            # As in autograd: the first gradient is taken as it is, later ones are added in place.
            if existing is None:
                if param.full is sharded and not sharded.is_contiguous():  # it gets the strides of its parameter
                    gradient = torch.empty_like(sharded, dtype=gradient.dtype).copy_(gradient)
                sharded.grad = gradient
            else:
                if isinstance(existing, DTensor) and existing.placements != param.spec.placements:
                    # A loss on the shards themselves may leave a gradient with other placements, by DTensor's rules.
                    existing = sharded.grad = existing.redistribute(placements=param.spec.placements)
                olds.append(torch_private.local_of(existing))
                news.append(torch_private.local_of(gradient))
        # All additions of a unit in one call: each alone costs more than its arithmetic.
        if olds:
            torch_private.add_all(olds, news)
        if self._result is not None:  # a later reduction may use its memory, once user code references none of it
            self._result.is_taken, self._result = False, None
        return failed

    def _as_gradients(self) -> list[torch.Tensor]:
        """Return the result as users see it: in the dtype of ``.grad``, on the device of the shards."""
        if self._is_final:
            if self._result is None:  # reduced in the memory of the gradient
                self._result = self._reduce_layout.section_in(self.target())
            return self._result.gradients
        storage, dtypes = self._storage, {param.dtype for param in self.params}
        if len(dtypes) == 1:
            self._result = self._reduce_layout.take(dtypes.pop(), storage)
            self._result.flat.copy_(self.target(), non_blocking=storage.is_offloaded)
            return self._result.gradients
        found: list[torch.Tensor] = []
        for param, window in self.windows().items():
            if storage.is_offloaded:
                flat = storage.on.host_memory(window.numel(), param.dtype, storage.pins)
                window = flat.view(window.shape).copy_(window, non_blocking=True)
            found.append(as_gradient(param, window if storage.is_offloaded else window.to(param.dtype, copy=True)))
        return found

    # ---- queries ----

    def show(self, ready: Any = None) -> None:
        """Give the result to the readers, once; ``ready``: an event after which its memory has the values.

        Without an event call it after :meth:`finish`, or on a stream that comes after all stages.
        """
        if not (self._is_shown or self.is_partial):
            self._is_shown = True
            if ready is None and self._comm.streams.are_concurrent:
                ready = self._storage.on.current_stream().record_event()
            if self._stored is None:
                self._stored = self._as_gradients()
            for reader in list(early_readers):
                reader(self.params, self._stored, ready)

    @property
    def is_due(self) -> bool:
        """True if :meth:`advance` would not wait for other ranks."""
        return self._scattered is None or self._scattered.is_done()

    @property
    def staging_bytes(self) -> int:
        """Bytes that its reduce-scatter stages; 0 if it takes none."""
        reduce = self._comm.reduce
        if reduce is None or not self.has_elements:
            return 0
        link, itemsize = reduce.planned_link, self.dtype.itemsize
        if link is not None and link.takes_scatter(self, self._scale):
            return link.scatter_staging(self.layout, itemsize)
        return self.section_numel * self.unit.settings.axes.num_shards * itemsize


def launch_reductions(launch: Launch, gradients: Gradients, apart: bool) -> list[Reduction]:
    """Launch the reductions of ``gradients`` of a unit, and remove them: one per dtype, the same on every rank.

    ``apart``: large ones come first, each in its own memory; those that include gradients of earlier backwards are copied.
    """
    unit, num_before = launch.unit, len(launch.reductions)
    for param in unit.reduction.by_size if apart else ():
        if (gradient := gradients.get(param)) is not None and _is_large(unit, param, gradient.dtype):
            each = Reduction(launch, gradient.dtype, [param], [gradients.pop(param)])
            each.reduce_here(param not in launch.held and is_own(gradient))
    for dtype, params in by_reduce_dtype(unit, gradients, [*map(_DTYPE, gradients.values())]):
        each = Reduction(launch, dtype, params, [*map(gradients.pop, params)])
        if each.has_elements and unit.memory.is_collective:
            each.scatter()
        else:
            each.reduce_here()
    return launch.reductions[num_before:]


def planned_scatter_bytes(unit: Unit) -> int:
    """Return the staging bytes of the reduction of all trainable parameters of ``unit``."""
    if not unit.memory.is_collective:
        return 0
    trainable = [param for param in unit.params if param.sharded.requires_grad]
    launch, dtypes = Launch(unit, True, {}, {}), [*map(unit.memory.reduce_dtype, trainable)]
    found = by_reduce_dtype(unit, trainable, dtypes)
    return sum(Reduction(launch, dtype, params, []).staging_bytes for dtype, params in found)


def by_reduce_dtype(
    unit: Unit, params: Iterable[ShardedParam], dtypes: Sequence[torch.dtype]
) -> list[tuple[torch.dtype, list[ShardedParam]]]:
    """Return ``params`` by their reduce dtypes, ``dtypes``, in the order of the unit's memory."""
    in_order = unit.reduction.by_size
    if len({*dtypes}) == 1 and len(dtypes) == len(in_order):  # the usual case
        return [(dtypes[0], in_order)]
    found = dict(zip(params, dtypes, strict=True))
    by_dtype: dict[torch.dtype, list[ShardedParam]] = {}
    for param in in_order:
        if param in found:
            by_dtype.setdefault(found[param], []).append(param)
    return list(by_dtype.items())


@functools.lru_cache(maxsize=64)  # the same object in every step, since communicators cache by it
def scale_of(num_ranks: int, dtype: torch.dtype, divide_factor: float | None, sum_only: bool) -> Scale:
    """Return the scale of the reduce-scatter of a mesh of ``num_ranks``, by the policy of the unit."""
    # A sum of many float16 gradients may overflow before it is divided; bfloat16 has the exponents of float32.
    risky = dtype not in (torch.float32, torch.float64, torch.bfloat16)
    if divide_factor is None and (risky or sum_only):
        divide_factor = float(num_ranks)
    return Scale(divide_factor, sum_only, risky)


# ---- Buckets of a unit that is alone, where nothing is sharded: they are reduced while its backward still runs.

# Bucket sizes follow from the device and are not measured: sums over more than two ranks depend on the offset of an element
# in the buffer, so buckets must be the same in every run.
FULL_BYTES_ON_HOST = bucket_bytes(latency_s=150e-6, bytes_per_s=1.5e9)
FULL_BYTES_ON_STREAMS = bucket_bytes(latency_s=25e-6, bytes_per_s=1e11)
LARGE_BYTES = LEAST_BYTES  # on the host a gradient of this size is a bucket of its own, reduced in its own memory


def is_summed(unit: Unit) -> bool:
    """Return True if gradients of ``unit`` take an all-reduce and nothing else: no reduce-scatter, coding or fixed order."""
    comm, settings = unit.memory.bound_comm, unit.settings
    is_alone = settings.compression is None and settings.sums is None
    return is_alone and comm is not None and comm.reduce is None and comm.replicas is not None


def split(unit: Unit) -> tuple[tuple[int, ...], ...]:
    """Return the buckets of the parameters of ``unit``, by ordinal."""
    pairs = [(param.shard.numel * unit.memory.reduce_dtype(param).itemsize, param) for param in unit.params]
    num_bytes = [size if param.sharded.requires_grad else None for size, param in pairs]
    on_streams = unit.settings.storage.on.has_streams
    return split_unit(num_bytes, FULL_BYTES_ON_STREAMS if on_streams else FULL_BYTES_ON_HOST)


def _is_large(unit: Unit, param: ShardedParam, dtype: torch.dtype) -> bool:
    """Return True if the gradient of ``param`` is reduced in its own memory: within a host a copy costs as much as sending."""
    on_host = not unit.settings.storage.on.has_streams
    return is_summed(unit) and on_host and param.shard.numel * dtype.itemsize >= LARGE_BYTES

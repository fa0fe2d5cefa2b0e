"""Gradients of a group: packed, reduced over ranks, and set on the sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import torch_private
from shardwise.comm.lanes import Lane
from shardwise.comm.protocol import Pending, Scale
from shardwise.layout import bucket as layout_bucket
from shardwise.layout.bucket import Bucket, build_bucket
from shardwise.layout.shard import Move, row_major
from shardwise.plan.policy import UnitPolicy
from shardwise.runtime.group import ShardGroup
from shardwise.runtime.param import UnitParam
from shardwise.runtime.precision import CPUOffloadPolicy
from shardwise.runtime.shards import packed_window

Gradients = dict[UnitParam, torch.Tensor]


def take_gradients(group: ShardGroup) -> Gradients:
    """Return the local gradients of the full parameters, in the dtypes that they are reduced in, and clear them there."""
    taken: Gradients = {}
    for param in group.params:
        full = param.full
        gradient = None if full is None else full.grad
        if gradient is None or full is None:
            continue
        full.grad = None
        if type(gradient) is not torch.Tensor:
            gradient = _local_gradient(gradient, param, group)
        dtype = group.precision.dtype_of_reduction(param.dtype)
        taken[param] = gradient if gradient.dtype is dtype else gradient.to(dtype)
    return taken


def _local_gradient(gradient: torch.Tensor, param: UnitParam, group: ShardGroup) -> torch.Tensor:
    gradient = torch_private.wait_tensor(gradient)
    if not isinstance(gradient, DTensor):
        return gradient
    assert param.inner_spec is not None
    placements = list(param.inner_spec.placements)
    dims, names = group.axes.dims, gradient.device_mesh.mesh_dim_names
    if dims is not None and names is not None:
        # On a full SPMD mesh the sum over the data-parallel axes is the reduction's to make.
        for name in (*dims.shard_names, *dims.replicate_names):
            placements[names.index(name)] = gradient.placements[names.index(name)]
    if gradient.placements != tuple(placements):
        gradient = gradient.redistribute(placements=placements)
    return torch_private.wait_tensor(torch_private.local_of(gradient))


def add_gradients(old: Mapping[UnitParam, torch.Tensor], new: Mapping[UnitParam, torch.Tensor]) -> Gradients:
    """Return the sum per parameter; tensors of one side alone are taken over, neither side is changed."""
    total: Gradients = dict(old)
    for param, gradient in new.items():
        total[param] = total[param] + gradient if param in total else gradient
    return total


class ReduceLayout:
    """Where the gradients of some parameters of a group lie in a packed buffer and in this rank's section of it."""

    def __init__(self, params: list[UnitParam], alignment: int, rank: int) -> None:
        self.bucket = build_bucket([param.shard for param in params], alignment)
        self.names = ", ".join(param.fqn for param in params[:3]) + (f" and {len(params) - 3} more" * (len(params) > 3))
        self.is_even = self.bucket.is_even
        self._moves = [self.bucket.moves(index, into_full=False) for index in range(len(params))]
        self._parts: dict[int, tuple[Move, ...]] = {}
        self._packed_windows: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of the pool's buffers, while it keeps them
        self._windows = [
            (offset, row_major(shape := shard.shard_shape(rank)), shape)
            for offset, shard in zip(self.bucket.offsets, self.bucket.shards, strict=True)
        ]

    def pack(self, gradients: list[torch.Tensor], packed: torch.Tensor) -> None:
        """Write every rank's part of every gradient to its place; padding becomes zero."""
        if self.is_even:
            num_shards = self.bucket.shards[0].num_shards
            rows = packed.view(num_shards, self.bucket.section_numel)
            if all(gradient.dtype == packed.dtype for gradient in gradients):
                torch.cat([gradient.reshape(num_shards, -1) for gradient in gradients], dim=1, out=rows)
                return
        if self.bucket.has_padding:
            packed.zero_()
        targets = self._packed_windows.get(packed)
        if targets is None:
            targets = [packed_window(packed, move) for moves in self._moves for move in moves]
            self._packed_windows[packed] = targets
        sources: list[torch.Tensor] = []
        for gradient, moves in zip(gradients, self._moves, strict=True):
            dense = gradient.contiguous()
            start = dense.storage_offset()
            sources += [dense.as_strided(move.shape, move.full_stride, start + move.full_offset) for move in moves]
        torch_private.copy_all(targets, sources)

    def full_parts(self, gradients: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Return the windows of ``gradients`` (row-major) that belong to ``rank``."""
        parts = self._parts.get(rank)
        if parts is None:
            parts = self._parts[rank] = self.bucket.parts(rank)
        return [
            gradient.as_strided(move.shape, move.full_stride, gradient.storage_offset() + move.full_offset)
            for gradient, move in zip(gradients, parts, strict=True)
        ]

    def windows(self, section: torch.Tensor) -> list[torch.Tensor]:
        """Return the shards in this rank's section."""
        start = section.storage_offset()
        return [section.as_strided(shape, stride, start + offset) for offset, stride, shape in self._windows]


def _layout_of(group: ShardGroup, params: list[UnitParam], dtype: torch.dtype) -> ReduceLayout:
    key = (dtype, *(param.ordinal for param in params))
    layout = group.reduce_layouts.get(key)
    if not isinstance(layout, ReduceLayout):
        alignment = 1 if group.device.type == "cpu" else max(16 // dtype.itemsize, 1)
        layout = group.reduce_layouts[key] = ReduceLayout(params, alignment, group.axes.shard_rank)
    return layout


@dataclass(slots=True, eq=False)
class _Packing:
    """The sending and receiving end of a reduce-scatter."""

    reduced: ReduceLayout
    gradients: list[torch.Tensor]
    dtype: torch.dtype
    section: torch.Tensor | None = None
    is_dense: bool = False

    @property
    def layout(self) -> Bucket:
        return self.reduced.bucket

    @property
    def label(self) -> str:
        return self.reduced.names

    @property
    def section_numel(self) -> int:
        return self.reduced.bucket.section_numel

    def fill(self, packed: torch.Tensor) -> None:
        self.reduced.pack(self.gradients, packed)
        self.gradients = []

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        if not self.is_dense:
            self.gradients = [gradient.contiguous() for gradient in self.gradients]
            self.is_dense = True
        return self.reduced.full_parts(self.gradients, rank)

    def drop(self) -> None:
        self.gradients = []

    def deliver(self, section: torch.Tensor) -> None:
        self.section = section
        self.gradients = []


@dataclass(slots=True, eq=False)
class Reduction:
    """Gradients of one dtype of one group on their way through the ranks.

    Stages: reduce-scatter in flight, then (with replicas) all-reduce in flight, then a finished section.
    """

    group: ShardGroup
    params: list[UnitParam]
    packing: _Packing
    pending: Pending | None
    lane: Lane
    scale: Scale
    replica_scale: Scale
    syncs_replicas: bool
    partial: Gradients
    hook: Callable[[torch.Tensor], None] | None
    _is_scattered: bool = field(default=False)

    def advance(self) -> None:
        """Wait for the reduce-scatter and launch what follows it; does nothing the second time."""
        if self._is_scattered:
            return
        self._is_scattered = True
        with self.lane.run():
            if self.pending is not None:
                self.pending.wait()
            section = self._section()
            if self.partial:
                for param, window in zip(self.params, self.packing.reduced.windows(section), strict=True):
                    if param in self.partial:
                        window.add_(self.partial[param])
            self.pending = None
            replicas = self.group.comm.replicas
            if replicas is not None and self.syncs_replicas:
                self.pending = replicas.all_reduce(section, self.replica_scale)
            elif self.hook is not None:
                self.hook(section)

    def finish(self) -> Gradients:
        """Return this rank's reduced shards in the reduce dtype; the current stream may read them."""
        self.advance()
        with self.lane.run():
            if self.pending is not None:
                self.pending.wait()
                self.pending = None
                if self.hook is not None:
                    self.hook(self._section())
        self.lane.current_waits(self.lane.mark())
        return dict(zip(self.params, self.packing.reduced.windows(self._section()), strict=True))

    def cancel(self) -> None:
        """Let the collective end, if it can, and forget its result."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.cancel()

    @property
    def is_due(self) -> bool:
        """True if :meth:`advance` would not wait for other ranks."""
        return self.pending is None or self.pending.is_done()

    @property
    def holds_input(self) -> bool:
        """True while the packed or local gradients are allocated."""
        return not self._is_scattered and self.pending is not None and self.pending.holds_input

    @property
    def label(self) -> str:
        """The parameters, for messages."""
        return self.packing.label

    @property
    def is_collective(self) -> bool:
        """True when shards of other ranks are summed."""
        return self.group.comm.reduce is not None

    @property
    def is_partial(self) -> bool:
        """True when replicas have not been summed: the result is kept for a later backward."""
        return self.group.comm.replicas is not None and not self.syncs_replicas

    @property
    def num_bytes(self) -> int:
        """Bytes that it stages."""
        return _staging(self.group, self.packing, self.scale)

    def _section(self) -> torch.Tensor:
        section = self.packing.section
        assert section is not None
        return section


def launch_reductions(
    group: ShardGroup,
    gradients: Gradients,
    policy: UnitPolicy,
    partial: Gradients,
    lane: Lane,
    hook: Callable[[torch.Tensor], None] | None,
    kept: Collection[UnitParam] = (),
) -> list[Reduction]:
    """Start the reduction of ``gradients``: one per reduce dtype, parameters in the same order on every rank.

    Where there is but an all-reduce, on CPU, large gradients are reduced where they are, unless they are among ``kept``:
    packing and the page faults of new memory cost as much as the network within a host.
    """
    launched: list[Reduction] = []
    reduces_in_place = group.comm.reduce is None and group.comm.replicas is not None and group.device.type == "cpu"
    for dtype, params in _by_reduce_dtype(group, gradients):
        packed: list[UnitParam] = []
        for param in params:
            if (
                reduces_in_place
                and hook is None
                and param.shard.numel >= layout_bucket.LARGE_NUMEL
                and param not in kept
            ):
                launched.append(_launch(group, [param], [gradients[param]], dtype, policy, partial, lane, hook, True))
            else:
                packed.append(param)
        if packed:
            own = [gradients[param] for param in packed]
            launched.append(_launch(group, packed, own, dtype, policy, partial, lane, hook))
    return launched


def planned_scatter_bytes(group: ShardGroup, policy: UnitPolicy) -> int:
    """Return the bytes that the reduction of all trainable parameters stages."""
    if not group.is_collective:
        return 0
    trainable = {param for param in group.params if param.sharded.requires_grad}
    return sum(
        _staging(group, _Packing(_layout_of(group, params, dtype), [], dtype), scale_of(group, dtype, policy))
        for dtype, params in _by_reduce_dtype(group, trainable)
    )


def _staging(group: ShardGroup, packing: _Packing, scale: Scale) -> int:
    itemsize = packing.dtype.itemsize
    comm = group.bound_comm.reduce if group.bound_comm is not None else None
    link = comm.planned_link if comm is not None else None
    if link is not None and link.takes_scatter(packing, scale):
        return link.scatter_staging(packing.layout, itemsize)
    return packing.section_numel * group.axes.num_shards * itemsize


def _by_reduce_dtype(group: ShardGroup, chosen: Collection[UnitParam]) -> list[tuple[torch.dtype, list[UnitParam]]]:
    by_dtype: dict[torch.dtype, list[UnitParam]] = {}
    for param in group.by_size:
        if param in chosen:
            by_dtype.setdefault(group.precision.dtype_of_reduction(param.dtype), []).append(param)
    return list(by_dtype.items())


def _launch(
    group: ShardGroup,
    params: list[UnitParam],
    gradients: list[torch.Tensor],
    dtype: torch.dtype,
    policy: UnitPolicy,
    partial: Gradients,
    lane: Lane,
    hook: Callable[[torch.Tensor], None] | None,
    in_place: bool = False,
) -> Reduction:
    layout = _layout_of(group, params, dtype)
    packing = _Packing(layout, gradients, dtype)
    scale = scale_of(group, dtype, policy)
    mine = {param: partial[param] for param in params if param in partial}
    pending: Pending | None = None
    replica_scale = _replica_scale(scale)
    comm = group.comm.reduce
    if comm is None:
        if in_place:
            section = gradients[0].contiguous().view(-1)
        else:
            section = torch.empty(packing.section_numel, dtype=dtype, device=group.device)
            packing.fill(section)
        packing.deliver(section)
        replica_scale = scale
        if group.comm.replicas is None and scale.divisor is not None:
            section.div_(scale.divisor)
    else:
        pending = comm.reduce_scatter(packing, scale)
    reduction = Reduction(
        group, params, packing, pending, lane, scale, replica_scale, policy.syncs_replicas, mine, hook
    )
    if lane.is_concurrent or pending is None:  # what follows need not wait for other ranks, or is there already
        reduction.advance()
    return reduction


def scale_of(group: ShardGroup, dtype: torch.dtype, policy: UnitPolicy) -> Scale:
    """Return the scale of the reduce-scatter; the all-reduce after it takes :func:`_replica_scale`."""
    risky = dtype not in (torch.float32, torch.float64, torch.bfloat16)
    size = group.axes.num_shards * group.axes.num_replicas
    if policy.divide_factor is not None:
        return Scale(policy.divide_factor, policy.sum_only, risky)
    if risky or policy.sum_only:
        return Scale(float(size), policy.sum_only, risky)
    return Scale()


def _replica_scale(scale: Scale) -> Scale:
    # Without an explicit divisor both collectives average; with one the reduce-scatter has divided by all of it.
    return Scale() if scale.divisor is None else Scale(1.0, scale.sum_only)


def set_gradients(group: ShardGroup, shards: Gradients) -> None:
    """Accumulate reduced shards into ``.grad`` of the sharded parameters."""
    casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    olds: list[torch.Tensor] = []
    news: list[torch.Tensor] = []
    device = group.storage_device
    for param, shard in shards.items():
        sharded = param.sharded
        is_wrapped = isinstance(sharded, DTensor)
        dtype = torch_private.local_of(sharded).dtype
        local = (
            shard if shard.dtype is dtype and shard.device == device else _in_storage_form(group, dtype, shard, casts)
        )
        existing = sharded.grad
        if existing is None:
            sharded.grad = (
                torch_private.dtensor_from_local(local, torch_private.spec_of(sharded)) if is_wrapped else local
            )
        else:
            olds.append(torch_private.local_of(existing))
            news.append(local)
    if olds:
        torch_private.add_all(olds, news)


def run_gradient_hooks(shards: Gradients) -> None:
    """Run the hooks that users registered on sharded parameters to follow the accumulation of their gradients."""
    for param in shards:
        for hook in torch_private.post_accumulate_hooks(param.sharded):
            hook(param.sharded)


def _in_storage_form(
    group: ShardGroup, dtype: torch.dtype, shard: torch.Tensor, casts: dict[tuple[int, torch.dtype], torch.Tensor]
) -> torch.Tensor:
    # Shards of one reduction are windows of one buffer: cast and move the buffer once, then take the windows again.
    storage = shard.untyped_storage()
    key = (storage.data_ptr(), dtype)
    if key not in casts:
        whole = torch.empty(0, dtype=shard.dtype, device=shard.device)
        whole.set_(storage, 0, (storage.nbytes() // shard.dtype.itemsize,), (1,))
        pin = isinstance(group.offload, CPUOffloadPolicy) and group.offload.can_pin and shard.device.type != "cpu"
        moved = torch.empty(whole.shape, dtype=dtype, device=group.storage_device, pin_memory=pin)
        casts[key] = moved.copy_(whole)
    return casts[key].as_strided(shard.shape, shard.stride(), shard.storage_offset())

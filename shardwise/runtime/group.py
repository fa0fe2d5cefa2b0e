"""The parameters of a unit on one mesh: gathered in one collective, reduced in one per dtype."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.comm.buffers import BufferPool
from shardwise.comm.c10d import AllGatherFunction, ReduceScatterFunction
from shardwise.comm.link import Link
from shardwise.comm.protocol import GatherEnds, Pending
from shardwise.comm.routes import RoutedCommunicator
from shardwise.errors import StateError
from shardwise.layout.bucket import build_bucket, by_size
from shardwise.layout.shard import ChunkShard
from shardwise.runtime.axes import MeshAxes
from shardwise.runtime.extension import ExtensionParams
from shardwise.runtime.freed import mark_freed, mark_full
from shardwise.runtime.param import UnitParam
from shardwise.runtime.placement import sub_parameter
from shardwise.runtime.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.runtime.shards import FlatBucket, FullBuffer, Shards, make_full_parameter


@dataclass(slots=True)
class GroupComm:
    """How a group talks: along the shard axis, along the replica axis, and along the smaller mesh after forward."""

    shards: RoutedCommunicator | None
    reduce: RoutedCommunicator | None
    replicas: RoutedCommunicator | None
    sub: RoutedCommunicator | None = None


@dataclass(slots=True)
class _Delivery:
    """The receiving end of an all-gather from ``shards`` into a group's full buffers."""

    group: ShardGroup
    shards: Shards
    ends: Sequence[GatherEnds] = ()

    def buckets(self) -> Sequence[GatherEnds]:
        return self.ends

    def shard(self) -> torch.Tensor:
        return self.shards.section()

    def deliver(self, packed: torch.Tensor) -> None:
        self.shards.unpack(packed, self.group.hold_fulls())


class _BucketEnds:
    """One bucket of a group, for transports that move parts."""

    def __init__(self, group: ShardGroup, shards: Shards, number: int) -> None:
        self._group_ref, self._shards, self._number = weakref.ref(group), shards, number
        self._bucket = bucket = shards.buckets[number]
        self.layout, self.dtype, self.full_dtype = bucket.layout, bucket.dtype, bucket.full_dtype

    @property
    def home(self) -> int | None:
        return self._bucket.home

    def section(self) -> torch.Tensor:
        return self._shards.section_of(self._bucket)

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        group = self._group_ref()
        assert group is not None
        return self._shards.full_parts(self._number, rank, group.hold_full(self._number))

    def lose_full(self) -> object:
        group = self._group_ref()
        return None if group is None else group.lose_full(self._number)


class ShardGroup:
    """Parameters of one unit that share a mesh.

    Attributes:
        params: in the order of the modules.  by_size: the order in memory, large ones first.
        is_collective: gathering and reducing take a collective.
        axes: the data-parallel mesh.  sub_axes: the smaller one that parameters go to after forward, if any.
    """

    def __init__(
        self,
        params: list[UnitParam],
        axes: MeshAxes,
        precision: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        device: torch.device,
    ) -> None:
        self.params = params
        self.by_size = [params[index] for index in by_size([param.shard for param in params])]
        self._members = set(params)
        self.axes = axes
        self.sub_axes: MeshAxes | None = None
        self.precision = precision
        self.offload = offload
        self.device = device
        # Beside tensor parallelism the collectives of a shard axis of one rank are issued too, as torch's tests count
        # them; alone it has none.
        has_tensor_parallelism = any(param.inner_spec is not None for param in params)
        self.is_collective = axes.shard_mesh_dim is not None and (axes.num_shards > 1 or has_tensor_parallelism)
        self.extended = ExtensionParams(self)
        self._main: Shards | None = None
        self._sub: Shards | None = None
        self._fulls: list[FullBuffer] = []
        self._full_bytes = 0
        self._staging: tuple[tuple[Shards, Link | None], tuple[int, bool]] | None = None
        self._ends: list[_BucketEnds] = []
        self.custom_all_gather: AllGatherFunction | None = None
        self.custom_reduce_scatter: ReduceScatterFunction | None = None
        self.reduce_process_group: dist.ProcessGroup | None = None
        self.reduce_layouts: dict[tuple[object, ...], object] = {}
        self.allocates_from_process_group = False
        self._pool: BufferPool | None = None
        self._comm: GroupComm | None = None

    # ---- flat memory ----

    @property
    def storage_device(self) -> torch.device:
        """Where the shards live."""
        return torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else self.device

    @property
    def gather_staging(self) -> tuple[int, bool]:
        """Bytes that a launched all-gather holds, and whether its full parameters are among them."""
        if self._main is None or not self.is_collective:
            return 0, False
        comm = self._comm.shards if self._comm is not None else None
        key = (self._main, comm.planned_link if comm is not None else None)
        if self._staging is None or self._staging[0] != key:
            self._staging = (key, self._compute_staging(self._main))
        return self._staging[1]

    def _compute_staging(self, main: Shards) -> tuple[int, bool]:
        link = self._planned_link()
        if link is None:
            return main.packed_bytes, False
        stagings = [link.gather_staging(bucket.layout, bucket.full_dtype.itemsize) for bucket in main.buckets]
        in_place = any(is_in_place for _, is_in_place in stagings)
        return sum(num_bytes for num_bytes, _ in stagings) + (self.full_bytes if in_place else 0), in_place

    @property
    def route(self) -> str:
        """How parameters travel, as far as it is known: the name of a link, "collectives", or "" for not at all."""
        if self._main is None or not self.is_collective:
            return ""
        link = self._planned_link()
        return "collectives" if link is None else link.name

    def _planned_link(self) -> Link | None:
        comm = self._comm.shards if self._comm is not None else None
        link = comm.planned_link if comm is not None else None
        if link is None or self._main is None or self.extended.params:
            return None
        return link if link.takes_gather(_Delivery(self, self._main, self._ends)) else None

    @property
    def members(self) -> set[UnitParam]:
        """The parameters as a set."""
        return self._members

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters beyond the shards."""
        return self._full_bytes

    @property
    def main_buckets(self) -> Sequence[FlatBucket]:
        """The sections of all ranks' shards, as they are now."""
        return self._main.buckets if self._main is not None else ()

    def forget_homes(self) -> None:
        """Take it that no section lies in shared memory: what it lay in is no link's any more."""
        for bucket in self.main_buckets:
            bucket.home = None

    def largest_reductions(self) -> list[tuple[int, int]]:
        """Return (elements of a section, bytes of an element) of the reduction of all parameters, per reduce dtype."""
        by_dtype: dict[torch.dtype, int] = {}
        for param in self.params:
            dtype = self.precision.dtype_of_reduction(param.dtype)
            by_dtype[dtype] = by_dtype.get(dtype, 0) + param.shard.section_numel
        return [(numel, dtype.itemsize) for dtype, numel in by_dtype.items()]

    def ensure_packed(self) -> None:
        """Gather the shards into flat memory again if user code has replaced a parameter or its memory."""
        if self._main is None or not self._is_packed():
            self._pack()

    def _is_packed(self) -> bool:
        assert self._main is not None
        local_of, may_be_extended = torch_private.local_of, bool(self.extended.params)
        for bucket in self._main.buckets:
            base, dtype, device = bucket.local.data_ptr(), bucket.dtype, bucket.local.device
            for param, slot, start in bucket.places:
                sharded = param.sharded
                if slot.parameters[slot.name] is not sharded and not param.is_registered:
                    return False
                local = local_of(sharded)
                if start is not None and local.data_ptr() != base + start:
                    return False
                if local.dtype is not dtype or local.device != device:
                    return False
                may_be_extended = may_be_extended or bool(local.__dict__)  # extensions are patched on
        return not may_be_extended or self.extended.is_current(self.params)

    def _pack(self) -> None:
        for param in self.params:
            param.adopt_registered()
        plain = [param for param in self.params if not self.extended.wants(param)]
        self.extended.adopt([param for param in self.params if self.extended.wants(param)])
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[UnitParam]] = {}
        for param in (each for each in self.by_size if each in set(plain)):
            by_dtype.setdefault((param.dtype, self.precision.dtype_of_full(param.dtype)), []).append(param)
        buckets = [self._make_bucket(params, *dtypes) for dtypes, params in by_dtype.items()]
        self._main = Shards(buckets, self.axes.num_shards, self.device)
        self._sub = None
        self._fulls = [self._make_full(bucket) for bucket in buckets]
        self._full_bytes = sum(full.num_bytes for full in self._fulls)
        self._ends = [_BucketEnds(self, self._main, number) for number in range(len(buckets))]
        for param in plain:
            param.full = None
            param.is_hooked = False

    def _make_bucket(self, params: list[UnitParam], dtype: torch.dtype, full_dtype: torch.dtype) -> FlatBucket:
        layout = build_bucket([param.shard for param in params], self._alignment(dtype), self._alignment(full_dtype))
        device = params[0].local.device
        local = torch.zeros(layout.section_numel, dtype=dtype, device=device)
        if isinstance(self.offload, CPUOffloadPolicy) and self.offload.can_pin and device.type == "cpu":
            local = local.pin_memory()
        bucket = FlatBucket(params, layout, dtype, full_dtype, local)
        rank = self.axes.shard_rank
        with torch.no_grad():
            for index, param in enumerate(params):
                window = Shards.local_view(bucket, index, rank)
                if device.type != "meta":
                    window.copy_(param.local)
                torch_private.set_local(param.sharded, window.requires_grad_(param.local.requires_grad))
        return bucket

    def _alignment(self, dtype: torch.dtype) -> int:
        # 16 bytes keep vector loads of an accelerator's kernels possible; on CPU gaps would only cost.
        return 1 if self.device.type == "cpu" else max(16 // dtype.itemsize, 1)

    def _make_full(self, bucket: FlatBucket) -> FullBuffer:
        is_same = bucket.dtype == bucket.full_dtype and bucket.local.device == self.device
        shared = bucket.local if not self.is_collective and is_same else None
        return FullBuffer(bucket.layout, bucket.full_dtype, self.device, shared)

    # ---- unshard and reshard ----

    def bind(self, pool: BufferPool, comm: GroupComm) -> None:
        """Use ``pool`` for memory and ``comm`` for collectives from here on."""
        self._pool = pool
        self._comm = comm

    @property
    def pool(self) -> BufferPool:
        """Where full parameters and staging buffers come from."""
        if self._pool is None:
            raise StateError(
                "parameters were asked for before an engine was there; run the root's forward or unshard()"
            )
        return self._pool

    @property
    def bound_comm(self) -> GroupComm | None:
        """How the group talks, None before an engine is there."""
        return self._comm

    @property
    def comm(self) -> GroupComm:
        """How the group talks."""
        if self._comm is None:
            raise StateError(
                "a collective was asked for before an engine was there; run the root's forward or unshard()"
            )
        return self._comm

    def gather(self, from_sub: bool, checks: bool = True) -> Pending | None:
        """Launch the all-gather of the full parameters; None if there is nothing to wait for.

        ``checks=False``: the caller knows that nobody has replaced a parameter since the last check.
        """
        if not from_sub and (checks or self._main is None):
            self.ensure_packed()
        shards, comm = (self._sub, self.comm.sub) if from_sub else (self._main, self.comm.shards)
        assert shards is not None
        delivery = _Delivery(self, shards, () if from_sub or self.extended.params else self._ends)
        if self.extended.params and not from_sub:
            return self.extended.gather(delivery, len(shards.buckets))
        if not shards.buckets:
            return None
        if comm is None:
            if not all(full.is_shared for full in self._fulls):
                delivery.deliver(delivery.shard())
            return None
        return comm.all_gather(delivery)

    def hold_full(self, number: int) -> torch.Tensor:
        """Return the 1-D full buffer of bucket ``number``, with memory under it."""
        return self._fulls[number].hold(self.pool)

    def lose_full(self, number: int) -> object:
        """Take the memory under the full buffer of bucket ``number`` out of use; return what keeps it alive."""
        return self._fulls[number].lose()

    def hold_fulls(self) -> list[torch.Tensor]:
        """Return the 1-D full buffers, with memory under them."""
        return [full.hold(self.pool) for full in self._fulls]

    def register_full(self, on_gradient: Callable[[UnitParam], Callable[[torch.Tensor], None]]) -> int:
        """Hang the full parameters on the modules; return how many of them want gradients.

        ``on_gradient(param)`` makes the hook that a full parameter runs when its gradient has been accumulated.
        """
        assert self._main is not None
        num_trainable = 0
        for number, bucket in enumerate(self._main.buckets):
            for index, param in enumerate(bucket.params):
                full = param.full
                if full is None:
                    shape, base = param.shard.shape, bucket.layout.full_offsets[index]
                    full = param.full = make_full_parameter(self.hold_full(number), shape, base, param)
                mark_full(full)
                wanted = param.sharded.requires_grad
                if not (wanted and param.is_hooked and full.requires_grad):
                    self._sync_requires_grad(param, full, on_gradient)
                num_trainable += wanted
                for slot in param.slots:
                    slot.parameters[slot.name] = full
        for param in self.extended.params:
            full = param.full
            assert full is not None
            self._sync_requires_grad(param, full, on_gradient)
            num_trainable += param.sharded.requires_grad
            param.register(full)
        return num_trainable

    @staticmethod
    def _sync_requires_grad(
        param: UnitParam, full: nn.Parameter, on_gradient: Callable[[UnitParam], Callable[[torch.Tensor], None]]
    ) -> None:
        wanted = param.sharded.requires_grad
        if full.requires_grad is not wanted:
            full.requires_grad_(wanted)
        if wanted and not param.is_hooked:
            full.register_post_accumulate_grad_hook(on_gradient(param))
            param.is_hooked = True

    def register_sharded(self) -> None:
        """Hang the sharded parameters on the modules and give the full memory back."""
        for param in self.params:
            sharded = param.sharded
            for slot in param.slots:
                slot.parameters[slot.name] = sharded
        self.drop()

    def drop(self) -> None:
        """Give the memory of the full parameters back."""
        if self._main is not None:
            for bucket, buffer in zip(self._main.buckets, self._fulls, strict=True):
                buffer.drop()
                if not buffer.is_held:
                    for param in bucket.params:
                        mark_freed(param.full, param.fqn)
        self.extended.drop()

    def drop_sub(self) -> None:
        """Give the shards of the smaller mesh back."""
        self._sub = None
        for param in self.params:
            param.subsharded = None

    def cut_to_sub(self) -> None:
        """Keep this rank's shard on the smaller mesh, hang it on the modules, give the full memory back."""
        assert self._main is not None
        assert self.sub_axes is not None
        num_shards, rank = self.sub_axes.num_shards, self.sub_axes.shard_rank
        buckets: list[FlatBucket] = []
        for bucket in self._main.buckets:
            cuts = [ChunkShard(shard.shape, shard.dim, num_shards) for shard in bucket.layout.shards]
            dtype = bucket.full_dtype
            layout = build_bucket(cuts, self._alignment(dtype), self._alignment(dtype))
            local = torch.empty(layout.section_numel, dtype=dtype, device=self.device)
            buckets.append(FlatBucket(bucket.params, layout, dtype, dtype, local))
        self._sub = Shards(buckets, num_shards, self.device)
        self._sub.cut_from(self.hold_fulls(), rank)
        for bucket in buckets:
            for index, param in enumerate(bucket.params):
                window = Shards.local_view(bucket, index, rank)
                param.subsharded = sub_parameter(param, bucket.layout.shards[index], window, self.sub_axes)
                param.register(param.subsharded)
        self.drop()

    def flat_locals(self) -> Sequence[FlatBucket]:
        """Return the buckets whose ``local`` tensors hold all plain shards."""
        self.ensure_packed()
        assert self._main is not None
        return self._main.buckets

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
from shardwise.comm.communicator import BucketEnds, Pending
from shardwise.comm.links.link import Link
from shardwise.comm.links.parts import have_same_bits
from shardwise.comm.links.routes import RoutedCommunicator
from shardwise.errors import StateError
from shardwise.layout.bucket import build_bucket, by_size
from shardwise.layout.shard import ChunkShard
from shardwise.units.axes import MeshAxes
from shardwise.units.extension import ExtensionParams
from shardwise.units.idle import FreedParameter, mark_freed, mark_full, mark_kept, may_be_written
from shardwise.units.param import UnitParam
from shardwise.units.placement import sub_parameter
from shardwise.units.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.units.reduce_layout import ReduceLayout
from shardwise.units.shards import Allocator, FlatBucket, FullBuffer, Shards, SubBucket, make_full_parameter


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
    ends: Sequence[BucketEnds] = ()

    def buckets(self) -> Sequence[BucketEnds]:
        return self.ends

    def shard(self) -> torch.Tensor:
        return self.shards.section()

    def deliver(self, packed: torch.Tensor) -> None:
        self.shards.unpack(packed, self.group.hold_fulls())


class _BucketEnds:
    """One bucket of a group, for transports that move parts."""

    def __init__(self, group: ShardGroup, shards: Shards, bucket: FlatBucket, index: int) -> None:
        self._group_ref, self._shards, self._index = weakref.ref(group), shards, index
        self._bucket = bucket
        self.layout, self.dtype, self.full_dtype = bucket.layout, bucket.dtype, bucket.full_dtype

    @property
    def number(self) -> int | None:
        return self._bucket.number

    def section(self) -> torch.Tensor:
        return self._shards.section_of(self._bucket)

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        group = self._group_ref()
        assert group is not None
        return self._shards.full_parts(self._index, rank, group.hold_full(self._index))

    def lose_full(self) -> object:
        group = self._group_ref()
        return None if group is None else group.lose_full(self._index)


class ShardGroup:
    """Parameters of one unit that share a mesh.

    Attributes:
        params: in the order of the modules.  by_size: the order in memory, large ones first.  members: the same as a set.
        full_bytes: of the full parameters beyond the shards.
        reduce_dtypes: in which gradients are reduced, by their dtype, of parameters without one of their own.
        is_collective: gathering and reducing take a collective.
        keeps_plain: parameters are what they were before, plain tensors that stay registered.
        num_packs: how often parameters were put together.
        in_place: those of them that need no other form to compute with.
        shares_memory: shards are made where other ranks of this host could read them.
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
        self.members = set(params)
        self._tied: list[UnitParam] = []
        self.note_ties()
        self.axes = axes
        self.sub_axes: MeshAxes | None = None
        self.precision = precision
        self.reduce_dtypes: dict[torch.dtype, torch.dtype] = {}
        self.offload = offload
        self.device = device
        # Beside tensor parallelism the collectives of a shard axis of one rank are issued too, as torch's tests count
        # them; alone it has none.
        has_tensor_parallelism = any(param.inner_spec is not None for param in params)
        self.is_collective = axes.shard_mesh_dim is not None and (axes.num_shards > 1 or has_tensor_parallelism)
        self.shares_memory = self.keeps_plain = False
        self.num_packs = 0
        self.in_place: list[UnitParam] = []
        self._take = self._make_take()
        self.extended = ExtensionParams(axes, precision, device)
        self._buckets: list[FlatBucket] = []
        self._main: Shards | None = None
        self._sub: Shards | None = None
        self._fulls: list[FullBuffer] = []
        self.full_bytes = 0
        self._staging: tuple[tuple[Shards, Link | None], tuple[int, bool]] | None = None
        self._ends: list[_BucketEnds] = []
        self.custom_all_gather: AllGatherFunction | None = None
        self.custom_reduce_scatter: ReduceScatterFunction | None = None
        self.reduce_process_group: dist.ProcessGroup | None = None
        self.reduce_layouts: dict[tuple[object, ...], ReduceLayout] = {}
        self.allocates_from_process_group = False
        self._pool: BufferPool | None = None
        self._comm: GroupComm | None = None

    def release(self, params: Sequence[UnitParam]) -> None:
        """Be without those of ``params`` that are members."""
        gone = self.members & set(params)
        if gone:
            self.params = [param for param in self.params if param not in gone]
            self.by_size = [param for param in self.by_size if param not in gone]
            self.members -= gone
            if self.params:
                self._pack()

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
    def main_buckets(self) -> Sequence[FlatBucket]:
        """The sections of all ranks' shards, as they are now."""
        return self._buckets

    def largest_reductions(self) -> list[tuple[int, int]]:
        """Return (elements of a section, bytes of an element) of the reduction of all parameters, per reduce dtype."""
        by_dtype: dict[torch.dtype, int] = {}
        for param in self.params:
            dtype = self.dtype_of_reduction(param)
            by_dtype[dtype] = by_dtype.get(dtype, 0) + param.shard.section_numel
        return [(numel, dtype.itemsize) for dtype, numel in by_dtype.items()]

    def dtype_of_full(self, param: UnitParam) -> torch.dtype:
        """Return the dtype in which ``param`` is all-gathered and used."""
        return param.dtype_of_full(self.precision)

    def dtype_of_reduction(self, param: UnitParam, found: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype in which gradients of ``param`` are reduced and held.

        ``found``: of the gradient that has come; it counts where the parameter takes any.
        """
        full = self.dtype_of_full(param)
        if param.grad_dtype is not None and self.precision.reduce_dtype is None:
            return param.grad_dtype.dtype or found or full
        return self.precision.dtype_of_reduction(param.dtype, full)

    def takes_any_gradient(self, param: UnitParam) -> bool:
        """Return True if gradients of ``param`` are reduced in whatever dtype they come."""
        return self.precision.reduce_dtype is None and param.dtype_of_gradient is None

    def note_ties(self) -> None:
        """Note which parameters hang in several places."""
        self._tied = [param for param in self.params if len(param.slots) > 1]

    @property
    def compares_reductions(self) -> bool:
        """True if ranks that would reduce different things find that out from the messages themselves."""
        comm = self.comm
        if comm.replicas is not None:
            return False
        link = comm.reduce.planned_link if comm.reduce is not None else None
        return comm.reduce is None or (link is not None and link.compares_contents)

    def ensure_packed(self) -> None:
        """Follow what user code has done to the parameters: replaced them or their memory, changed their dtype."""
        is_settled, may_be_extended = self._main is not None, bool(self.extended.params)  # extensions may be patched on
        for param in self._tied:
            param.check_ties()
        for bucket in self._buckets:
            if not is_settled or not bucket.settle():
                is_settled = False
                break
            may_be_extended |= bucket.has_attributes
            self.num_packs += bucket.num_replaced
            bucket.num_replaced = 0
            if bucket.loose:
                bucket.stage()
        for param in self.in_place:
            may_be_extended |= bool(param.local.__dict__)
        if not is_settled or (may_be_extended and not self.extended.is_current(self.params)):
            self._pack()
        for param in (*self.in_place, *self.extended.params):
            param.follow_grad_dtype()
        for param in self.in_place:
            param.adopt_registered()
            if not self._is_in_place(param):
                self._pack()
                break

    def _pack(self) -> None:
        self.num_packs += 1
        for bucket, buffer in zip(self._buckets, self._fulls, strict=True):
            if all(type(param.full) is FreedParameter for param in bucket.params):  # kept while nobody uses it
                buffer.drop()
        for param in self.params:
            param.adopt_registered()
            param.follow_grad_dtype()
        self.extended.adopt([param for param in self.params if self.extended.wants(param)])
        self.in_place = [param for param in self.params if self._is_in_place(param)]
        self.reduce_dtypes = self._reduce_dtypes()
        apart = {*self.extended.params, *self.in_place}
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[UnitParam]] = {}
        for param in (each for each in self.by_size if each not in apart):
            by_dtype.setdefault((param.dtype, self.dtype_of_full(param)), []).append(param)
        buckets = [self._make_bucket(params, full_dtype) for (_, full_dtype), params in by_dtype.items()]
        self._buckets = sorted(buckets, key=lambda bucket: not bucket.travels)  # numbered as in what travels
        for bucket in self._buckets:
            bucket.stage()
        self._fulls = [FullBuffer(b.layout, b.full_dtype, self.device, is_shared=not b.travels) for b in self._buckets]
        # What has no elements does not travel; nor, without collectives, what is its own full parameter.
        travelling = [bucket for bucket in self._buckets if bucket.travels]
        self._main = Shards(travelling, self.axes.num_shards, self.device)
        self._sub = None
        self.full_bytes = sum(full.num_bytes for full in self._fulls)
        self._ends = [_BucketEnds(self, self._main, bucket, index) for index, bucket in enumerate(travelling)]
        for params in by_dtype.values():
            for param in params:
                param.full = None
                param.is_hooked = False

    def _reduce_dtypes(self) -> dict[torch.dtype, torch.dtype]:
        found: dict[torch.dtype, set[torch.dtype]] = {}
        for param in self.params:
            if param.grad_dtype is None and not param.keeps_dtype:
                found.setdefault(self.dtype_of_full(param), set()).add(self.dtype_of_reduction(param))
        return {full: wanted.pop() for full, wanted in found.items() if len(wanted) == 1}

    def _is_in_place(self, param: UnitParam) -> bool:
        if not self.keeps_plain or param.inner_spec is not None or param.local.device != self.device:
            return False
        if param.dtype is not self.dtype_of_full(param):
            return False
        return self.takes_any_gradient(param) or param.dtype_of_gradient is self.dtype_of_reduction(param)

    def _make_bucket(self, params: list[UnitParam], full_dtype: torch.dtype) -> FlatBucket:
        dtype = params[0].dtype
        layout = build_bucket([param.shard for param in params], self._alignment(dtype), self._alignment(full_dtype))
        device = params[0].local.device
        pins = isinstance(self.offload, CPUOffloadPolicy) and self.offload.can_pin and device.type == "cpu"
        travels = (self.is_collective or dtype != full_dtype or device != self.device) and layout.full_numel > 0
        bucket = FlatBucket(params, layout, full_dtype, Allocator(device, pins, self.shares_memory), travels)
        bucket.move_in()
        return bucket

    def _alignment(self, dtype: torch.dtype) -> int:
        # 16 bytes keep vector loads of an accelerator's kernels possible; on CPU gaps would only cost.
        return 1 if self.device.type == "cpu" else max(16 // dtype.itemsize, 1)

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
        ways = self._comm or self.comm
        shards, comm = (self._sub, ways.sub) if from_sub else (self._main, ways.shards)
        assert shards is not None
        delivery = _Delivery(self, shards, () if from_sub or self.extended.params else self._ends)
        if self.extended.params and not from_sub:
            return self.extended.gather(delivery if shards.buckets else None, comm, self.pool)
        if not shards.buckets:
            return None
        if comm is None:
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
        """Return the 1-D full buffers of the buckets that travel, with memory under them."""
        pool = self._pool or self.pool
        return [full.hold(pool) for full in self._fulls if not full.is_shared]

    def register_full(self, on_gradient: Callable[[UnitParam], Callable[[torch.Tensor], None]]) -> int:
        """Hang the full parameters on the modules; return how many of them want gradients.

        ``on_gradient(param)`` makes the hook that a full parameter runs when its gradient has been accumulated.
        """
        assert self._main is not None
        num_trainable = 0
        self._show_writes()
        for number, bucket in enumerate(self._buckets):
            is_shared = self._fulls[number].is_shared
            mark_full(bucket.params)
            for index, param in enumerate(bucket.params):
                full = param.full
                if full is None:
                    full = param.full = self._make_full(number, index)
                    param.is_hooked = False
                elif is_shared and full.data_ptr() != param.local.data_ptr():
                    # The same parameter, with its memory where the shard is now: a graph may hold it already.
                    torch_private.set_data(full, self._make_full(number, index).detach())
                if param.grad_dtype is not None:
                    self._choose_grad_dtype(param, full)
                param.full_version, param.full_address = full._version, full.data_ptr()
                wanted = param.sharded.requires_grad
                if not (wanted and param.is_hooked and full.requires_grad):
                    self._sync_requires_grad(param, full, on_gradient)
                num_trainable += wanted
                for slot in param.slots:
                    slot.parameters[slot.name] = full
                    if slot.follower is not None:
                        slot.tell(full)
        for param in self.in_place:
            if param.full is not param.sharded:
                param.full, param.is_hooked = param.sharded, False
            self._sync_requires_grad(param, param.sharded, on_gradient)
            num_trainable += param.sharded.requires_grad
        for param in self.extended.params:
            full = param.full
            assert full is not None
            self._choose_grad_dtype(param, full)
            self._sync_requires_grad(param, full, on_gradient)
            num_trainable += param.sharded.requires_grad
            param.register(full)
        if self._sub is not None:
            self._drop_sub()
        return num_trainable

    def _choose_grad_dtype(self, param: UnitParam, full: nn.Parameter) -> None:
        if param.grad_dtype is not None:
            wanted = None if self.takes_any_gradient(param) else self.dtype_of_reduction(param)
            if full.grad_dtype is not wanted:
                full.grad_dtype = wanted

    def _show_writes(self) -> None:
        """Let autograd count what was written to shards as writes to the full forms, as it would on one process."""
        written: list[torch.Tensor] = []
        for param in self.params:
            version = param.sharded._version
            if version != param.seen_version:
                param.seen_version = version
                if param.full is not None and param.full is not param.sharded:
                    written.append(param.full)
        if written:
            torch.autograd.graph.increment_version(written)

    def _make_full(self, number: int, index: int) -> nn.Parameter:
        bucket = self._buckets[number]
        param = bucket.params[index]
        if self._fulls[number].is_shared:
            return make_full_parameter(param.local, 0, param)
        return make_full_parameter(self.hold_full(number), bucket.layout.full_offsets[index], param)

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

    # ---- what others do to parameters ----

    def version(self) -> int:
        """Return a number that changes whenever a shard is written to, as far as torch counts writes."""
        version = 0
        tensors: list[torch.Tensor] = []
        for param in self.params:
            tensors.append(param.sharded)
            version += param.version_base
        return version + torch_private.version_of(tensors)

    def written(self) -> list[UnitParam]:
        """Return the parameters whose full form somebody has written to since it was registered; the same on every rank."""
        found: list[UnitParam] = []
        for number, bucket in enumerate(self._buckets):
            if self._fulls[number].is_shared or not self._fulls[number].is_held:
                continue
            for param in bucket.params:
                full = param.full
                if full is None:
                    continue
                if (
                    full._version != param.full_version
                    or full.data_ptr() != param.full_address
                    or (
                        type(full) is not nn.Parameter
                        and may_be_written(full)
                        and not (param.local.numel() and self._has_same_rows(param, full))
                    )
                ):
                    found.append(param)
        return found

    def _rows_of(self, param: UnitParam, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the full form."""
        cut, whole = param.shard, torch_private.data_of(torch_private.local_of(full))
        rows = cut.rows(self.axes.shard_rank)
        return whole if cut.is_whole else whole.narrow(cut.dim, rows.start, len(rows))

    def _has_same_rows(self, param: UnitParam, full: torch.Tensor) -> bool:
        rows = self._rows_of(param, full)
        return torch.equal(rows, param.local.detach().to(rows.device, rows.dtype))

    def write_back(self, param: UnitParam) -> None:
        """Copy this rank's rows of the full form to the shard, where they are not what was gathered."""
        assert param.full is not None
        local = param.local.detach()
        with torch.no_grad():
            rows = self._rows_of(param, param.full)
            if rows.dtype is not local.dtype or rows.device != local.device:
                old = local.to(rows.device)
                rows = torch.where(rows != old.to(rows.dtype), rows.to(local.dtype), old)
            local.copy_(rows)
        torch.autograd.graph.increment_version(param.sharded)
        mark_full([param])
        param.full_version, param.seen_version = param.full._version, param.sharded._version
        if param.full.data_ptr() != param.full_address:
            # ``.data`` was assigned to: back to the memory that is gathered into.
            number, index = next((n, b.params.index(param)) for n, b in enumerate(self._buckets) if param in b.params)
            torch_private.set_data(param.full, self._make_full(number, index).detach())
            param.full_address = param.full.data_ptr()

    def differing(self) -> UnitParam | None:
        """Return a parameter whose full form is not what its shard is, as far as this rank can see; None if none is."""
        if self.device.type != "cpu" or self._main is None or not self.is_collective:
            return None  # on an accelerator the host would have to wait for the answer
        rank = self.axes.shard_rank
        for index, bucket in enumerate(self._main.buckets):
            full_parts = self._main.full_parts(index, rank, self.hold_full(index))
            for param, mine, full in zip(bucket.params, self._main.own_parts(index, rank), full_parts, strict=True):
                if not have_same_bits(mine, full):
                    return param
        return None

    def mark_kept(self) -> None:
        """Note that full parameters are registered where user code can reach them."""
        for bucket in self._buckets:
            for param in bucket.params:
                mark_kept(param, self._take)

    def _make_take(self) -> Callable[[UnitParam], None]:
        ref = weakref.ref(self)

        def take(param: UnitParam) -> None:
            group = ref()
            if group is not None and not param.is_its_full_form:
                group.write_back(param)
                mark_kept(param, take)

        return take

    def mark_in_use(self) -> None:
        """Note that a forward or backward uses the full parameters again."""
        for bucket in self._buckets:
            mark_full(bucket.params)

    def register_sharded(self, keeps_memory: bool = False) -> None:
        """Hang the sharded parameters on the modules and give the full memory back, unless ``keeps_memory``."""
        for param in self.params:
            sharded = param.sharded
            for slot in param.slots:
                slot.parameters[slot.name] = sharded
                if slot.follower is not None:
                    slot.tell(sharded)
        self.drop(keeps_memory)
        if self._sub is not None:
            self._drop_sub()

    def drop(self, keeps_memory: bool = False) -> None:
        """Let nobody use the full parameters, and give their memory back unless ``keeps_memory``."""
        if self._main is not None:
            for bucket, buffer in zip(self._buckets, self._fulls, strict=True):
                if not keeps_memory:
                    buffer.drop()
                if not buffer.is_shared:
                    mark_freed(bucket.params, has_memory=buffer.is_held)
        if self.extended.params:
            self.extended.drop(keeps_memory)

    def _drop_sub(self) -> None:
        """Give the shards of the smaller mesh back."""
        self._sub = None
        for param in self.params:
            param.subsharded = None

    def cut_to_sub(self, keeps_memory: bool = False) -> None:
        """Keep this rank's shard on the smaller mesh, hang it on the modules, give the full memory back as :meth:`drop`."""
        assert self._main is not None
        assert self.sub_axes is not None
        num_shards, rank = self.sub_axes.num_shards, self.sub_axes.shard_rank
        buckets: list[SubBucket] = []
        for bucket, full in zip(self._buckets, self.hold_fulls(), strict=True):
            cuts = [ChunkShard(shard.shape, shard.dim, num_shards) for shard in bucket.layout.shards]
            dtype = bucket.full_dtype
            layout = build_bucket(cuts, self._alignment(dtype), self._alignment(dtype))
            local = torch.empty(layout.section_numel, dtype=dtype, device=self.device)
            sub = SubBucket(bucket.params, layout, dtype, local)
            buckets.append(sub)
            for index, window in enumerate(sub.windows(rank)):
                cut, param = cuts[index], bucket.params[index]
                whole = full.narrow(0, bucket.layout.full_offsets[index], cut.numel).view(cut.shape)
                rows = cut.rows(rank)
                window.copy_(whole if cut.is_whole else whole.narrow(cut.dim, rows.start, len(rows)))
                param.subsharded = sub_parameter(param, cut, window, self.sub_axes)
                param.register(param.subsharded)
        self._sub = Shards(buckets, num_shards, self.device)
        self.drop(keeps_memory)

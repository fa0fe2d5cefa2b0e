"""The parameters of a unit on one mesh: one collective gathers them, one per dtype reduces their gradients."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NoReturn

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.buffer_pool import BufferPool, suballocate_all
from shardwise.collectives.c10d import GroupCommunicator, OrderedSums, fetch_alone
from shardwise.collectives.compressed import Coding, Compression, takes
from shardwise.collectives.protocol import CustomCollectives, Handle
from shardwise.collectives.routes import Link
from shardwise.collectives.streams import CommStreams
from shardwise.errors import StateError
from shardwise.fsdp.extension import ExtensionParams
from shardwise.fsdp.flat_buffer import (
    Delivery,
    FlatBucket,
    GatherLayout,
    Packing,
    ParamStorage,
    ReduceLayout,
    SubBucket,
)
from shardwise.fsdp.full_buffer import FullBuffer
from shardwise.fsdp.mesh import MeshAxes, sub_parameter
from shardwise.fsdp.param import ShardedParam, manager_of, refuse_gradients
from shardwise.fsdp.precision import MixedPrecisionPolicy, dtype_of_reduction
from shardwise.fsdp.swap import Snapshot, Swap
from shardwise.layout import ChunkShard, build_bucket, by_size

# ---- The communicators of a group.


@dataclass(slots=True)
class GroupComm:
    """The communicators of a group; None for an axis that takes no collective.

    Attributes:
        shards: for all-gathers along the shard axis.
        reduce: for reduce-scatters along the shard axis.
        replicas: for all-reduces along the replica axis.
        pool: the buffer pool of full parameters and staging buffers.
        streams: the streams of the collectives, and of copies of offloaded shards.
        sub: for all-gathers along the smaller mesh of ``reshard_after_forward``.
    """

    shards: GroupCommunicator | None
    reduce: GroupCommunicator | None
    replicas: GroupCommunicator | None
    pool: BufferPool
    streams: CommStreams
    sub: GroupCommunicator | None = None


# ---- Resharding to a smaller mesh after forward: each rank keeps a slice of each full parameter until backward.


def cut_bucket(bucket: FlatBucket, full: torch.Tensor, axes: MeshAxes, storage: ParamStorage) -> SubBucket:
    """Copy this rank's shards on the mesh of ``axes`` out of ``full``, the gathered bucket, and register them.

    Args:
        full: 1-D, the full buffer of ``bucket``; ``bucket.layout.full_offsets`` are the starts of its parameters.
    """
    cuts = [ChunkShard(shard.shape, shard.dim, axes.num_shards) for shard in bucket.layout.shards]
    dtype = bucket.full_dtype
    layout = build_bucket(cuts, storage.alignment(dtype), storage.alignment(dtype, are_full=True))
    sub = SubBucket(layout, dtype, torch.empty(layout.section_numel, dtype=dtype, device=full.device))
    shapes = [cut.shard_shape(axes.shard_rank) for cut in cuts]
    windows = suballocate_all(sub.local, [*zip(layout.offsets, shapes, strict=True)])
    for param, cut, begin, window in zip(bucket.params, cuts, bucket.layout.full_offsets, windows, strict=True):
        whole = full.narrow(0, begin, cut.numel).view(cut.shape)
        rows = cut.rows(axes.shard_rank)
        window.copy_(whole if cut.is_whole else whole.narrow(cut.dim, rows.start, len(rows)))
        param.subsharded = sub_parameter(param, cut, window, axes)
        param.sub_seen = torch_private.versions_of([param.subsharded])[0], param.sharded.requires_grad
        param.register(param.subsharded)
    return sub


def _lies_as_sharded(param: ShardedParam) -> bool:
    """Return True if the full parameter has the address and strides of this rank's shard, which user code may have moved."""
    local, full = param.local, param.full
    if full is None or full.data_ptr() != local.data_ptr():
        return False
    return torch_private.local_of(full).stride() == local.stride()


_IS, _REQUIRES_GRAD, _VERSION = operator.is_, operator.attrgetter("requires_grad"), torch_private.version_of
_ADDRESS = torch.Tensor.data_ptr
_IS_AS_LEFT, _PLACE = operator.attrgetter("is_as_left"), operator.attrgetter("address")
OnGradient = Callable[
    [int], Callable[[torch.Tensor], None]
]  # returns the hook of the gradient of a parameter, by ordinal


def _refuse() -> NoReturn:
    raise StateError("parameters were asked for before there was an engine; run the root's forward or unshard()")


def _copy_here(delivery: Delivery | None) -> Handle | None:
    if delivery is not None:
        delivery.deliver(delivery.shard())


class ParamGroup:
    """Parameters of one unit that share a mesh: a unit has one group per mesh.

    Attributes:
        params: the parameters in the order of the modules.
        by_size: the parameters in their order in memory, large ones first.
        members: the parameters as a set.
        storage: the devices of shards and full parameters.
        device: the device of the full parameters.
        precision: the policy that says in which dtypes parameters are gathered and gradients reduced.
        reduce_dtypes: gradient dtype -> reduce dtype, for parameters without a dtype of their own.  A gradient dtype with more
            than one reduce dtype is missing.
        compression: the compression of parameters and gradients; None: they are sent uncompressed.
        custom: replacements of the backend's collectives that the user has set.
        gather: launches the all-gather of the full parameters, as :meth:`_prepare_gather` has chosen; its handle is None if
            there is nothing to wait for.  The caller has called :meth:`ensure_packed`, and has ordered the gather stream after
            its copies.
        sums: sums gradients over microbatches and ranks in a fixed order; None: ranks add in rank order.
        bound_comm: the communicators and the pool; None before an engine has bound them, when :attr:`comm` raises.
        is_collective: gathering and reducing take a collective.
        keeps_plain: parameters stay plain tensors, and registered (``replicate``).
        num_packs: how often the parameters were packed.
        seen: what user code could change, as the last full check has found it; None: the next check looks at everything.
        swap: the tables by which full parameters are registered; None: the next :meth:`register_full` makes them.
        registered: the parameters in buckets, their full parameters that were registered last, and version counters and
            addresses of these, if user code has not written to them.
        last_version: :meth:`version` at that time; shards do not change in the forward or backward that follows.
        is_kept: full parameters stay registered between passes, where user code can reach them.
        is_written: the engine has written to shards on the current stream, and no gather was ordered after that yet.
        gradient_dtypes: the dtypes of ``.grad`` of all parameters, cached until user code changes something.
        num_replica_sums: how many all-reduces over replicas are due so far, those that a later backward makes included.
        split: the buckets of a unit that is alone, and what they depend on.
        gate: weak reference to the gate of its engine.
        on_gradient: makes the hooks of the full parameters' gradients; None: they have none.
        in_place: the parameters that stay registered and are their own full form.
        packing: the buckets and full buffers; None before the first packing.
        axes: the data-parallel mesh.  num_ranks: how many ranks its gradients are averaged over.
        sub_axes: the smaller mesh of ``reshard_after_forward``; None if there is none.

    The class has more attributes than most, since forms, memory and communicators of parameters meet here; each of these is
    a value of its own.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        axes: MeshAxes,
        precision: MixedPrecisionPolicy,
        storage: ParamStorage,
        keeps_plain: bool,
    ) -> None:
        self.params = params
        self.by_size = [params[index] for index in by_size([param.shard for param in params])]
        self.members = set(params)
        self.axes, self.num_ranks = axes, axes.num_shards * axes.num_replicas
        self.sub_axes: MeshAxes | None = None
        self.precision = precision
        self.reduce_dtypes: dict[torch.dtype, torch.dtype] = {}
        self.storage = storage
        self.device = storage.device
        # A shard axis of one rank takes no collectives, except with tensor parallelism: torch's tests count them there.
        has_tensor_parallelism = any(param.inner_spec is not None for param in params)
        self.is_collective = axes.shard_mesh_dim is not None and (axes.num_shards > 1 or has_tensor_parallelism)
        self.keeps_plain = keeps_plain
        self.num_packs = 0
        self.seen: Snapshot | None = None
        self.swap: Swap | None = None
        self._kinds: list[object] = []
        self.registered: tuple[list[ShardedParam], list[nn.Parameter], list[int], list[int]] = [], [], [], []
        self._addresses: dict[object, list[int]] = {}  # of full parameters, by that of their memory
        self.last_version = 0
        self._has_new_versions = True  # the version counters of full parameters do not reflect the shards' yet
        self.is_written = self.is_kept = False
        self.in_place: list[ShardedParam] = []
        self.extended = ExtensionParams(axes, precision, storage.device)
        self.packing: Packing | None = None
        self._sub: GatherLayout | None = None
        self.custom = CustomCollectives()
        self.sums: OrderedSums | None = None
        self.compression: Compression | None = None
        self.reduce_layouts: dict[tuple[object, ...], ReduceLayout] = {}
        self.bound_comm: GroupComm | None = None
        self.gather: Callable[[], Handle | None] = _refuse
        self.num_replica_sums = 0
        self.gradient_dtypes: set[torch.dtype] | None = None
        self.split: tuple[object, tuple[tuple[int, ...], ...]] = None, ()
        self.gate: weakref.ref[Gate] | None = None
        self.on_gradient: OnGradient | None = None

    # ---- flat memory ----

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters beyond the shards."""
        return 0 if self.packing is None else self.packing.full_bytes

    def gather_staging(self, keeps_memory: bool = False) -> tuple[int, bool]:
        """Return the bytes that a launched all-gather allocates, and whether they include the full parameters.

        ``keeps_memory``: full parameters stay in the memory that they have.
        """
        if self.packing is None or not self.is_collective:
            return 0, False
        num_bytes = self.packing.shards.packed_bytes if self._planned_link(self.packing) is None else 0
        return num_bytes, self._takes_over(self.packing, keeps_memory)

    def _takes_over(self, packing: Packing, keeps_memory: bool) -> bool:
        """Return True if the buffer of a collective becomes the full parameter: one tensor, as it is, in a pooled buffer."""
        comm = None if self.bound_comm is None else self.bound_comm.shards
        if keeps_memory or comm is None or not comm.gathers_to_pool or self._planned_link(packing) is not None:
            return False
        return self.gather_coding is None and not self.extended.params and packing.shards.are_full(packing.travelling)

    @property
    def route(self) -> str:
        """The transport for messages: the name of a link or "collectives", with codings; "" if nothing is sent."""
        ways = {"gather": self.gather_coding, "reduce": self.reduce_coding}
        coded = [f"{way} {coding}" for way, coding in ways.items() if coding]
        if self.packing is None or not self.is_collective:
            return ", ".join(coded)
        link = self._planned_link(self.packing)
        return ", ".join(["collectives" if link is None else link.name, *coded])

    @property
    def gather_coding(self) -> Coding | None:
        """The coding in which parameters are gathered; None: uncompressed."""
        if self.compression is None or self.axes.num_shards == 1 or not any(map(self.is_coded, self.params)):
            return None
        return self.compression.policy.gather

    @property
    def reduce_coding(self) -> Coding | None:
        """The coding in which gradients are reduced (between replicas if there are any); None: uncompressed."""
        if self.compression is None or not any(map(self.is_coded, self.params)):
            return None
        is_reduced = self.axes.num_shards > 1 or self.axes.num_replicas > 1
        return self.compression.policy.reduce if is_reduced else None

    def is_coded(self, param: ShardedParam) -> bool:
        """Return True if ``param`` is compressed when its group is."""
        coded = self.compression
        return coded is not None and takes(coded.policy, param.fqn, param.shard.shape, param.dtype.itemsize)

    def _planned_link(self, packing: Packing) -> Link | None:
        comm = self.bound_comm.shards if self.bound_comm is not None else None
        link = comm.planned_link if comm is not None else None
        if link is None or packing.delivery is None or self.extended.params:
            return None
        return link if link.takes_gather(packing.delivery) else None

    @property
    def main_buckets(self) -> Sequence[FlatBucket]:
        """The present buckets; empty before the first packing."""
        return () if self.packing is None else self.packing.buckets

    def reduce_dtype(self, param: ShardedParam) -> torch.dtype:
        """Return the dtype in which gradients of ``param`` are reduced and accumulated."""
        return dtype_of_reduction(self.precision, param.dtype, param.dtype_of_full(self.precision))

    def largest_reductions(self) -> list[tuple[int, int]]:
        """Return (elements of a section, bytes of an element) of the reduction of all parameters, per reduce dtype."""
        by_dtype: dict[torch.dtype, int] = {}
        for param in self.params:
            dtype = self.reduce_dtype(param)
            by_dtype[dtype] = by_dtype.get(dtype, 0) + param.shard.section_numel
        num_parts = 1 if self.sums is None else self.sums.most_parts
        return [(num_parts * numel, dtype.itemsize) for dtype, numel in by_dtype.items()]

    @property
    def compares_reductions(self) -> bool:
        """True if the transport itself detects that ranks reduce different gradients."""
        comm = self.comm
        link = comm.reduce.planned_link if comm.reduce is not None else None
        return comm.replicas is None and (comm.reduce is None or (link is not None and link.compares_contents))

    @property
    def is_as_left(self) -> bool:
        """True if on every module either all shards or all full parameters are registered."""
        # A swap knows nothing of parameters in place, so its ``has_full`` would not speak for the whole group.
        seen, swap = self.seen, None if self.in_place else self.swap
        return seen is not None and (seen.are_registered or (swap is not None and swap.has_full))

    def ensure_packed(self, in_step: bool = False) -> None:
        """Detect whether user code has replaced parameters or their memory, or changed their dtype; repack if it has.

        ``in_step``: a forward has checked already, and its backward begins.
        """
        seen = self.seen
        counted = seen.versions(in_step) if seen is not None and self.is_as_left else None
        if seen is None or counted is None:
            del seen  # snapshots hold former shards
            if self.gate is not None and (gate := self.gate()) is not None:
                gate.forget()
            self._settle()
        else:
            self.note_versions(counted)

    def _settle(self) -> None:
        """Adopt what user code has registered, pack it, and prepare the tables of the next passes."""
        self.gradient_dtypes = self.seen = self.swap = None
        packing, comm = self.packing, self.bound_comm
        if packing is not None:  # else they have just been sharded
            self.adopt_registered()
            if not self.params:
                return
            for param in self.params:
                param.check_data()
                param.follow_local()
        for param in self.params:
            param.storage = torch_private.storage_id(param.sharded)
        if packing is None or [*map(self._kind, self.params)] != self._kinds:
            packing = self._pack()
        else:
            for bucket in packing.buckets:
                self.is_written |= bucket.settle(None if comm is None else comm.streams.host_waits_for_copies)
        self.seen = Snapshot(self.params, self.extended.params)
        self.version()

    def _kind(self, param: ShardedParam) -> object:
        """Return what decides where the shard is: "extended", "in place", or the dtypes and the device of its bucket."""
        if self.extended.wants(param):
            return "extended"
        full_dtype = param.dtype_of_full(self.precision)
        return "in place" if self._is_in_place(param) else (param.dtype, full_dtype, param.local.device)

    def _pack(self) -> Packing:
        self.num_packs += 1
        self.is_written = True
        if self.packing is not None:
            self.packing.leave()
        kinds = {param: self._kind(param) for param in self.params}
        self.extended.adopt([param for param, kind in kinds.items() if kind == "extended"])
        self.in_place = [param for param, kind in kinds.items() if kind == "in place"]
        found: dict[torch.dtype, set[torch.dtype]] = {}
        for param in self.params:
            if not param.keeps_dtype:
                found.setdefault(param.dtype_of_full(self.precision), set()).add(self.reduce_dtype(param))
        self.reduce_dtypes = {full: wanted.pop() for full, wanted in found.items() if len(wanted) == 1}
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[ShardedParam]] = {}
        for param in self.by_size:
            if not isinstance(kinds[param], str):
                by_dtype.setdefault((param.dtype, param.dtype_of_full(self.precision)), []).append(param)
        buckets = [self.storage.bucket(each, full, self.is_collective) for (_, full), each in by_dtype.items()]
        packing = Packing(buckets, self.axes.num_shards, self.storage)
        if self.bound_comm is not None:
            self._prepare_gather(packing, self.bound_comm)
        self.packing, self._sub = packing, None
        self.registered = [], [], [], []
        # Packing may have moved shards to another device.
        is_one = len({bucket.local.device for bucket in buckets} | {param.local.device for param in self.params}) == 1
        self._kinds = [*kinds.values()] if is_one else [*map(self._kind, self.params)]
        return packing

    def adopt_registered(self) -> None:
        """Adopt what is registered on the modules as the shards; parameters that user code put there count as a packing."""
        for param in [*self.params]:
            if not self._keep_tied(param):
                continue
            param.check_ties()
            at = param.registrations[0]
            self.num_packs += not param.is_own(at.parameters.get(at.name))
            param.adopt_registered()

    def _keep_tied(self, param: ShardedParam) -> bool:
        """Hand places of ``param`` that user code has tied to another parameter over to that; return False if none is left."""
        unit = param.unit()
        for at in [*param.registrations]:
            owner = manager_of(at.parameters.get(at.name))
            if owner is None or owner is param or owner.unit() is None:
                continue
            if unit.callbacks_ref() is not None:
                raise StateError(
                    f"{param.fqn} was tied to {owner.fqn} after the first forward, or after unshard(): tie parameters before"
                )
            param.registrations = [each for each in param.registrations if each is not at]
            unit.tie(owner, [at])
        if not param.registrations:
            self.seen, self.members = None, self.members - {param}
            self.params, self.by_size = ([p for p in each if p is not param] for each in (self.params, self.by_size))
            unit.groups = [each for each in unit.groups if each.params]
        return bool(param.registrations)

    def _is_in_place(self, param: ShardedParam) -> bool:
        is_plain = self.keeps_plain and param.inner_spec is None and param.local.device == self.device
        return is_plain and param.dtype is param.dtype_of_full(self.precision) is self.reduce_dtype(param)

    # ---- unshard and reshard ----

    def bind(self, comm: GroupComm) -> None:
        """Use ``comm`` for collectives and memory from now on."""
        self.bound_comm, self.seen = comm, None  # until here user code may have patched extensions on shards
        if self.packing is not None:
            self._prepare_gather(self.packing, comm)

    def _prepare_gather(self, packing: Packing, comm: GroupComm) -> None:
        """Choose how :attr:`gather` gets full parameters: a step then decides nothing, and makes no objects for it."""
        delivery = packing.bind(comm.pool, has_parts=not self.extended.params)
        if self.extended.params:
            self.gather = partial(self.extended.gather, delivery, comm.shards, comm.pool)
        elif delivery is not None and comm.shards is not None:
            self.gather = partial(comm.shards.all_gather, delivery)
        elif delivery is not None and self.storage.is_offloaded:  # this rank has all shards
            self.gather = partial(fetch_alone, comm.streams.fetch, delivery)
        else:
            self.gather = partial(_copy_here, delivery)

    @property
    def comm(self) -> GroupComm:
        """The communicators.  Raises: StateError before there is an engine."""
        return _refuse() if self.bound_comm is None else self.bound_comm

    def gather_from_sub(self) -> Handle | None:
        """Launch the all-gather of the full parameters from those on the smaller mesh; None: there is nothing to wait for."""
        assert self.packing is not None
        assert self._sub is not None
        delivery, sub = Delivery(self._sub, self.packing.travelling, self.comm.pool), self.comm.sub
        return sub.all_gather(delivery) if sub is not None else _copy_here(delivery)

    def is_read_by_peers(self, links: Container[str]) -> bool:
        """Return True if ranks read each other's shards without help, by one of the open ``links``, or have all of them."""
        comm = self.comm.shards
        if self.packing is None or comm is None:
            return True
        link = self._planned_link(self.packing) if comm.group.group_name in links else None
        return link is not None and link.is_one_sided

    def give_shards(self) -> tuple[Handle, Sequence[FullBuffer]] | None:
        """Launch the all-gather for other ranks alone.  None: it takes no collective.

        Returns: the handle, to be cancelled, and then the buffers to be dropped.
        """
        packing, ways = self.packing, self.comm
        if packing is None or ways.shards is None:
            return None
        fulls = [FullBuffer(each.layout.full_numel, each.full_dtype, self.device) for each in packing.shards.buckets]
        delivery = Delivery(packing.shards, fulls, ways.pool, not self.extended.params) if fulls else None
        if self.extended.params:
            handle = self.extended.gather(delivery, ways.shards, ways.pool)
        else:
            handle = None if delivery is None else ways.shards.all_gather(delivery)
        return None if handle is None else (handle, fulls)

    def register_full(self) -> None:
        """Register the full parameters on the modules."""
        packing = self.packing
        assert packing is not None
        self.is_kept = False
        if self._has_new_versions:
            self._follow_writes()
        swap, registered = self.swap, () if self.swap is None else [*map(dict.get, *self.swap.places)]
        if (
            swap is None
            or not (all(map(_IS, swap.forms[1], registered)) or all(map(_IS, swap.forms[0], registered)))
            or [*map(_REQUIRES_GRAD, swap.forms[0])] != swap.wants
        ):
            swap = self._make_swap(packing)
        for registry, fulls_of, _ in swap.by_registry:
            registry.update(fulls_of)
        for at, full, _ in swap.with_setattr:
            at.call_setattr(full)
        # What writes of user code to full parameters are recognized by (``user_writes.py``); few addresses take turns.
        params, fulls, versions, _ = self.registered
        addresses = self._addresses.get(place := tuple(map(_PLACE, packing.fulls)))
        if addresses is None:
            if len(self._addresses) > 16:
                self._addresses.clear()
            addresses = self._addresses[place] = [*map(_ADDRESS, fulls)]
        self.registered = params, fulls, versions, addresses
        if self.in_place:
            self._check_not_replaced(self.in_place)
            self._own_forms_in_place()
        if self._sub is not None:
            self._drop_sub()

    def _make_swap(self, packing: Packing) -> Swap:
        """Make full parameters, or adapt those there are, at the first unshard, and when user code has changed something."""
        self._check_not_replaced(self.params)
        params = [param for bucket in packing.buckets for param in bucket.params]
        for param in params:
            if param.full is None:
                param.full, param.is_hooked = packing.make_full(param, self.comm.pool), False
            elif packing.aliases_shard(param) and not _lies_as_sharded(param):
                # Keep the parameter object, which a graph may reference, and point it to the new memory of the shard.
                param.full.data = packing.make_full(param, self.comm.pool).detach()
        for param in (*params, *self.extended.params):
            full = param.registered_form = param.full
            assert full is not None
            param.manage(full)
            self.sync_requires_grad(param, full)
        swap = self.swap = Swap([*params, *self.extended.params])
        fulls = swap.fulls[: len(params)]
        self.registered = params, fulls, [*map(_VERSION, fulls)], []
        self._addresses.clear()
        return swap

    def _own_forms_in_place(self) -> None:
        """Let parameters that stay registered be their own full form."""
        for param in self.in_place:
            if param.full is not param.sharded:
                param.full, param.is_hooked = param.sharded, False
            self.sync_requires_grad(param, param.sharded)

    def listen(self, on_gradient: OnGradient) -> None:
        """Hook the gradients of all full parameters, from now on; ``on_gradient(ordinal)`` returns the hook of one."""
        if self.on_gradient is None:
            self.on_gradient = on_gradient
            self._own_forms_in_place()
            for param in self.params:
                if param.full is not None:
                    self.sync_requires_grad(param, param.full)

    def _follow_writes(self) -> None:
        """Bump the version counters of full parameters whose shards were written to.

        A stale backward then raises, as it does on one process.
        """
        self._has_new_versions = False
        written = [param for param in self.params if param.last_version != param.gathered_version]
        for param in written:
            param.gathered_version = param.last_version
        fulls = [param.full for param in written if param.full is not None and param.full is not param.sharded]
        if fulls:
            torch.autograd.graph.increment_version(fulls)
            params, fulls, _, addresses = self.registered
            self.registered = params, fulls, [*map(_VERSION, fulls)], addresses

    @staticmethod
    def _check_not_replaced(params: Iterable[ShardedParam]) -> None:
        """Raise StateError if user code has replaced a parameter since the gather was launched or planned."""
        for param in params:
            for registration in param.registrations:
                current = registration.parameters.get(registration.name)
                if current is not param.sharded and not param.is_own(current):
                    param.check_places()
                    raise StateError(
                        f"{param.fqn} was replaced while a forward or backward ran. Replace it before or after"
                    )

    def sync_requires_grad(self, param: ShardedParam, full: nn.Parameter) -> None:
        """Set ``requires_grad`` of ``full`` to the shard's; if trainable, hook its gradient if :meth:`listen` was called."""
        wanted = param.sharded.requires_grad
        if full.requires_grad is not wanted:
            full.requires_grad_(wanted)
        if wanted and not param.is_hooked and self.on_gradient is not None:
            param.hook_id = full.register_post_accumulate_grad_hook(self.on_gradient(param.ordinal)).id
            param.is_hooked = True
        if wanted:
            refuse_gradients([param])  # it may have been frozen

    # ---- version counters, and parameters that stay full ----

    def note_versions(self, counted: Sequence[int]) -> None:
        """Take the version counters of the shards."""
        self.last_version, self._has_new_versions = 0, True
        for param, version in zip(self.params, counted, strict=True):
            param.last_version = version + param.version_base
            self.last_version += param.last_version

    def version(self) -> int:
        """Return a number that changes with every write to a shard that torch counts."""
        self.note_versions(torch_private.versions_of([param.sharded for param in self.params]))
        return self.last_version

    def register_sharded(self, keeps_memory: bool = False) -> None:
        """Register the sharded parameters on the modules and free the full memory, unless ``keeps_memory``.

        A parameter that user code has put in the place of a full one stays registered, as on one process.
        """
        swap = self.swap
        if swap is not None and all(map(_IS, swap.forms[0], map(dict.get, *swap.places))):
            for registry, _, shards_of in swap.by_registry:
                registry.update(shards_of)
            for at, _, param in swap.with_setattr:
                at.call_setattr(param.sharded)
        else:
            for param in self.params:
                for registration in param.registrations:
                    if param.is_own(registration.parameters.get(registration.name)):
                        registration.put(param.sharded)
        if not keeps_memory:
            self.drop()
        if self._sub is not None:
            self._drop_sub()

    def drop(self) -> None:
        """Free the memory of the full parameters."""
        for buffer in () if self.packing is None else self.packing.fulls:
            buffer.drop()
        if self.extended.params:
            self.extended.drop()

    def _drop_sub(self) -> None:
        """Free the shards on the smaller mesh."""
        self._sub = None
        for param in self.params:
            param.subsharded = None

    def cut_to_sub(self, keeps_memory: bool = False) -> None:
        """Copy out this rank's shard on the smaller mesh and register it on the modules; then :meth:`drop` the full memory."""
        packing = self.packing
        assert packing is not None
        assert self.sub_axes is not None
        pairs = zip(packing.buckets, packing.travelling, strict=True)
        buckets = [cut_bucket(each, full.hold(self.comm.pool), self.sub_axes, self.storage) for each, full in pairs]
        self._sub = GatherLayout(buckets, self.sub_axes.num_shards, self.storage)
        if not keeps_memory:
            self.drop()


class Gate:
    """Compares, when a pass begins, what user code can change between passes: for all groups of an engine at once."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._parts: list[Snapshot | None] = []
        self._joined: Snapshot | None = None
        self._counted: list[int] = []
        for group in groups:
            group.gate = weakref.ref(self)

    def forget(self) -> None:
        """Compare nothing with what was seen: that holds shards which user code has replaced."""
        self._parts, self._joined = [], None

    def check(self, in_step: bool) -> bool:
        """Note which shards were written to.  If anything else has changed, repack it and return True.

        ``in_step``: a forward has checked already, and its backward begins.
        """
        groups, joined, counted = self._groups, self._joined, None
        is_known = joined is not None and [group.seen for group in groups] == self._parts
        if joined is not None and is_known and (joined.are_registered or all(map(_IS_AS_LEFT, groups))):
            counted = joined.versions(in_step)
        if counted is None:
            joined = None
            for group in groups:
                group.ensure_packed(in_step)
            self._parts, self._counted, self._joined = [group.seen for group in groups], [], None
            if groups and None not in self._parts:
                extended = {param for group in groups for param in group.extended.params}
                self._joined = Snapshot([param for group in groups for param in group.params], extended)
            return True
        if counted != self._counted:
            self._counted, rest = counted, iter(counted)
            for group in groups:
                group.note_versions([*islice(rest, len(group.params))])
        return False

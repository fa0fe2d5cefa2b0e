"""Where the parameters of a unit are: shards in sections, full parameters in buffers, and how gathers fill these.

A shard lies in a *section*, flat memory of this rank that a collective sends as it is; full parameters are windows of buffers
whose memory comes and goes under tensors that stay the same.  Parameters of one dtype share both.  Not all can: those of tensor
subclasses gather themselves (``extension.py``), and plain replicas in their own dtype are their own full form.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.c10d import fetch_alone
from shardwise.collectives.routes import Handle, Link
from shardwise.collectives.streams import suballocate_all
from shardwise.errors import StateError
from shardwise.fsdp.comm_context import UnitComm
from shardwise.fsdp.extension import ExtensionParams
from shardwise.fsdp.flat_buffer import Delivery, FlatBucket, GatherLayout, SubBucket
from shardwise.fsdp.full_buffer import FullBuffer, make_full_parameter
from shardwise.fsdp.mesh import MeshAxes, sub_parameter
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.precision import dtype_of_reduction
from shardwise.fsdp.settings import UnitSettings
from shardwise.layout import ChunkShard, build_bucket, row_major

_Kind = str | tuple[torch.dtype, torch.dtype, torch.device]


def _refuse() -> NoReturn:
    raise StateError("parameters were asked for before there was an engine; run the root's forward or unshard()")


def _copy_here(delivery: Delivery | None) -> Handle | None:
    if delivery is not None:
        delivery.deliver(delivery.shard())


@dataclass(slots=True)
class Packs:
    """How often parameters of some modules were packed, or replaced by user code: a graph of an earlier packing is stale."""

    count: int = 0


class UnitMemory:
    """The memory of one unit's parameters, laid out when they are packed.

    Attributes:
        packs: shared with the units beside this one.
        is_written: the engine has written to shards on the current stream, and no gather was ordered after that yet.
        is_collective: gathering and reducing take a collective.
        extended: the parameters with an all-gather extension.  in_place: those that are their own full form.
        buckets: the sections of all others, those that travel first.  fulls: the full buffer of each.
        shards: the layout of an all-gather of all that travel, and ``delivery`` both its sides.
        sub: the layout of an all-gather along the smaller mesh; None unless parameters are cut to that.
        gather: launches the all-gather, as :meth:`bind` has chosen it; its handle is None if there is nothing to wait for.
        bound_comm: the communicators and the pool; None before an engine has bound them, when :attr:`comm` raises.
        kinds: what decides where each parameter lies; None until they are packed for the first time.
    """

    def __init__(self, settings: UnitSettings, is_collective: bool) -> None:
        self.settings, self.is_collective = settings, is_collective
        self.packs = Packs()
        self.is_written = False
        self.extended = ExtensionParams(settings.axes, settings.precision, settings.storage.device)
        self.in_place: list[ShardedParam] = []
        self.buckets: list[FlatBucket] = []
        self.fulls: list[FullBuffer] = []
        self._windows: dict[ShardedParam, tuple[FullBuffer, int]] = {}
        self.shards: GatherLayout | None = None
        self.delivery: Delivery | None = None
        self.sub: GatherLayout | None = None
        self.gather: Callable[[], Handle | None] = _refuse
        self.bound_comm: UnitComm | None = None
        self.kinds: list[_Kind] | None = None

    @property
    def comm(self) -> UnitComm:
        """The communicators.  Raises: StateError before there is an engine."""
        return _refuse() if self.bound_comm is None else self.bound_comm

    @property
    def link(self) -> Link | None:
        """The link that gathers the parameters; None: the backend does, or nothing is gathered, or there is no engine."""
        comm = self.bound_comm.shards if self.bound_comm is not None else None
        link = comm.planned_link if comm is not None else None
        if link is None or self.delivery is None or self.extended.params:
            return None
        return link if link.takes_gather(self.delivery) else None

    def reduce_dtype(self, param: ShardedParam) -> torch.dtype:
        """Return the dtype in which gradients of ``param`` are reduced and accumulated."""
        precision = self.settings.precision
        return dtype_of_reduction(precision, param.dtype, param.dtype_of_full(precision))

    # ---- packing ----

    def settle(self, params: Sequence[ShardedParam], by_size: Sequence[ShardedParam]) -> bool:
        """Pack ``params`` if what decides where they lie has changed, and return True; else move shards back to their places.

        ``by_size``: the parameters in their order in memory.
        """
        # Other memory under a shard is moved back; another dtype or device needs a new layout.
        if self.kinds is not None and [*map(self._kind, params)] == self.kinds:
            for bucket in self.buckets:
                comm = self.bound_comm
                self.is_written |= bucket.settle(None if comm is None else comm.streams.host_waits_for_copies)
            return False
        self.packs.count += 1
        self.is_written = True
        for bucket, buffer in zip(self.buckets, self.fulls, strict=True):  # frees memory that is kept while sharded
            if not any(at.parameters.get(at.name) is each.full for each in bucket.params for at in each.registrations):
                buffer.drop()
        kinds = {param: self._kind(param) for param in params}
        self.extended.adopt([param for param, kind in kinds.items() if kind == "extended"])
        self.in_place = [param for param, kind in kinds.items() if kind == "in place"]
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[ShardedParam]] = {}
        for param in by_size:
            if not isinstance(kinds[param], str):
                by_dtype.setdefault((param.dtype, param.dtype_of_full(self.settings.precision)), []).append(param)
        storage = self.settings.storage
        buckets = [storage.bucket(each, full, self.is_collective) for (_, full), each in by_dtype.items()]
        self._lay_out(sorted(buckets, key=lambda bucket: not bucket.travels))
        if self.bound_comm is not None:
            self.bind(self.bound_comm)
        # Packing may have moved shards to another device.
        is_one = len({bucket.local.device for bucket in buckets} | {param.local.device for param in params}) == 1
        self.kinds = [*kinds.values()] if is_one else [*map(self._kind, params)]
        return True

    def _kind(self, param: ShardedParam) -> _Kind:
        """Return what decides where the shard is: "extended", "in place", or the dtypes and the device of its bucket."""
        if self.extended.wants(param):
            return "extended"
        settings, full_dtype = self.settings, param.dtype_of_full(self.settings.precision)
        is_plain = settings.keeps_plain and param.inner_spec is None and param.local.device == settings.storage.device
        if is_plain and param.dtype is full_dtype is self.reduce_dtype(param):
            return "in place"
        return param.dtype, full_dtype, param.local.device

    def _lay_out(self, buckets: list[FlatBucket]) -> None:
        storage = self.settings.storage
        for param in (param for bucket in buckets for param in bucket.params):
            param.full, param.is_hooked = None, False
        self.buckets, self.sub, self.delivery = buckets, None, None
        self.fulls = [FullBuffer(b.layout.full_numel, b.full_dtype, storage.device, not b.travels) for b in buckets]
        self._windows = {}
        for bucket, buffer in zip(buckets, self.fulls, strict=True):
            offsets = bucket.layout.full_offsets
            self._windows |= {param: (buffer, at) for param, at in zip(bucket.params, offsets, strict=True)}
        travelling = [bucket for bucket in buckets if bucket.travels]
        self.shards = GatherLayout(travelling, self.settings.axes.num_shards, storage) if travelling else None

    @property
    def _travelling(self) -> list[FullBuffer]:
        return [full for full in self.fulls if not full.aliases_shards]

    # ---- gathers ----

    def bind(self, comm: UnitComm) -> None:
        """Use ``comm`` from now on, and choose how :attr:`gather` works: a step then decides nothing, and makes no objects."""
        self.bound_comm = comm
        shards, fulls = self.shards, self._travelling
        delivery = None if shards is None else Delivery(shards, fulls, comm.pool, has_parts=not self.extended.params)
        self.delivery = delivery
        if self.extended.params:
            # One collective gathers both what has an extension and what has none.
            self.gather = partial(self.extended.gather, delivery, comm.shards, comm.pool)
        elif delivery is not None and comm.shards is not None:
            self.gather = partial(comm.shards.all_gather, delivery)
        elif delivery is not None and self.settings.storage.is_offloaded:  # this rank has all shards
            self.gather = partial(fetch_alone, comm.streams.fetch, delivery)
        else:
            self.gather = partial(_copy_here, delivery)

    def gather_from_sub(self) -> Handle | None:
        """Launch the all-gather of the full parameters from those on the smaller mesh; None: there is nothing to wait for."""
        assert self.sub is not None
        delivery, sub = Delivery(self.sub, self._travelling, self.comm.pool), self.comm.sub
        return sub.all_gather(delivery) if sub is not None else _copy_here(delivery)

    def is_read_by_peers(self, links: Container[str]) -> bool:
        """Return True if ranks read each other's shards without help, by one of the open ``links``, or have all of them."""
        comm = self.comm.shards
        link = self.link if comm is not None and comm.group.group_name in links else None
        return comm is None or (link is not None and link.is_one_sided)

    # ---- full parameters ----

    def make_full(self, param: ShardedParam) -> nn.Parameter:
        """Return a new full parameter of ``param``: a window of its full buffer, or of the shard if that serves as full."""
        buffer, offset = self._windows[param]
        if buffer.aliases_shards:
            # The shard's own strides, since user code may have moved it.
            return make_full_parameter(param.local, 0, param, param.local.stride())
        return make_full_parameter(buffer.hold(self.comm.pool), offset, param, row_major(param.shard.shape))

    def aliases_shard(self, param: ShardedParam) -> bool:
        """Return True if the full parameter of ``param`` is its shard."""
        return self._windows[param][0].aliases_shards

    def drop(self) -> None:
        """Free the memory of the full parameters."""
        for buffer in self.fulls:
            buffer.drop()
        if self.extended.params:
            self.extended.drop()

    # ---- a smaller mesh after forward: each rank keeps a slice of each full parameter until backward ----

    def cut_to_sub(self, axes: MeshAxes) -> None:
        """Copy out this rank's shards on the smaller mesh of ``axes`` and register them on the modules."""
        pairs = zip(self.shards.buckets if self.shards is not None else (), self._travelling, strict=True)
        buckets = [self._cut(each, full.hold(self.comm.pool), axes) for each, full in pairs]
        self.sub = GatherLayout(buckets, axes.num_shards, self.settings.storage)

    def _cut(self, bucket: FlatBucket | SubBucket, full: torch.Tensor, axes: MeshAxes) -> SubBucket:
        assert isinstance(bucket, FlatBucket)
        cuts = [ChunkShard(shard.shape, shard.dim, axes.num_shards) for shard in bucket.layout.shards]
        dtype, storage = bucket.full_dtype, self.settings.storage
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

    def drop_sub(self) -> None:
        """Free the shards on the smaller mesh."""
        for param in (param for bucket in self.buckets for param in bucket.params) if self.sub is not None else ():
            param.subsharded = None
        self.sub = None

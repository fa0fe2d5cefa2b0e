"""The shards of a unit's parameters on their way into the full parameters: sections, moves, and the memory they arrive in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import torch_private
from shardwise.comm.buffers import BufferPool, Lease
from shardwise.comm.communicator import BucketEnds
from shardwise.comm.links.link import Link
from shardwise.comm.links.parts import section_parts
from shardwise.layout.bucket import Bucket, align
from shardwise.layout.shard import Move, row_major
from shardwise.units.flat_bucket import FlatBucket, SubBucket, view_of
from shardwise.units.idle import FreedParameter, mark_freed
from shardwise.units.param import UnitParam
from shardwise.units.place import ParamStorage

_GIVEN_BACK = (
    "This tensor shared memory with a full parameter, which shardwise has given back since: keep clone() of it, or read the "
    "parameter where it is unsharded."
)
_BYTE_ALIGNMENT = 16  # of each bucket in a section that several dtypes share


def full_window(flat: torch.Tensor, move: Move, base: int) -> torch.Tensor:
    """Return the side of ``move`` that lies in a full tensor starting at element ``base``."""
    return view_of(flat, move.shape, move.full_stride, base + move.full_offset)


def packed_window(flat: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the side of ``move`` that lies in a packed buffer: its memory alone, where a view would keep ``flat`` itself.

    Windows are remembered as long as somebody has ``flat``; remembered views would be that somebody.
    """
    with torch.inference_mode(False):
        window = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return window.set_(
            flat.untyped_storage(), flat.storage_offset() + move.packed_offset, move.shape, move.packed_stride
        )


class FullBuffer:
    """The full parameters of one bucket, in memory that comes and goes under a storage that stays.

    Autograd keeps references to the storage, so it must be the same object in forward and backward.

    Attributes:
        is_shared: the full parameters are the shards themselves.
        is_held: the memory is there.
    """

    def __init__(self, layout: Bucket, dtype: torch.dtype, device: torch.device, is_shared: bool) -> None:
        """``is_shared``: the full parameters are the shards themselves (one shard per tensor); else own memory."""
        self._lease: Lease | None = None
        self.is_shared = self.is_held = is_shared
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        if not is_shared:  # a kernel that reads a storage without memory ends the process
            torch_private.refuse_reads(self._storage, _GIVEN_BACK)
        self.num_bytes = 0 if is_shared else layout.full_numel * dtype.itemsize
        self._dtype = dtype
        self._flat: torch.Tensor | None = None

    def hold(self, pool: BufferPool) -> torch.Tensor:
        """Take memory from ``pool`` unless held; return the 1-D buffer."""
        if self._lease is None:
            self._lease = pool.lease(self.num_bytes)
            self.is_held = True
            torch_private.swap_storage(self._storage, self._lease.storage)
            if self._flat is None:
                with torch.inference_mode(False):
                    empty = torch.empty(0, dtype=self._dtype, device=self._storage.device)
                    self._flat = empty.set_(self._storage, 0, (self.num_bytes // self._dtype.itemsize,), (1,))
        assert self._flat is not None
        return self._flat

    def drop(self) -> None:
        """Give the memory back; tensors on it must not be read until the next :meth:`hold`."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self.is_held = self.is_shared
            torch_private.swap_storage(self._storage, lease.storage)
            lease.release()

    @property
    def num_holders(self) -> int:
        """The number of tensors that use this memory, 0 if it is shared and so never freed."""
        return 0 if self.is_shared else torch_private.storage_use_count(self._storage)

    def lose(self) -> object:
        """Do as :meth:`drop` does, but keep the memory from its pool: somebody may still write to it.  Returns its keeper."""
        if self._lease is None:
            return None
        lease, self._lease = self._lease, None
        self.is_held = self.is_shared
        torch_private.swap_storage(self._storage, lease.storage)
        return lease.lose()


def make_full_parameter(
    memory: torch.Tensor, offset: int, param: UnitParam, stride: tuple[int, ...] | None = None
) -> nn.Parameter:
    """Return the parameter that modules compute with: a window of ``memory`` with a version counter of its own.

    ``stride``: where its elements lie there; None: one after the other.
    """
    shape = param.shard.shape
    with torch.inference_mode(False), torch.no_grad():
        # set_ instead of a view: gathering into ``memory`` must not count as changing what autograd has saved.
        local = torch.empty(0, dtype=memory.dtype, device=memory.device)
        local.set_(
            memory.untyped_storage(),
            memory.storage_offset() + offset,
            shape,
            row_major(shape) if stride is None else stride,
        )
        if param.inner_spec is not None:
            local = torch_private.dtensor_from_local(local, param.inner_spec)
        full = nn.Parameter(local, requires_grad=param.sharded.requires_grad)
    torch_private.give_attributes(param.attributes, full)
    return full


class Shards:
    """The sections of one placement of a unit's parameters, gathered and cut again by moves that are made once."""

    def __init__(self, buckets: Sequence[FlatBucket | SubBucket], num_shards: int, place: ParamStorage) -> None:
        self.buckets = buckets
        self.num_shards = num_shards
        self._place = place
        offset = 0
        for bucket in buckets:
            bucket.byte_offset = offset
            offset = align(offset + bucket.layout.section_numel * bucket.full_dtype.itemsize, _BYTE_ALIGNMENT)
        self._section_bytes = offset
        self._section_numel = buckets[0].layout.section_numel if len(buckets) == 1 else offset
        self._moves = [self._bucket_moves(bucket) for bucket in buckets]
        self._full_windows: list[torch.Tensor] | None = None
        self._packed_windows: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of buffers, while somebody has them
        self._own_parts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._full_parts: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._columns = [shard.section_numel for shard in buckets[0].layout.shards] if len(buckets) == 1 else []
        # On a host as many copies are made in either case, and through kept windows they cost half.
        is_split = len(buckets) == 1 and place.device.type != "cpu"
        self._num_even = buckets[0].layout.num_even if is_split else 0

    @property
    def packed_dtype(self) -> torch.dtype:
        """Dtype of the packed buffer: the parameters' if they have one, else bytes."""
        return self.buckets[0].full_dtype if len(self.buckets) == 1 else torch.uint8

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed buffer of all ranks."""
        return self.num_shards * self._section_numel * self.packed_dtype.itemsize

    def _bucket_moves(self, bucket: FlatBucket | SubBucket) -> list[tuple[int, Move]]:
        itemsize = bucket.full_dtype.itemsize
        stride = self._section_numel if len(self.buckets) == 1 else self._section_bytes // itemsize
        start = 0 if len(self.buckets) == 1 else bucket.byte_offset // itemsize
        return [
            (bucket.layout.full_offsets[index], move)
            for index in range(len(bucket.params))
            for move in bucket.layout.moves(index, into_full=True, section_offset=start, section_stride=stride)
        ]

    def section(self) -> torch.Tensor:
        """Return this rank's section in the dtype of the all-gather, on the device: the shards themselves if they are that."""
        if len(self.buckets) == 1:
            return self.section_of(self.buckets[0])
        section = torch.empty(self._section_bytes, dtype=torch.uint8, device=self._place.device)
        for bucket in self.buckets:
            numel = bucket.layout.section_numel
            window = section.narrow(0, bucket.byte_offset, numel * bucket.full_dtype.itemsize).view(bucket.full_dtype)
            is_cast = bucket.local.dtype is not bucket.full_dtype
            window.copy_(self.section_of(bucket) if is_cast else bucket.local, non_blocking=True)
        return section

    def section_of(self, bucket: FlatBucket | SubBucket) -> torch.Tensor:
        """Return this rank's section of one bucket in the dtype of the all-gather, on the device."""
        if bucket.local.dtype is bucket.full_dtype and not self._place.is_offloaded:
            return bucket.local
        return self._place.on.fetch(bucket.local, bucket.full_dtype)

    def own_parts(self, number: int, rank: int) -> list[torch.Tensor]:
        """Return the windows of each parameter in this rank's section of bucket ``number``, in the dtype of the all-gather."""
        bucket = self.buckets[number]
        section = self.section_of(bucket)
        if section is not bucket.local:
            return section_parts(bucket.layout, section, rank)
        known = self._own_parts.get(number)
        if known is None or known[0] is not section:
            known = self._own_parts[number] = (section, section_parts(bucket.layout, section, rank))
        return known[1]

    def full_parts(self, number: int, rank: int, full: torch.Tensor) -> list[torch.Tensor]:
        """Return the windows of ``full`` (bucket ``number``'s full buffer) that ``rank``'s shards go to."""
        parts = self._full_parts.get((number, rank))
        if parts is None:
            layout = self.buckets[number].layout
            moves = zip(layout.parts(rank), layout.full_offsets, strict=True)
            parts = self._full_parts[number, rank] = [full_window(full, move, base) for move, base in moves]
        return parts

    def unpack(self, packed: torch.Tensor, fulls: Sequence[torch.Tensor]) -> None:
        """Copy every shard from the packed buffer to its place in the full buffers."""
        if self._full_windows is None:
            self._full_windows = [
                full_window(full, move, base)
                for full, moves in zip(fulls, self._moves, strict=True)
                for base, move in moves
            ]
        if self._num_even:
            rows = packed.view(self.num_shards, self._section_numel)[: self._num_even]
            torch.split_with_sizes_copy(rows, self._columns, dim=1, out=self._full_windows)
            return
        sources = self._packed_windows.get(packed)
        if sources is None:
            sources = self._packed_windows[packed] = [
                packed_window(packed if packed.dtype == bucket.full_dtype else packed.view(bucket.full_dtype), move)
                for bucket, moves in zip(self.buckets, self._moves, strict=True)
                for _, move in moves
            ]
        if sources:
            torch_private.copy_each(self._full_windows, sources)


class ShardEnds:
    """One bucket, for transports that move parts.  ``pool``: where its full buffer finds memory."""

    def __init__(self, shards: Shards, index: int, full: FullBuffer) -> None:
        bucket = shards.buckets[index]
        assert isinstance(bucket, FlatBucket)
        self._shards, self._index, self._bucket, self._full = shards, index, bucket, full
        self.pool: BufferPool | None = None
        self.layout, self.dtype, self.full_dtype = bucket.layout, bucket.dtype, bucket.full_dtype

    @property
    def params(self) -> Sequence[UnitParam]:
        return self._bucket.params

    @property
    def number(self) -> int | None:
        return self._bucket.number

    def section(self) -> torch.Tensor:
        return self._shards.section_of(self._bucket)

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        assert self.pool is not None
        return self._shards.full_parts(self._index, rank, self._full.hold(self.pool))

    def lose_full(self) -> object:
        return self._full.lose()


@dataclass(slots=True)
class Delivery:
    """Both ends of an all-gather from ``shards`` into ``fulls``, which find memory in ``pool``.

    Attributes:
        ends: of the buckets, if they may travel in parts.
    """

    shards: Shards
    fulls: Sequence[FullBuffer]
    pool: BufferPool
    ends: Sequence[BucketEnds] = ()

    def buckets(self) -> Sequence[BucketEnds]:
        return self.ends

    def shard(self) -> torch.Tensor:
        return self.shards.section()

    def deliver(self, packed: torch.Tensor) -> None:
        self.shards.unpack(packed, [full.hold(self.pool) for full in self.fulls])


class Packing:
    """Buckets and their full buffers: made anew, whole, when parameters have another dtype or place.

    Attributes:
        buckets: those that travel first.  fulls: the full buffer of each.
        travelling: those of what travels.  shards: its sections.  ends: what takes it in parts.
        full_bytes: of the full parameters beyond the shards.
        pool: where full buffers find memory; None before an engine is there.
    """

    pool: BufferPool | None = None

    def __init__(self, buckets: list[FlatBucket], num_shards: int, place: ParamStorage) -> None:
        self.buckets = sorted(buckets, key=lambda bucket: not bucket.travels)  # numbered as in what travels
        for bucket in self.buckets:
            bucket.stage()
            for param in bucket.params:
                param.full = None
                param.is_hooked = False
        self.fulls = [FullBuffer(b.layout, b.full_dtype, place.device, is_shared=not b.travels) for b in self.buckets]
        self._windows = {
            param: (buffer, offset)
            for bucket, buffer in zip(self.buckets, self.fulls, strict=True)
            for param, offset in zip(bucket.params, bucket.layout.full_offsets, strict=True)
        }
        self.shards = Shards([bucket for bucket in self.buckets if bucket.travels], num_shards, place)
        self.full_bytes = sum(full.num_bytes for full in self.fulls)
        self.travelling = [full for full in self.fulls if not full.is_shared]
        self.ends = [ShardEnds(self.shards, number, full) for number, full in enumerate(self.travelling)]
        self._staging: tuple[Link | None, tuple[int, bool]] | None = None

    def bind(self, pool: BufferPool | None) -> None:
        """Let parts find memory in ``pool``."""
        self.pool = pool
        for ends in self.ends:
            ends.pool = pool

    def hold(self, pool: BufferPool) -> list[torch.Tensor]:
        """Return the 1-D full buffers of the buckets that travel, with memory under them."""
        return [full.hold(pool) for full in self.travelling]

    def make_full(self, param: UnitParam, pool: BufferPool) -> nn.Parameter:
        """Return what modules compute with for ``param``: a window of its full buffer, or of the shard if that is whole."""
        buffer, offset = self._windows[param]
        if buffer.is_shared:
            return make_full_parameter(param.local, 0, param, param.local.stride())  # user code may have put it there
        return make_full_parameter(buffer.hold(pool), offset, param)

    def staging(self, link: Link | None) -> tuple[int, bool]:
        """Return the bytes that an all-gather by ``link`` stages, and whether its full parameters are among them."""
        if self._staging is None or self._staging[0] is not link:
            self._staging = (link, self._compute_staging(link))
        return self._staging[1]

    def _compute_staging(self, link: Link | None) -> tuple[int, bool]:
        if link is None:
            return self.shards.packed_bytes, False
        stagings = [link.gather_staging(each.layout, each.full_dtype.itemsize) for each in self.shards.buckets]
        in_place = any(is_in_place for _, is_in_place in stagings)
        return sum(num_bytes for num_bytes, _ in stagings) + (self.full_bytes if in_place else 0), in_place

    def drop(self, keeps_memory: bool) -> None:
        """Let nobody use the full parameters, and give their memory back unless ``keeps_memory``."""
        for bucket, buffer in zip(self.buckets, self.fulls, strict=True):
            if not keeps_memory:
                buffer.drop()
            if not buffer.is_shared:
                mark_freed(bucket.params, has_memory=buffer.is_held)

    def leave(self) -> None:
        """Give memory back that is kept while nobody uses it: another packing takes the place of this one."""
        for bucket, buffer in zip(self.buckets, self.fulls, strict=True):
            if all(type(param.full) is FreedParameter for param in bucket.params):
                buffer.drop()

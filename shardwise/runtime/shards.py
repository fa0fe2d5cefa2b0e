"""This rank's shards of a unit's parameters in flat memory, and the full parameters they gather into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import torch_private
from shardwise.comm.buffers import BufferPool, Lease
from shardwise.layout.bucket import Bucket, align
from shardwise.layout.shard import Move
from shardwise.runtime.param import Slot, UnitParam

_BYTE_ALIGNMENT = 16  # of each bucket in a section that several dtypes share


def view_of(flat: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """Return a strided window of the 1-D tensor ``flat``."""
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)


def full_window(flat: torch.Tensor, move: Move, base: int) -> torch.Tensor:
    """Return the side of ``move`` that lies in a full tensor starting at element ``base``."""
    return view_of(flat, move.shape, move.full_stride, base + move.full_offset)


def packed_window(flat: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the side of ``move`` that lies in a packed buffer."""
    return view_of(flat, move.shape, move.packed_stride, move.packed_offset)


@dataclass(slots=True, eq=False)
class FlatBucket:
    """Parameters of one dtype.

    Attributes:
        params: the parameters, in layout order.
        layout: where each of them starts, in a section and in the full buffer.
        dtype: of the shards.  full_dtype: of the all-gather and the full parameters.
        local: 1-D, ``layout.section_numel`` elements: this rank's section; every shard is a view of it.
        byte_offset: where the bucket starts in a section that several buckets share.
        home: where ``local`` starts in the segment that ranks of this host share, if it lies there.
        places: for each parameter its first slot, and how many bytes into ``local`` its shard starts; None: it is empty.
    """

    params: list[UnitParam]
    layout: Bucket
    dtype: torch.dtype
    full_dtype: torch.dtype
    local: torch.Tensor
    byte_offset: int = 0
    home: int | None = None
    places: list[tuple[UnitParam, Slot, int | None]] = field(init=False)

    def __post_init__(self) -> None:
        starts = [offset * self.dtype.itemsize for offset in self.layout.offsets]
        self.places = [
            (param, param.slots[0], start if param.local.numel() else None)
            for param, start in zip(self.params, starts, strict=True)
        ]

    def move_home(self, memory: torch.Tensor, home: int) -> None:
        """Let the section live in ``memory`` (1-D, of the same size and dtype); every view of it moves along."""
        memory.copy_(self.local)
        torch_private.swap_storage(self.local.untyped_storage(), memory.untyped_storage())
        self.home = home


class FullBuffer:
    """The full parameters of one bucket, in memory that comes and goes under a storage that stays.

    Autograd keeps references to the storage, so it must be the same object in forward and backward.
    """

    def __init__(self, layout: Bucket, dtype: torch.dtype, device: torch.device, shared: torch.Tensor | None) -> None:
        """``shared``: a 1-D tensor that already holds the full parameters (one shard per tensor); None: own memory."""
        self._lease: Lease | None = None
        self._is_shared = shared is not None
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.num_bytes = 0 if shared is not None else layout.full_numel * dtype.itemsize
        self._dtype = dtype
        self._flat = shared

    @property
    def is_held(self) -> bool:
        """True while the memory is there."""
        return self._is_shared or self._lease is not None

    @property
    def is_shared(self) -> bool:
        """True when the full parameters are the shards themselves."""
        return self._is_shared

    def hold(self, pool: BufferPool) -> torch.Tensor:
        """Take memory from ``pool`` unless held; return the 1-D buffer."""
        if not self.is_held:
            self._lease = pool.lease(self.num_bytes)
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
            torch_private.swap_storage(self._storage, lease.storage)
            lease.release()

    def lose(self) -> object:
        """Do as :meth:`drop` does, but keep the memory from its pool: somebody may still write to it.  Returns its keeper."""
        if self._lease is None:
            return None
        lease, self._lease = self._lease, None
        torch_private.swap_storage(self._storage, lease.storage)
        return lease.lose()


def make_full_parameter(flat: torch.Tensor, shape: tuple[int, ...], offset: int, param: UnitParam) -> nn.Parameter:
    """Return the parameter that modules compute with: a window of ``flat`` with a version counter of its own."""
    stride = torch.empty(shape, device="meta").stride()
    with torch.inference_mode(False), torch.no_grad():
        # set_ instead of a view: gathering into ``flat`` must not count as changing what autograd has saved.
        local = torch.empty(0, dtype=flat.dtype, device=flat.device)
        local.set_(flat.untyped_storage(), flat.storage_offset() + offset, shape, stride)
        if param.inner_spec is not None:
            local = torch_private.dtensor_from_local(local, param.inner_spec)
        return nn.Parameter(local, requires_grad=param.sharded.requires_grad)


class Shards:
    """The sections of one placement of a unit's parameters, gathered and cut again by moves that are made once."""

    def __init__(self, buckets: list[FlatBucket], num_shards: int, device: torch.device) -> None:
        self.buckets = buckets
        self.num_shards = num_shards
        self._device = device
        offset = 0
        for bucket in buckets:
            bucket.byte_offset = offset
            offset = align(offset + bucket.layout.section_numel * bucket.full_dtype.itemsize, _BYTE_ALIGNMENT)
        self._section_bytes = offset
        self._moves = [self._bucket_moves(bucket) for bucket in buckets]
        self._full_windows: list[list[torch.Tensor]] | None = None
        self._packed_windows: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of the pool's buffers, while it keeps them
        self._full_parts: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._columns = [shard.section_numel for shard in buckets[0].layout.shards] if len(buckets) == 1 else []
        self._is_even = len(buckets) == 1 and buckets[0].layout.is_even

    @property
    def packed_dtype(self) -> torch.dtype:
        """Dtype of the packed buffer: the parameters' if they have one, else bytes."""
        return self.buckets[0].full_dtype if len(self.buckets) == 1 else torch.uint8

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed buffer of all ranks."""
        return self.num_shards * self._section_numel * self.packed_dtype.itemsize

    @property
    def _section_numel(self) -> int:
        return self.buckets[0].layout.section_numel if len(self.buckets) == 1 else self._section_bytes

    def _bucket_moves(self, bucket: FlatBucket) -> list[tuple[int, Move]]:
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
        section = torch.empty(self._section_bytes, dtype=torch.uint8, device=self._device)
        for bucket in self.buckets:
            numel = bucket.layout.section_numel
            window = section.narrow(0, bucket.byte_offset, numel * bucket.full_dtype.itemsize).view(bucket.full_dtype)
            window.copy_(bucket.local, non_blocking=True)
        return section

    def section_of(self, bucket: FlatBucket) -> torch.Tensor:
        """Return this rank's section of one bucket in the dtype of the all-gather, on the device."""
        return bucket.local.to(self._device, bucket.full_dtype, non_blocking=True)

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
                [full_window(full, move, base) for base, move in moves]
                for full, moves in zip(fulls, self._moves, strict=True)
            ]
        if self._is_even:
            rows = packed.view(self.num_shards, self._section_numel)
            torch.split_with_sizes_copy(rows, self._columns, dim=1, out=self._full_windows[0])
            return
        sources = self._packed_windows.get(packed)
        if sources is None:
            sources = self._packed_windows[packed] = [
                packed_window(packed if packed.dtype == bucket.full_dtype else packed.view(bucket.full_dtype), move)
                for bucket, moves in zip(self.buckets, self._moves, strict=True)
                for _, move in moves
            ]
        if sources:
            torch_private.copy_all([window for windows in self._full_windows for window in windows], sources)

    def cut_from(self, fulls: Sequence[torch.Tensor], rank: int) -> None:
        """Fill the sections from full buffers: what ``rank`` holds of them."""
        for bucket, full in zip(self.buckets, fulls, strict=True):
            for index, shard in enumerate(bucket.layout.shards):
                base = bucket.layout.full_offsets[index]
                whole = full.narrow(0, base, shard.numel).view(shard.shape)
                rows = shard.rows(rank)
                part = whole if shard.is_whole else whole.narrow(shard.dim, rows.start, len(rows))
                self.local_view(bucket, index, rank).copy_(part)

    @staticmethod
    def local_view(bucket: FlatBucket, index: int, rank: int) -> torch.Tensor:
        """Return the window of ``rank``'s section that holds shard ``index``."""
        shard = bucket.layout.shards[index]
        window = bucket.local.narrow(0, bucket.layout.offsets[index], shard.shard_numel(rank))
        return window.view(shard.shard_shape(rank))

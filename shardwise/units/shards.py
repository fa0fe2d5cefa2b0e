"""This rank's shards of a unit's parameters in flat memory, and the full parameters they gather into."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import torch_private
from shardwise.comm.buffers import BufferPool, Lease
from shardwise.comm.carve import carve, is_own
from shardwise.comm.links.arena import ArenaPlace, take_shareable
from shardwise.comm.links.parts import section_parts
from shardwise.errors import LayoutError
from shardwise.layout.bucket import Bucket, align
from shardwise.layout.shard import Move, row_major
from shardwise.units.param import Slot, UnitParam

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


@dataclass(frozen=True, slots=True)
class Memory:
    """What a section lies in: a 1-D tensor, and where that is for other processes of this host, if it is shared."""

    flat: torch.Tensor
    place: ArenaPlace | None = None


@dataclass(frozen=True, slots=True)
class Allocator:
    """Makes memory for sections; page-locked, or where other processes of this host can map it, if wanted and possible."""

    device: torch.device
    pins: bool = False
    shares: bool = False

    def __call__(self, numel: int, dtype: torch.dtype) -> Memory:
        """Return ``numel`` zeros."""
        if self.shares and numel:
            found = take_shareable(numel * dtype.itemsize)
            if found is not None:
                return Memory(found[0].view(dtype), found[1])
        flat = torch.zeros(numel, dtype=dtype, device=self.device)
        return Memory(flat.pin_memory() if self.pins else flat)


@dataclass(slots=True, eq=False)
class SubBucket:
    """This rank's shards on the smaller mesh that parameters go to after forward; attributes as of a FlatBucket."""

    params: list[UnitParam]
    layout: Bucket
    full_dtype: torch.dtype
    local: torch.Tensor
    byte_offset: int = 0

    def windows(self, rank: int) -> list[torch.Tensor]:
        """Return the shards of ``rank``, each with a storage of its own."""
        shapes = [shard.shard_shape(rank) for shard in self.layout.shards]
        return [carve(self.local, offset, shape) for offset, shape in zip(self.layout.offsets, shapes, strict=True)]


class FlatBucket:
    """This rank's shards of parameters of one dtype, side by side in one allocation.

    Every shard has a storage of its own there, its *home*.  Memory that somebody else may hold is never replaced: when user
    code has put other memory under a parameter (``to_empty``, ``load_state_dict(assign=True)``, ``share_memory_``), the
    parameter comes home once nothing but itself holds that memory.  Until then it is *loose*: what travels is a copy.

    Attributes:
        params: the parameters, in layout order.
        layout: where each of them starts, in a section and in the full buffer.
        dtype: of the shards.  full_dtype: of the all-gather and the full parameters.
        local: 1-D, ``layout.section_numel`` elements: this rank's section.
        place: where ``local`` lies for other processes of this host; None: it is this process's own.
        travels: full parameters are copies; else they are the shards themselves, wherever these lie.
        byte_offset: where the bucket starts in a section that several buckets share.
        number: which of the sections that the ranks of a host read from each other this is.
        loose: indices of the parameters that are not at home.
        num_replaced: parameters that user code has put others in the place of, since somebody has asked.
    """

    def __init__(
        self,
        params: list[UnitParam],
        layout: Bucket,
        full_dtype: torch.dtype,
        allocate: Allocator,
        travels: bool,
    ) -> None:
        self.params = params
        self.layout = layout
        self.dtype = params[0].dtype
        self.full_dtype = full_dtype
        self.travels = travels
        self.byte_offset = 0
        self.number: int | None = None
        self.num_replaced = 0
        self.has_attributes = False
        self._allocate = allocate
        self._take_memory()

    def _take_memory(self) -> None:
        memory = self._allocate(self.layout.section_numel, self.dtype)
        self.place, self.local = memory.place, memory.flat
        self._homes: list[torch.UntypedStorage] = []
        # For each parameter its first slot, and the address of its home; None: the shard is empty.
        self._places: list[tuple[UnitParam, Slot, int | None]] = []
        self.loose: list[int] = []
        for param, offset in zip(self.params, self.layout.offsets, strict=True):
            home = carve(self.local, offset, param.shard_shape)
            self._homes.append(home.untyped_storage())
            self._places.append((param, param.slots[0], home.data_ptr() if home.numel() else None))

    def move_in(self) -> None:
        """Bring every parameter home that nobody else holds; note that the others are loose."""
        self.loose = [
            index
            for index, (param, _, address) in enumerate(self._places)
            if (address is not None or not param.is_handed_out) and not self._come_home(index)
        ]

    def settle(self) -> bool:
        """Find parameters that are not at home; bring them home or note that they are loose.

        Returns: False if a parameter has another dtype or device than the bucket was made for.
        """
        dtype, device = self.dtype, self.local.device
        self.has_attributes = False
        away: list[int] = []
        for param, slot, _ in self._places:
            if slot.parameters[slot.name] is not param.sharded and not param.is_registered:
                param.adopt_registered()
                self.num_replaced += 1
        locals_ = torch_private.locals_of([param.sharded for param in self.params])
        for index, (param, _, address) in enumerate(self._places):
            sharded, local = param.sharded, locals_[index]
            if local.dtype is not dtype or local.device != device:
                return False
            if local.__dict__:
                self.has_attributes = True
            if sharded.grad_dtype is not (dtype if param.grad_dtype is None else param.grad_dtype.dtype):
                param.follow_grad_dtype()
            if address is not None and self.travels and local.data_ptr() != address:
                away.append(index)
        self.loose = [index for index in away if not self._come_home(index)] if away else away
        if self.loose and any(torch_private.storage_use_count(self._homes[index]) for index in self.loose):
            self.relocate()  # somebody holds a home that its parameter has left
        return True

    def stage(self) -> None:
        """Copy loose parameters to where they travel from."""
        for index in self.loose:
            param = self.params[index]
            with torch.no_grad():
                view_of(self.local, param.shard_shape, row_major(param.shard_shape), self.layout.offsets[index]).copy_(
                    param.local
                )

    def relocate(self, allocate: Allocator | None = None) -> None:
        """Take other memory for the section, from ``allocate`` if that is given."""
        if allocate is not None:
            self._allocate = allocate
        self._take_memory()
        self.move_in()

    def _come_home(self, index: int) -> bool:
        param, storage = self.params[index], self._homes[index]
        local = param.local
        if tuple(local.shape) != param.shard_shape:
            raise LayoutError(
                f"{param.fqn}: its shard has shape {tuple(local.shape)}, expected {param.shard_shape}; user code has put "
                "another tensor in its place: assign one of the sharded shape"
            )
        if torch_private.storage_use_count(storage) or (param.is_handed_out and is_held(local)):
            return False
        home = torch.empty(0, dtype=self.dtype, device=self.local.device)
        home.set_(storage, 0, local.shape, row_major(local.shape))
        if local.device.type != "meta":
            with torch.no_grad():
                home.copy_(local)
        if param.is_handed_out and is_own(local) and local.is_contiguous():
            # The tensor object stays as well, and whoever holds it: only the memory under it is another.
            old = local.untyped_storage()
            torch_private.swap_storage(old, storage)
            self._homes[index] = old
        else:
            param.replace_local(home.requires_grad_(local.requires_grad))
            param.is_handed_out = True
        return True


def is_held(tensor: torch.Tensor) -> bool:
    """Return True if something beside ``tensor`` holds its memory, or something beside Python holds ``tensor``."""
    storage = tensor.untyped_storage()
    return (
        torch_private.storage_use_count(storage) > 1
        or torch_private.tensor_use_count(tensor) > 0
        or sys.getrefcount(storage) > 3  # itself, the argument, and the storage, which keeps its Python object
        or (tensor.device.type == "cpu" and tensor.is_shared())  # with other processes, which nobody can count
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

    def lose(self) -> object:
        """Do as :meth:`drop` does, but keep the memory from its pool: somebody may still write to it.  Returns its keeper."""
        if self._lease is None:
            return None
        lease, self._lease = self._lease, None
        self.is_held = self.is_shared
        torch_private.swap_storage(self._storage, lease.storage)
        return lease.lose()


def make_full_parameter(memory: torch.Tensor, offset: int, param: UnitParam) -> nn.Parameter:
    """Return the parameter that modules compute with: a window of ``memory`` with a version counter of its own."""
    shape = param.shard.shape
    with torch.inference_mode(False), torch.no_grad():
        # set_ instead of a view: gathering into ``memory`` must not count as changing what autograd has saved.
        local = torch.empty(0, dtype=memory.dtype, device=memory.device)
        local.set_(memory.untyped_storage(), memory.storage_offset() + offset, shape, row_major(shape))
        if param.inner_spec is not None:
            local = torch_private.dtensor_from_local(local, param.inner_spec)
        return nn.Parameter(local, requires_grad=param.sharded.requires_grad)


class Shards:
    """The sections of one placement of a unit's parameters, gathered and cut again by moves that are made once."""

    def __init__(self, buckets: Sequence[FlatBucket | SubBucket], num_shards: int, device: torch.device) -> None:
        self.buckets = buckets
        self.num_shards = num_shards
        self._device = device
        offset = 0
        for bucket in buckets:
            bucket.byte_offset = offset
            offset = align(offset + bucket.layout.section_numel * bucket.full_dtype.itemsize, _BYTE_ALIGNMENT)
        self._section_bytes = offset
        self._section_numel = buckets[0].layout.section_numel if len(buckets) == 1 else offset
        self._moves = [self._bucket_moves(bucket) for bucket in buckets]
        self._full_windows: list[list[torch.Tensor]] | None = None
        self._packed_windows: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of the pool's buffers, while it keeps them
        self._own_parts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
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
        section = torch.empty(self._section_bytes, dtype=torch.uint8, device=self._device)
        for bucket in self.buckets:
            numel = bucket.layout.section_numel
            window = section.narrow(0, bucket.byte_offset, numel * bucket.full_dtype.itemsize).view(bucket.full_dtype)
            window.copy_(bucket.local, non_blocking=True)
        return section

    def section_of(self, bucket: FlatBucket | SubBucket) -> torch.Tensor:
        """Return this rank's section of one bucket in the dtype of the all-gather, on the device."""
        return bucket.local.to(self._device, bucket.full_dtype, non_blocking=True)

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

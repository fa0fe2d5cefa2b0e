"""This rank's shards of parameters of one dtype, side by side in one allocation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise import torch_private
from shardwise.comm.carve import carve, is_own
from shardwise.comm.lanes import Device
from shardwise.comm.links.arena import ArenaPlace, take_shareable
from shardwise.errors import LayoutError
from shardwise.layout.bucket import Bucket
from shardwise.layout.shard import row_major
from shardwise.units.param import Slot, UnitParam


def view_of(flat: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """Return a strided window of the 1-D tensor ``flat``."""
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a section lies in: a 1-D tensor, and where that is for other processes of this host, if it is shared."""

    flat: torch.Tensor
    place: ArenaPlace | None = None


@dataclass(frozen=True, slots=True)
class Allocator:
    """Makes memory for sections; page-locked, or where other processes of this host can map it, if wanted and possible.

    Attributes:
        offloads_from: what computes with the sections, if that is not the host.
    """

    device: torch.device
    pins: bool = False
    shares: bool = False
    offloads_from: Device | None = None

    def __call__(self, numel: int, dtype: torch.dtype) -> Memory:
        """Return ``numel`` zeros."""
        if self.shares and numel and self.device.type == "cpu":  # meta has no memory to share
            found = take_shareable(numel * dtype.itemsize)
            if found is not None:
                return Memory(found[0].view(dtype), found[1])
        if self.offloads_from is not None and self.device.type == "cpu":
            return Memory(self.offloads_from.host_memory(numel, dtype, self.pins).zero_())
        return Memory(torch.zeros(numel, dtype=dtype, device=self.device))


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
        has_moved: the last :meth:`settle` has copied shards to where they travel from.
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
        self.has_attributes = self.has_moved = False
        self._allocate = allocate
        self._take_memory()

    @torch.inference_mode(False)  # an evaluation may be what comes first after a change; what is made here outlives it
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
        for param in self.params:
            if param.local is not param.count.local():
                param.count.go_on(param.sharded, param.local)
        self.loose = [
            index
            for index, (param, _, address) in enumerate(self._places)
            if (address is not None or not param.is_handed_out) and not self._come_home(index)
        ]

    def settle(self, host_waits: Callable[[], None] | None = None) -> bool:
        """Find parameters that are not at home; bring them home or note that they are loose.

        ``host_waits``: is called before the host writes to the section, which copies may be reading.

        Returns: False if a parameter has another dtype or device than the bucket was made for.
        """
        dtype, device = self.dtype, self.local.device
        self.has_attributes = False
        away: list[int] = []
        for param, slot, _ in self._places:
            if slot.parameters.get(slot.name) is not param.sharded and not param.is_registered:
                param.adopt_registered()
                self.num_replaced += 1
        locals_ = torch_private.locals_of([param.sharded for param in self.params])
        for index, (param, _, address) in enumerate(self._places):
            sharded, local = param.sharded, locals_[index]
            if local.dtype is not dtype or local.device != device:
                return False
            if local is not param.count.local():
                param.count.go_on(sharded, local)
            if local.__dict__:
                self.has_attributes = True
            if sharded.grad_dtype is not (dtype if param.grad_dtype is None else param.grad_dtype.dtype):
                param.follow_grad_dtype()
            if address is not None and self.travels and local.data_ptr() != address:
                away.append(index)
        self.has_moved = bool(away)
        if away and host_waits is not None:
            host_waits()
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

    @torch.inference_mode(False)
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

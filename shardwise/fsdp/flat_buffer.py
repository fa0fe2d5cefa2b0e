"""Flat buffers: shards and full parameters of one dtype share an allocation, so that one collective moves them all."""

from __future__ import annotations

import functools
import gc
import operator
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.collectives.routes import BucketEnds, link_providers
from shardwise.collectives.streams import BufferPool, Device, device_of, suballocate_all
from shardwise.errors import LayoutError, StateError
from shardwise.fsdp.full_buffer import FullBuffer
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.precision import CPUOffloadPolicy, OffloadPolicy
from shardwise.layout import Bucket, Move, align, build_bucket, row_major


def _place_of(shard: torch.Tensor) -> int:
    """Return the address of ``shard``; the identity of its storage if it is empty: all ranks find the same replaced."""
    return shard.data_ptr() if shard.numel() else torch_private.storage_id(shard)


@dataclass(slots=True, eq=False)
class SubBucket:
    """This rank's shards on the smaller mesh of ``reshard_after_forward``; for attributes see :class:`FlatBucket`."""

    layout: Bucket
    full_dtype: torch.dtype
    local: torch.Tensor


class FlatBucket:
    """This rank's shards of parameters of one dtype, concatenated in one allocation, the *section*.

    Each shard has a storage of its own inside the section, so user code may do with it all that it does with a tensor.  When
    user code has put other memory under a parameter (``to_empty``, ``load_state_dict(assign=True)``), its values move back.

    Attributes:
        params: the parameters, in layout order.
        layout: where each of them starts, in a section and in the full buffer.
        dtype: the dtype of the shards.
        full_dtype: the dtype of the all-gather and the full parameters.
        local: 1-D, ``layout.section_numel`` elements: this rank's section.
        place: the location of ``local`` for other processes of this host; None if it is private.
        travels: full parameters are gathered copies; False: they are the shards themselves.
        number: of this section among those that the ranks of a host read from each other; the link of the host sets it, and
            None says that sizes may have changed.
    """

    def __init__(
        self, params: list[ShardedParam], layout: Bucket, full_dtype: torch.dtype, storage: ParamStorage, travels: bool
    ) -> None:
        self.params, self.layout, self.travels = params, layout, travels
        self.dtype, self.full_dtype = params[0].dtype, full_dtype
        self.number: int | None = None
        self._storage = storage
        self._move_in(params[0].local.device)

    def _move_in(self, device: torch.device) -> None:
        """Allocate a section on ``device``, and move every shard there."""
        self.local, self.place = self._storage.allocate(self.layout.section_numel, self.dtype, device)
        shapes = [param.shard_shape for param in self.params]
        packed = suballocate_all(self.local, [*zip(self.layout.offsets, shapes, strict=True)])
        self._packed = [(shard.untyped_storage(), _place_of(shard)) for shard in packed]
        for index in range(len(packed)):
            self._pack(index)

    @torch.inference_mode(False)  # the first forward after a change may be an evaluation, and this memory outlives that
    def _pack(self, index: int) -> None:
        """Copy a shard to its place in the section, and give the parameter that memory."""
        param = self.params[index]
        local, shape = param.local, param.shard_shape
        if tuple(local.shape) != shape:
            raise LayoutError(
                f"{param.fqn}: its shard has shape {tuple(local.shape)}, expected {shape}; user code has replaced its local "
                "tensor: assign one of the sharded shape"
            )
        empty = torch.empty(0, dtype=self.dtype, device=self.local.device)
        # It is no view, which user code could not swap.
        packed = empty.set_(self._packed[index][0], 0, shape, row_major(shape))
        if not packed.is_meta:
            packed.copy_(local.detach())
        param.replace_local(packed.requires_grad_(local.requires_grad))

    def settle(self, host_waits: Callable[[], None] | None = None) -> bool:
        """Move shards back that user code has given other memory; return True if there were any.

        ``host_waits``: waits for copies on streams that may read the section; called before the host writes to it.
        """
        away: list[int] = []
        for index, (param, (storage, place)) in enumerate(zip(self.params, self._packed, strict=True)):
            if not self.travels or _place_of(param.local) == place:
                continue
            if param.local.device.type == "cpu" and param.local.is_shared():
                raise StateError(f"{param.fqn} was moved to shared memory by share_memory_(): share the plain model")
            # What still holds the former shard would see none of the next steps.  That is refused rather than followed.
            if torch_private.storage_use_count(storage):
                gc.collect()  # garbage reads no values
            if torch_private.storage_use_count(storage):
                raise StateError(
                    f"{param.fqn} was given other memory (load_state_dict(assign=True), to_empty(), another parameter) while "
                    "a state dict, an optimizer or a variable still holds its former shard. Keep clones, or copy_ into shards"
                )
            away.append(index)
        if away and host_waits is not None:
            host_waits()
        for index in away:
            self._pack(index)
        return bool(away)

    def has_moved(self) -> None:
        """Take the addresses that shards have now, all in one section: their storages were given memory elsewhere."""
        self._packed = [(param.local.untyped_storage(), _place_of(param.local)) for param in self.params]

    def move_to_shared_memory(self) -> None:
        """Move the section to shared memory that local peers can read, if a transport provides any."""
        self._storage = replace(self._storage, is_shared=True)
        self._move_in(self.local.device)


# ---- The devices of a unit's parameters, and its buckets.


@dataclass(frozen=True)
class ParamStorage:
    """The devices of the parameters of a unit.

    Attributes:
        device: the device of the full parameters.
        offload: the offload policy, which may put shards on the host.
        is_shared: shards are allocated in shared memory, which other ranks of this host can read.
    """

    device: torch.device
    offload: OffloadPolicy
    is_shared: bool = False

    @functools.cached_property
    def on(self) -> Device:
        """The interface to ``device``."""
        return device_of(self.device)

    @functools.cached_property
    def is_offloaded(self) -> bool:
        """True if shards and gradients are on the host, and full parameters on another device."""
        return isinstance(self.offload, CPUOffloadPolicy) and self.on.has_streams

    @functools.cached_property
    def storage_device(self) -> torch.device:
        """The device of the shards."""
        return torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else self.device

    @property
    def pins(self) -> bool:
        """True if shards are in page-locked memory."""
        return isinstance(self.offload, CPUOffloadPolicy) and self.offload.pin_memory and self.on.can_pin

    def alignment(self, dtype: torch.dtype, are_full: bool = False) -> int:
        """Return the alignment of tensors in a section, or of full tensors if ``are_full``, in elements of ``dtype``."""
        # Full tensors are aligned as torch aligns its own.  Sections are sent, so they have no more padding than necessary:
        # vector loads of an accelerator's kernels need 16 bytes.
        num_bytes = self.on.alignment if are_full else 16 * self.on.has_streams
        return max(num_bytes // dtype.itemsize, 1)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, object | None]:
        """Return ``numel`` zeros for shards, and their location for other processes of this host, None if it is private."""
        folder = getattr(self.offload, "folder", "")  # of DiskOffloadPolicy, which a higher layer defines
        if (self.is_shared or folder) and numel and device.type == "cpu":  # meta has no memory to share
            for provider in link_providers:
                found = provider.take_shareable(numel * dtype.itemsize, folder)
                if found is not None:
                    return found[0].view(dtype), found[1]
        if self.is_offloaded and device.type == "cpu":
            return self.on.host_memory(numel, dtype, self.pins).zero_(), None
        return torch.zeros(numel, dtype=dtype, device=device), None

    def bucket(self, params: list[ShardedParam], full_dtype: torch.dtype, is_collective: bool) -> FlatBucket:
        """Return a new bucket with ``params``, all of one dtype, packed.

        It travels, unless it has no elements or its shards can serve as full parameters.
        """
        dtype, device = params[0].dtype, params[0].local.device
        is_copied = is_collective or dtype != full_dtype or self.is_offloaded or device != self.device
        alignments = self.alignment(dtype, not is_copied), self.alignment(full_dtype, are_full=True)
        layout = build_bucket([param.shard for param in params], *alignments)
        return FlatBucket(params, layout, full_dtype, self, is_copied and layout.full_numel > 0)


# ---- Memory for reduced gradients: contiguous, but with one storage per gradient, since user code may store one of them.

# Small sections are reused in the next step unless user code references a gradient: making tensors costs more than the
# arithmetic on them.  Large sections come from the allocator, so that the next forward can use the memory of dropped gradients.
KEPT_BYTES = 1 << 20
_MAX_KEPT = 2
_ADDRESS, _SHARDED = torch.Tensor.data_ptr, operator.attrgetter("sharded")
_REQUIRES_GRAD, _DTYPE = operator.attrgetter("requires_grad"), operator.attrgetter("dtype")


class GradientSection:
    """A section and the gradients sub-allocated from it.

    Attributes:
        flat: 1-D, the whole section.
        windows: the gradient of each parameter, as a plain tensor.
        gradients: the gradients that users see, DTensors if their parameters are.
        is_taken: a reduction uses the section; otherwise it may be reused when nothing else references a gradient.
    """

    def __init__(
        self, params: Sequence[ShardedParam], places: Sequence[tuple[int, tuple[int, ...]]], flat: torch.Tensor
    ) -> None:
        """Sub-allocate gradients of ``params`` from ``flat``; ``places``: offset, in elements, and shape of each."""
        self.flat, self._params = flat, params
        self.windows = suballocate_all(flat, places)
        self.gradients = [as_gradient(param, window) for param, window in zip(params, self.windows, strict=True)]
        storages = [window.untyped_storage() for window in self.windows]
        self._count_uses = torch_private.use_counter([*self.gradients, *self.windows], storages)
        self._addresses = [window.data_ptr() for window in self.windows]
        self._specs = torch_private.specs_of([param.sharded for param in params])
        self.is_taken = True
        del storages  # the list would be among the references that are counted next
        # As long as only this object has the gradients.  Higher counts later show that user code keeps one of them.
        self._unheld = self._count_uses()

    def take(self) -> bool:
        """Take the section; return False if it is in use: taken, or a gradient is referenced or was changed by user code."""
        if (
            self.is_taken
            or self._count_uses() != self._unheld
            or [*map(_ADDRESS, self.windows)] != self._addresses
            or not all(map(operator.is_, torch_private.locals_of(self.gradients), self.windows))
            or not all(map(operator.is_, torch_private.specs_of([*map(_SHARDED, self._params)]), self._specs))
            or any(map(_REQUIRES_GRAD, self.gradients))
        ):
            return False
        self.is_taken = True
        return True


def as_gradient(param: ShardedParam, window: torch.Tensor) -> torch.Tensor:
    """Return ``window`` in the form that users see as gradient of ``param``: a DTensor if the parameter is one."""
    if not isinstance(param.sharded, DTensor):
        return window
    spec = torch_private.spec_of(param.sharded, window.dtype)
    return torch_private.dtensor_from_local(window, spec)


# ---- From shards to full parameters: sections, and the copies out of the gathered buffer.

_BYTE_ALIGNMENT = 16  # of each bucket in a section that several dtypes share


def full_window(flat: torch.Tensor, move: Move, base: int) -> torch.Tensor:
    """Return the side of ``move`` that is in a full tensor, which starts at element ``base``."""
    return flat.as_strided(move.shape, move.full_stride, flat.storage_offset() + base + move.full_offset)


def packed_window(flat: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the side of ``move`` that is in a packed buffer.

    It is not a view, since a view references ``flat``: :func:`keep_windows` caches windows until ``flat`` dies, and with
    views it never would.
    """
    with torch.inference_mode(False):
        window = torch.empty(0, dtype=flat.dtype, device=flat.device)
        start = flat.storage_offset() + move.packed_offset
        return window.set_(flat.untyped_storage(), start, move.shape, move.packed_stride)


# Windows by the id of their buffer, since tensors compare element by element.  They are looked up without a call.
_KnownWindows = tuple[weakref.ref[torch.Tensor], list[torch.Tensor]]
Windows = dict[int, _KnownWindows]


def keep_windows(kept: Windows, buffer: torch.Tensor, windows: list[torch.Tensor]) -> _KnownWindows:
    """Return the entry of ``windows``, which ``kept`` has from now on until ``buffer`` dies."""
    key = id(buffer)
    entry = kept[key] = weakref.ref(buffer, lambda _: kept.pop(key, None)), windows
    return entry


class GatherLayout:
    """Where shards lie in the buffer of an all-gather, and the copies out of it, computed once; see :class:`ReduceLayout`."""

    def __init__(self, buckets: Sequence[FlatBucket | SubBucket], num_shards: int, storage: ParamStorage) -> None:
        self.buckets, self.num_shards, self._storage = buckets, num_shards, storage
        offset, self._starts = 0, list[int]()  # where each bucket starts, in bytes
        for bucket in buckets:
            self._starts.append(offset)
            offset = align(offset + bucket.layout.section_numel * bucket.full_dtype.itemsize, _BYTE_ALIGNMENT)
        self._section_bytes, only = offset, buckets[0] if len(buckets) == 1 else None
        # Sections of several dtypes travel as bytes.
        self._section_numel, itemsize = (only.layout.section_numel, only.full_dtype.itemsize) if only else (offset, 1)
        self.packed_bytes = num_shards * self._section_numel * itemsize  # of all ranks
        self.columns = [shard.section_numel for shard in only.layout.shards] if only else []
        # One split kernel copies all shards on an accelerator.  On CPU it makes as many copies as cached windows do, at twice
        # the cost.
        self.num_even = only.layout.num_even if only and storage.device.type != "cpu" else 0

    @functools.cached_property  # not when parameters are sharded: many modules are never run
    def moves(self) -> list[list[tuple[int, Move]]]:
        return [self._bucket_moves(*each) for each in zip(self.buckets, self._starts, strict=True)]

    def are_full(self, fulls: Sequence[FullBuffer]) -> bool:
        """Return True if the packed buffer is the full buffer: nothing needs to be copied out of it."""
        is_one = len(self.buckets) == 1 and self.buckets[0].layout.is_one_tensor
        return is_one and self.packed_bytes == fulls[0].num_bytes  # those of a smaller mesh may have less padding

    def _bucket_moves(self, bucket: FlatBucket | SubBucket, start: int) -> list[tuple[int, Move]]:
        itemsize = bucket.full_dtype.itemsize
        stride = self._section_numel if len(self.buckets) == 1 else self._section_bytes // itemsize
        layout, at = bucket.layout, {"section_offset": start // itemsize, "section_stride": stride}
        moves = [layout.moves(index, into_full=True, **at) for index in range(len(layout.shards))]
        return [(base, move) for base, each in zip(layout.full_offsets, moves, strict=True) for move in each]

    def section(self) -> torch.Tensor:
        """Return this rank's sections one after another, as bytes, each in the dtype of the all-gather, on the device."""
        section = torch.empty(self._section_bytes, dtype=torch.uint8, device=self._storage.device)
        for bucket, start in zip(self.buckets, self._starts, strict=True):
            numel = bucket.layout.section_numel
            window = section.narrow(0, start, numel * bucket.full_dtype.itemsize).view(bucket.full_dtype)
            is_cast = bucket.local.dtype is not bucket.full_dtype
            window.copy_(self.section_of(bucket) if is_cast else bucket.local, non_blocking=True)
        return section

    def section_of(self, bucket: FlatBucket | SubBucket) -> torch.Tensor:
        """Return this rank's section of ``bucket`` in the dtype of the all-gather, on the device; a copy only if it must be."""
        if bucket.local.dtype is bucket.full_dtype and not self._storage.is_offloaded:
            return bucket.local
        return self._storage.on.fetch(bucket.local, bucket.full_dtype)

    def packed_windows(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the windows of the packed buffer with these shards, in the same order."""
        rows = zip([packed.view(bucket.full_dtype) for bucket in self.buckets], self.moves, strict=True)
        return [packed_window(flat, move) for flat, moves in rows for _, move in moves]


class ShardEnds:
    """The sending and receiving side of one bucket, for transports that read shards one by one."""

    def __init__(self, shards: GatherLayout, index: int, full: FullBuffer, pool: BufferPool) -> None:
        bucket = shards.buckets[index]
        assert isinstance(bucket, FlatBucket)
        self._shards, self._bucket, self._full, self._pool = shards, bucket, full, pool
        self._parts: dict[int, list[torch.Tensor]] = {}
        self.params, self.layout = bucket.params, bucket.layout
        self.dtype, self.full_dtype = bucket.dtype, bucket.full_dtype

    @property
    def number(self) -> int | None:
        return self._bucket.number

    def section(self) -> torch.Tensor:
        return self._shards.section_of(self._bucket)

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        flat, parts = self._full.hold(self._pool), self._parts.get(rank)
        if parts is None:
            windows = zip(self.layout.parts(rank), self.layout.full_offsets, strict=True)
            parts = self._parts[rank] = [full_window(flat, *each) for each in windows]
        return parts


class Delivery:
    """The sending and receiving side of an all-gather from ``shards`` into ``fulls``, which take memory from ``pool``.

    ``has_parts``: transports may read the shards one by one.  ``shard()`` returns this rank's section.
    """

    __slots__ = ("_ends", "_full_windows", "_packed_windows", "fulls", "pool", "shard", "shards", "take_over")

    def __init__(
        self, shards: GatherLayout, fulls: Sequence[FullBuffer], pool: BufferPool, has_parts: bool = False
    ) -> None:
        self.shards, self.fulls, self.pool = shards, fulls, pool
        self._ends = [ShardEnds(shards, number, full, pool) for number, full in enumerate(fulls) if has_parts]
        is_one = len(shards.buckets) == 1
        self.shard = functools.partial(shards.section_of, shards.buckets[0]) if is_one else shards.section
        self.take_over = fulls[0].take_over if shards.are_full(fulls) else None
        self._full_windows: list[torch.Tensor] | None = None
        self._packed_windows: Windows = {}

    def buckets(self) -> Sequence[BucketEnds]:
        return self._ends

    def deliver(self, packed: torch.Tensor) -> None:
        """Copy every shard from the packed buffer to its place in the full buffers."""
        pool, fulls = self.pool, self.fulls
        flats = (fulls[0].hold(pool),) if len(fulls) == 1 else [full.hold(pool) for full in fulls]
        if self._full_windows is None:
            rows = zip(flats, self.shards.moves, strict=True)
            self._full_windows = [full_window(full, move, base) for full, moves in rows for base, move in moves]
        shards = self.shards
        if shards.num_even:  # one kernel copies all
            rows = packed.view(shards.num_shards, -1)[: shards.num_even]
            torch.split_with_sizes_copy(rows, shards.columns, dim=1, out=self._full_windows)
            return
        known = self._packed_windows.get(id(packed))
        if known is None or known[0]() is not packed:
            known = keep_windows(self._packed_windows, packed, shards.packed_windows(packed))
        torch_private.copy_all(self._full_windows, known[1])


# ---- The layout of gradients during and after their reduction.


class ReduceLayout:
    """The layout of some parameters' gradients in a packed buffer, and in this rank's section of it.

    Args:
        num_spare: elements behind the section, for a checksum of the reduction.
        kept_bytes: sections of up to this size are reused from step to step.
    """

    def __init__(
        self, params: list[ShardedParam], alignment: int, rank: int, num_spare: int = 0, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.params = params
        self.bucket = build_bucket([param.shard for param in params], alignment)
        names = [param.fqn for param in params]
        # The sum of the names tells apart what the first ones do not: transports, and sums of microbatches, compare this.
        more = f" and {len(names) - 3} more ({zlib.crc32(repr(names).encode()):08x})" if len(names) > 3 else ""
        self.names = ", ".join(names[:3]) + more
        self._moves = [self.bucket.moves(index, into_full=False) for index in range(len(params))]
        self._parts: dict[int, tuple[Move, ...]] = {}
        self._packed_windows: Windows = {}
        shapes = [shard.shard_shape(rank) for shard in self.bucket.shards]
        self._places = [*zip(self.bucket.offsets, shapes, strict=True)]
        self.num_spare, self._kept_bytes = num_spare, kept_bytes
        self._kept: list[GradientSection] = []

    def empty(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a section with undefined values, in memory that has the spare elements behind it."""
        numel = self.bucket.section_numel
        return torch.empty(numel + self.num_spare, dtype=dtype, device=device).narrow(0, 0, numel)

    def section_in(self, flat: torch.Tensor) -> GradientSection:
        """Return the gradients in ``flat``, a section."""
        return GradientSection(self.params, self._places, flat)

    def take(self, dtype: torch.dtype, storage: ParamStorage) -> GradientSection:
        """Return a section that nothing else uses, on the device of the shards of ``storage``, with undefined values."""
        for section in self._kept:
            if section.flat.dtype is dtype and section.flat.device == storage.storage_device and section.take():
                return section
        if getattr(storage.offload, "folder", ""):
            numel = self.bucket.section_numel
            flat = storage.allocate(numel + self.num_spare, dtype, storage.storage_device)[0].narrow(0, 0, numel)
        elif storage.is_offloaded:
            flat = storage.on.host_memory(self.bucket.section_numel, dtype, storage.pins)
        else:
            flat = self.empty(dtype, storage.device)
        section = self.section_in(flat)
        if flat.numel() * flat.element_size() <= self._kept_bytes:
            self._kept = [*self._kept, section][-_MAX_KEPT:]
        return section

    def pack(self, gradients: list[torch.Tensor], packed: torch.Tensor) -> None:
        """Copy every rank's shard of every gradient to its place in ``packed``; padding becomes zero."""
        # Gradients that divide evenly along dimension 0 take one kernel.
        num_ranks = packed.shape[0] // max(self.bucket.section_numel, 1)
        if self.bucket.are_rows and self.bucket.num_even == num_ranks and {*map(_DTYPE, gradients)} == {packed.dtype}:
            torch_private.chunk_cat(gradients, 0, num_ranks, out=packed.view(num_ranks, -1))
            return
        if self.bucket.has_padding:
            packed.zero_()
        known = self._packed_windows.get(id(packed))
        if known is None or known[0]() is not packed:
            windows = [packed_window(packed, move) for moves in self._moves for move in moves]
            known = keep_windows(self._packed_windows, packed, windows)
        sources: list[torch.Tensor] = []
        for gradient, moves in zip(gradients, self._moves, strict=True):
            dense = gradient.contiguous()
            start = dense.storage_offset()
            sources += [dense.as_strided(move.shape, move.full_stride, start + move.full_offset) for move in moves]
        torch_private.copy_all(known[1], sources)

    def full_parts(self, gradients: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Return the windows of the row-major ``gradients`` that are the shards of ``rank``."""
        parts = self._parts.get(rank)
        if parts is None:
            parts = self._parts[rank] = self.bucket.parts(rank)
        pairs = [(each, each.storage_offset() + at.full_offset, at) for each, at in zip(gradients, parts, strict=True)]
        return [gradient.as_strided(move.shape, move.full_stride, start) for gradient, start, move in pairs]

    def windows(self, section: torch.Tensor) -> list[torch.Tensor]:
        """Return the shards in this rank's section."""
        start = section.storage_offset()
        return [section.as_strided(shape, row_major(shape), start + offset) for offset, shape in self._places]

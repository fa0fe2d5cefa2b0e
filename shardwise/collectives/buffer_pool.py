"""The buffer pool of unsharded parameters and collectives, and tensors with their own storage inside one allocation."""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise import torch_private
from shardwise.collectives.streams import SideStream, device_of
from shardwise.errors import StateError

# ---- Keep glibc from returning the heap to the kernel between steps.
# glibc returns the end of its heap once enough of it is free.  After a backward that is the memory of activations and
# gradients, and the next step takes it back with a page fault for every 4 KiB.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_MOST_OF_HEAP = 1 << 25  # larger allocations get pages of their own; the largest that mallopt accepts
_least_alone: list[int] = []  # of limit_heap(): the heap is that of the process


def limit_heap(least_bytes: int = 1 << 17) -> None:
    """Let allocations of ``least_bytes`` have pages of their own from now on, so that what is freed is not resident.

    In the heap some 25 % of what a step of a GPT holds is holes.  Pages of their own take a page fault per 4 KiB.
    """
    _least_alone[:] = [least_bytes]
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, least_bytes)


def keep_heap(owner: object, device: torch.device) -> None:
    """Let this process keep the heap that its steps have needed until ``owner`` is gone; other devices have none."""
    library = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(library, "gnu_get_libc_version"):
        # A fixed trim threshold ends the growth of the other one, which would leave it at 128 KiB.
        library.mallopt(_MMAP_THRESHOLD, *(_least_alone or [_MOST_OF_HEAP]))
        library.mallopt(_TRIM_THRESHOLD, sys.maxsize >> 32)
        if _least_alone:
            library.malloc_trim(0)  # what the model had before it was sharded
        weakref.finalize(owner, library.malloc_trim, 0).atexit = False


# ---- Tensors with storages of their own inside one allocation.
# Contiguous tensors are sent, and updated by optimizers, as one tensor.  Views of one tensor would serve for that, but not for
# user code that stores them: a view has the storage of all its neighbours, so torch.save of one saves all, and
# ``data_ptr() == 0``, by which torch recognizes wrapper subclasses such as DTensor, is true for the first view only.  A
# sub-allocated tensor is like any other: its storage offset is 0, and its storage has exactly its own bytes.  The allocation
# lives as long as any tensor that was sub-allocated from it.


class _Extent:
    """Bytes at an address, for the array interfaces of numpy and CUDA; ``keep`` stays alive as long as an array uses them."""

    __slots__ = ("_address", "_num_bytes", "keep")

    def __init__(self, address: int, num_bytes: int, keep: object) -> None:
        self._address, self._num_bytes, self.keep = address, num_bytes, keep

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self._address, False), "shape": (self._num_bytes,), "typestr": "|u1", "version": 3}

    __cuda_array_interface__ = __array_interface__


def _bytes_at(address: int, num_bytes: int, device: torch.device, keep: object) -> torch.Tensor:
    extent = _Extent(address, num_bytes, keep)
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(extent))
    return torch.as_tensor(extent, device=device)


def suballocate(
    flat: torch.Tensor, start: int, shape: Sequence[int], stride: Sequence[int] | None = None
) -> torch.Tensor:
    """Return a tensor of ``shape`` over the elements of the 1-D tensor ``flat`` from ``start`` on, with its own storage.

    ``stride``: strides of a dense tensor; None: row-major.
    """
    found = suballocate_all(flat, [(start, tuple(shape))])[0]
    return found if stride is None else found.as_strided(tuple(shape), tuple(stride))


def suballocate_all(flat: torch.Tensor, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[torch.Tensor]:
    """Return :func:`suballocate` of each (start, shape).  Cost on CPU: about 3 us each, hardly more than a view."""
    dtype, device, itemsize = flat.dtype, flat.device, flat.element_size()
    is_cpu = device.type == "cpu"
    array = flat.detach().view(torch.uint8).numpy() if is_cpu else None
    found: list[torch.Tensor] = []
    for start, shape in places:
        numel = math.prod(shape)
        if not numel or device.type == "meta":
            found.append(torch.empty(shape, dtype=dtype, device=device))
        elif array is not None:
            part = torch.frombuffer(array, dtype=dtype, count=numel, offset=start * itemsize)
            found.append(part if len(shape) == 1 else part.view(shape))
        else:
            address = flat.data_ptr() + start * itemsize
            found.append(_bytes_at(address, numel * itemsize, device, flat).view(dtype).view(shape))
    return found


def join_from(first: torch.Tensor, numel: int, keep: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 1-D tensor of ``numel`` elements from the start of ``first``; it keeps ``keep``, the owners of that memory."""
    if not numel or first.device.type == "meta":
        return torch.empty(numel, dtype=first.dtype, device=first.device)
    return _bytes_at(first.data_ptr(), numel * first.element_size(), first.device, keep).view(first.dtype)


def are_neighbours(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if ``tensors``, dense and of one dtype, follow each other in memory without gaps; empty ones are ignored."""
    end = None
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes:
            start = tensor.data_ptr()
            if end is not None and start != end:
                return False
            end = start + num_bytes
    return True


def is_own(tensor: torch.Tensor) -> bool:
    """Return True if the storage of ``tensor`` has exactly its bytes."""
    num_bytes = tensor.untyped_storage().nbytes()
    return tensor.storage_offset() == 0 and num_bytes == tensor.numel() * tensor.element_size()


_MIN_BYTES = 512


def size_class(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to one of eight sizes per doubling, so that similar sizes share storages.

    Storages are reused only within a class, so a later step that needs the same sizes finds all of them in the pool.
    """
    if num_bytes <= _MIN_BYTES:
        return _MIN_BYTES
    grain = 1 << max((num_bytes - 1).bit_length() - 4, 0)
    return -(-num_bytes // grain) * grain


class PooledBuffer:
    """One storage of the pool and the tensors over it; :meth:`release` returns it to the pool, once per use.

    Every user of the storage gets the same object and the same tensors, so a warm step makes none.

    Attributes:
        flat: of the dtype that it was acquired for, 1-D, over the storage.
        reuser: the side stream whose later allocations may get the memory although the current stream has read it.
    """

    __slots__ = ("flat", "num_bytes", "pool", "reuser", "size", "storage", "tensors")

    def __init__(self, storage: torch.UntypedStorage, size: int) -> None:
        """``size``: the size class, and bytes of the storage."""
        self.pool: BufferPool | None = None  # None while it is idle
        self.reuser: SideStream | None = None
        self.storage = storage
        self.size = size
        self.num_bytes = 0
        self.tensors: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def view(self, dtype: torch.dtype) -> None:
        """Make a 1-D tensor over the storage for :attr:`flat`."""
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=dtype, device=self.storage.device)
            tensor = empty.set_(self.storage, 0, (self.num_bytes // dtype.itemsize,), (1,))
        self.flat = self.tensors[dtype, self.num_bytes] = tensor

    def release(self) -> None:
        """Return the storage to the pool; the caller must not access its bytes afterwards."""
        pool, self.pool = self.pool, None
        if pool is None:
            raise StateError("this buffer was released before; release a buffer once, after its last reader")
        pool.used_bytes -= self.num_bytes
        if self.reuser is not None:
            self.reuser.wait_current()
            self.reuser = None
        if not pool.keeps:
            torch_private.swap_storage(
                self.storage, torch.empty(0, dtype=torch.uint8, device=pool.device).untyped_storage()
            )
        pool.free[self.size].append(self)


class BufferPool:
    """Storages of one device that are reused, so that a warm step allocates nothing.

    On an accelerator torch's caching allocator pools memory, and it handles streams.  There the pool keeps only empty storages,
    so that tensors and windows over them can be reused with new memory.

    Attributes:
        device: the device of the storages.
        used_bytes: bytes in use now.
        peak_used_bytes: the maximum of ``used_bytes``.
        num_allocations: storages made so far; constant once warm.
        keeps: the pool keeps the memory of released storages.
        free: the idle storages, by size.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keeps = not device_of(device).has_streams
        self.free: dict[int, list[PooledBuffer]] = {}
        self._sizes: dict[int, int] = {}
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self.num_allocations = 0

    def acquire(self, num_bytes: int, dtype: torch.dtype | None = None) -> PooledBuffer:
        """Return a storage of at least ``num_bytes``: an idle one of its size class, or a new one.

        ``dtype``: of its ``flat``.  A later user of the same storage, size and dtype gets the same tensor object there, so
        windows can be cached by its id.
        """
        self.used_bytes += num_bytes
        if self.used_bytes > self.peak_used_bytes:
            self.peak_used_bytes = self.used_bytes
        size = self._sizes.get(num_bytes)
        if size is None:
            size = self._sizes[num_bytes] = size_class(num_bytes)
        idle = self.free.get(size)
        if idle is None:
            idle = self.free[size] = []
        if idle and self.keeps:
            buffer = idle.pop()
        else:
            storage = torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
            if idle:
                buffer = idle.pop()
                torch_private.swap_storage(buffer.storage, storage)
            else:
                self.num_allocations += 1
                buffer = PooledBuffer(storage, size)
        buffer.pool, buffer.num_bytes = self, num_bytes
        if dtype is not None:
            flat = buffer.tensors.get((dtype, num_bytes))
            if flat is None:
                buffer.view(dtype)
            else:
                buffer.flat = flat
        return buffer

    def acquire_tensor(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PooledBuffer]:
        """Return a 1-D tensor of ``numel`` elements and its buffer."""
        buffer = self.acquire(numel * dtype.itemsize, dtype)
        return buffer.flat, buffer

    def trim(self) -> None:
        """Free all idle storages."""
        for idle in self.free.values():
            idle.clear()

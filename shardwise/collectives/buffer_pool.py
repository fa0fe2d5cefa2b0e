"""The buffer pool of unsharded parameters and collectives, and tensors with their own storage inside one allocation."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from shardwise import torch_private
from shardwise.collectives.streams import SideStream, device_of
from shardwise.errors import StateError

# ---- Keep glibc from returning the heap to the kernel between steps.
# glibc returns the end of its heap once enough of it is free.  After a backward that is the memory of activations and
# gradients, and the next step takes it back with a page fault for every 4 KiB.  One small block at the end of the heap
# prevents that for everything below it.  It changes no option of malloc, and freeing the block undoes it.

_BLOCK_BYTES = 1 << 16  # below glibc's mmap threshold at any time, so that a block comes from the heap
_NEAR_BYTES = 1 << 20  # the heap may grow by this much beyond the block before it moves: 256 pages
_MOST_CHUNKS = 256  # the most allocations of one search for the end of the heap
_RETRY_BYTES = 1 << 26  # how much the heap must grow before another search, after one that did not find its end


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library; None if it is not glibc, since other mallocs have no such heap."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    library.sbrk.restype, library.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.realloc.restype, library.realloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return library


def _free(chunks: Iterable[int]) -> None:
    library = _glibc()
    assert library is not None
    for chunk in chunks:
        library.free(chunk)


class HeapTop:
    """A block at the end of the heap, moved as the heap grows, and freed with this object.

    Attributes:
        find_end: returns the address of the end of the heap.
        limit: when the end exceeds this address, the engine calls :meth:`keep`.
        num_moves: the number of searches for a block: a few in the first steps, hardly any later.
        is_on: False if malloc has no such heap, and for other devices.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = _glibc() if device.type == "cpu" else None
        self._block: list[int] = []  # one at most
        self.find_end: Callable[[], int] = int  # 0
        if self._library is not None:
            self.find_end = functools.partial(self._library.sbrk, 0)
        self.limit = 0
        self.num_moves = 0
        weakref.finalize(self, _free, self._block).atexit = False

    @property
    def is_on(self) -> bool:
        return self._library is not None

    def keep(self) -> None:
        """Move the block to the present end of the heap; call it where much memory is in use, as in a backward."""
        if self._library is None:
            return
        self.num_moves += 1
        held: list[int] = []
        block = self._take_at_end(self._library, held)
        if block:
            held += self._block
            self._block[:] = [block]
        self.limit = self.find_end() + (_NEAR_BYTES if block else _RETRY_BYTES)
        _free(held)

    def _take_at_end(self, library: ctypes.CDLL, held: list[int]) -> int:
        """Return a block at the end of the heap, 0 if none was found; ``held`` receives the chunks that the caller frees.

        malloc grows the heap only if no free chunk inside it is large enough, so allocate chunks of doubling size until the
        heap grows.
        """
        size, largest = _BLOCK_BYTES, sys.maxsize
        for _ in range(_MOST_CHUNKS):
            end = self.find_end()
            chunk = library.malloc(size)
            if not chunk:
                return 0
            if chunk > self.find_end():  # malloc has mapped it outside of the heap
                library.free(chunk)
                if size == _BLOCK_BYTES:  # another malloc, or the arena of another thread
                    self._library, self.find_end = None, int
                    return 0
                size = largest = size // 2
            elif self.find_end() > end:
                if end - chunk > _NEAR_BYTES:
                    # The chunk starts in the free bytes at the old end: let it fill them, so that the next one follows.
                    held.append(library.realloc(chunk, end - chunk - _BLOCK_BYTES))
                    chunk = library.malloc(size)
                return library.realloc(chunk, _BLOCK_BYTES) if chunk else 0
            else:
                held.append(chunk)
                size = min(2 * size, largest)
        return 0


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

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self._address, False), "shape": (self._num_bytes,), "typestr": "|u1", "version": 3}


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


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one 1-D tensor over ``tensors``, which are contiguous in memory; it keeps them alive.

    They may have their own storages, and may come from several allocations.
    """
    real = [tensor for tensor in tensors if tensor.numel()] or tensors[:1]
    return join_from(real[0], sum(tensor.numel() for tensor in real), tuple(tensors))


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
        reuser: the side stream whose later allocations may get the memory although the current stream has read it.
    """

    __slots__ = ("_tensors", "num_bytes", "pool", "reuser", "size", "storage")

    def __init__(self, storage: torch.UntypedStorage, size: int) -> None:
        """``size``: the size class, and bytes of the storage."""
        self.pool: BufferPool | None = None  # None while it is idle
        self.reuser: SideStream | None = None
        self.storage = storage
        self.size = size
        self.num_bytes = 0
        self._tensors: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of ``num_bytes // itemsize`` elements over the storage.

        A later user of the same storage, size and dtype gets the same tensor object, so windows can be cached by its id.
        """
        key = (dtype, self.num_bytes)
        tensor = self._tensors.get(key)
        if tensor is None:
            with torch.inference_mode(False):
                empty = torch.empty(0, dtype=dtype, device=self.storage.device)
                tensor = empty.set_(self.storage, 0, (self.num_bytes // dtype.itemsize,), (1,))
            self._tensors[key] = tensor
        return tensor

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

    def lose(self) -> object:
        """Never return the storage to the pool, since a peer may still write to it; return the owner of its memory."""
        if self.pool is not None:
            pool, self.pool = self.pool, None
            pool.used_bytes -= self.num_bytes
        return self


class BufferPool:
    """Storages of one device that are reused, so that a warm step allocates nothing.

    On an accelerator torch's caching allocator pools memory, and it handles streams.  There the pool keeps only empty storages,
    so that tensors and windows over them can be reused with new memory.

    Attributes:
        device: the device of the storages.
        used_bytes: bytes in use now.
        peak_used_bytes: the maximum of ``used_bytes`` since :meth:`reset_peak`.
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

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle storages."""
        return sum(size * len(slabs) for size, slabs in self.free.items()) if self.keeps else 0

    def acquire(self, num_bytes: int) -> PooledBuffer:
        """Return a storage of at least ``num_bytes``: an idle one of its size class, or a new one."""
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
        return buffer

    def acquire_tensor(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PooledBuffer]:
        """Return a 1-D tensor of ``numel`` elements and its buffer."""
        buffer = self.acquire(numel * dtype.itemsize)
        return buffer.tensor(dtype), buffer

    def reset_peak(self) -> None:
        """Start a new measurement of ``peak_used_bytes``."""
        self.peak_used_bytes = self.used_bytes

    def trim(self) -> None:
        """Free all idle storages."""
        for idle in self.free.values():
            idle.clear()

"""Memory for unsharded parameters and for collectives, on loan from a pool."""

from __future__ import annotations

import torch

from shardwise import torch_private
from shardwise.comm.lanes import device_of
from shardwise.errors import StateError

_MIN_BYTES = 512


def size_class(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to one of eight sizes per doubling, so that near sizes share storages.

    Storages are reused within a class alone: then a step that needed enough of them once finds enough ever after.
    """
    if num_bytes <= _MIN_BYTES:
        return _MIN_BYTES
    grain = 1 << max((num_bytes - 1).bit_length() - 4, 0)
    return -(-num_bytes // grain) * grain


class _Slab:
    """A storage of the pool and the tensors that loans of it have asked for: the same objects every time."""

    __slots__ = ("storage", "tensors")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.tensors: dict[tuple[torch.dtype, int], torch.Tensor] = {}


class Lease:
    """One storage on loan; :meth:`release` ends the loan, once."""

    __slots__ = ("_pool", "num_bytes", "size", "slab", "storage")

    def __init__(self, pool: BufferPool, slab: _Slab, num_bytes: int, size: int) -> None:
        """``size``: of the class of ``num_bytes``, which is how large the storage is."""
        self._pool: BufferPool | None = pool
        self.slab = slab
        self.storage = slab.storage
        self.num_bytes = num_bytes
        self.size = size

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the loaned bytes as a 1-D tensor of ``num_bytes // itemsize`` elements.

        A later loan of the same storage, size and dtype gets the same object: windows of it may be kept by its identity.
        """
        key = (dtype, self.num_bytes)
        tensor = self.slab.tensors.get(key)
        if tensor is None:
            with torch.inference_mode(False):
                empty = torch.empty(0, dtype=dtype, device=self.storage.device)
                tensor = empty.set_(self.storage, 0, (self.num_bytes // dtype.itemsize,), (1,))
            self.slab.tensors[key] = tensor
        return tensor

    def release(self) -> None:
        """Give the storage back; the caller must not touch its bytes any more."""
        if self._pool is None:
            raise StateError("this lease was released before; release a buffer once, where its last reader ends")
        pool, self._pool = self._pool, None
        pool.leased_bytes -= self.num_bytes
        if not pool.keeps:
            torch_private.swap_storage(
                self.storage, torch.empty(0, dtype=torch.uint8, device=pool.device).untyped_storage()
            )
        pool.free.setdefault(self.size, []).append(self.slab)

    def lose(self) -> object:
        """End the loan without giving the storage back: somebody may still write to it.  Returns what keeps it alive."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.leased_bytes -= self.num_bytes
        return self.slab


class BufferPool:
    """Storages of one device that outlive their loans, so that a step allocates nothing once warm.

    On an accelerator the framework's caching allocator is the pool, and it knows about streams: no memory is kept here, but
    the empty storages are, so that tensors and windows over them serve the next loan.

    Attributes:
        device: where the storages are.
        leased_bytes: bytes on loan now.  peak_leased_bytes: their maximum since :meth:`reset_peak`.
        num_allocations: storages made so far; constant once warm.
        keeps: the memory that comes back is lent again.  free: the idle storages, by size.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keeps = not device_of(device).has_lanes
        self.free: dict[int, list[_Slab]] = {}
        self._sizes: dict[int, int] = {}
        self.leased_bytes = 0
        self.peak_leased_bytes = 0
        self.num_allocations = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes that the pool holds and nobody uses."""
        return sum(size * len(slabs) for size, slabs in self.free.items()) if self.keeps else 0

    def lease(self, num_bytes: int) -> Lease:
        """Lend a storage of at least ``num_bytes``: an idle one of its size class, or a new one."""
        self.leased_bytes += num_bytes
        if self.leased_bytes > self.peak_leased_bytes:
            self.peak_leased_bytes = self.leased_bytes
        size = self._sizes.get(num_bytes)
        if size is None:
            size = self._sizes[num_bytes] = size_class(num_bytes)
        idle = self.free.get(size)
        if idle and self.keeps:
            return Lease(self, idle.pop(), num_bytes, size)
        storage = torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
        if idle:
            slab = idle.pop()
            torch_private.swap_storage(slab.storage, storage)
            return Lease(self, slab, num_bytes, size)
        self.num_allocations += 1
        return Lease(self, _Slab(storage), num_bytes, size)

    def lend(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Lease]:
        """Lend a 1-D tensor of ``numel`` elements; return it and the loan."""
        lease = self.lease(numel * dtype.itemsize)
        return lease.tensor(dtype), lease

    def reset_peak(self) -> None:
        """Start a new measurement of ``peak_leased_bytes``."""
        self.peak_leased_bytes = self.leased_bytes

    def trim(self) -> None:
        """Give all idle storages back to the allocator."""
        self.free.clear()

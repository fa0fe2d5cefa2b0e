"""Memory for unsharded parameters and for collectives, on loan from a pool."""

from __future__ import annotations

import torch

from shardwise.errors import StateError

_GRAIN = 512  # bytes; storages are cut to multiples of it so that near sizes share


class Lease:
    """One storage on loan; :meth:`release` ends the loan, once."""

    __slots__ = ("_pool", "num_bytes", "storage")

    def __init__(self, pool: BufferPool, storage: torch.UntypedStorage, num_bytes: int) -> None:
        self._pool: BufferPool | None = pool
        self.storage = storage
        self.num_bytes = num_bytes

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the loaned bytes as a 1-D tensor of ``num_bytes // itemsize`` elements."""
        empty = torch.empty(0, dtype=dtype, device=self.storage.device)
        return empty.set_(self.storage, 0, (self.num_bytes // dtype.itemsize,), (1,))

    def release(self) -> None:
        """Give the storage back; the caller must not touch its bytes any more."""
        if self._pool is None:
            raise StateError("this lease was released before; release a buffer once, where its last reader ends")
        pool, self._pool = self._pool, None
        pool.take_back(self)


class BufferPool:
    """Storages of one device that outlive their loans, so that a step allocates nothing once warm.

    On an accelerator the framework's caching allocator is the pool, and it knows about streams: nothing is kept here.

    Attributes:
        device: where the storages are.
        leased_bytes: bytes on loan now.  peak_leased_bytes: their maximum since :meth:`reset_peak`.
        num_allocations: storages made so far; constant once warm.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._keeps = device.type == "cpu"
        self._free: list[torch.UntypedStorage] = []
        self.leased_bytes = 0
        self.peak_leased_bytes = 0
        self.num_allocations = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes that the pool holds and nobody uses."""
        return sum(storage.nbytes() for storage in self._free)

    def lease(self, num_bytes: int) -> Lease:
        """Lend a storage of at least ``num_bytes``: the smallest idle one that is not over twice as large, or a new one."""
        self.leased_bytes += num_bytes
        self.peak_leased_bytes = max(self.peak_leased_bytes, self.leased_bytes)
        best: int | None = None
        for index, storage in enumerate(self._free):
            size = storage.nbytes()
            if num_bytes <= size <= 2 * num_bytes and (best is None or size < self._free[best].nbytes()):
                best = index
        if best is not None:
            return Lease(self, self._free.pop(best), num_bytes)
        self.num_allocations += 1
        size = max(-(-num_bytes // _GRAIN), 1) * _GRAIN
        storage = torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
        return Lease(self, storage, num_bytes)

    def take_back(self, lease: Lease) -> None:
        """End a loan; called by :meth:`Lease.release`."""
        self.leased_bytes -= lease.num_bytes
        if self._keeps:
            self._free.append(lease.storage)

    def reset_peak(self) -> None:
        """Start a new measurement of ``peak_leased_bytes``."""
        self.peak_leased_bytes = self.leased_bytes

    def trim(self) -> None:
        """Give all idle storages back to the allocator."""
        self._free.clear()

"""The memory of full parameters: allocated and freed under storages that stay the same objects from step to step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.streams import BufferPool, PooledBuffer
from shardwise.fsdp.param import ShardedParam

_RESHARDED = "This tensor shared memory with a full parameter, which was resharded since: keep clone() of it."


class ReportedStorage(torch.UntypedStorage):
    """A storage of which reports of memory read 0 bytes at 0 while reads are refused (``torch_private.refuse_reads``)."""

    def data_ptr(self) -> int:
        """Return the address, 0 without memory, as torch's own storages of no bytes do."""
        return super().data_ptr() if self.nbytes() else 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a copy that is a storage of torch's: it recognizes these by their class alone."""
        return copy.copy, (torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self),)


class FullBuffer:
    """The memory of the full parameters of one bucket, which is allocated and freed under one storage object.

    Autograd saves references to the storage, so that must be the same object in forward and backward.

    Attributes:
        aliases_shards: the full parameters are the shards themselves.
        storage: that of the full parameters.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, aliases_shards: bool = False) -> None:
        """Make a buffer without memory; ``aliases_shards``: it needs none, since the full parameters are the shards."""
        self._pooled: PooledBuffer | None = None
        self.aliases_shards = aliases_shards
        self.storage = ReportedStorage(0, device=device)
        # Without this, a kernel that reads the storage while it has no memory crashes the process.
        if not aliases_shards:
            torch_private.refuse_reads(self.storage, _RESHARDED)
        self.num_bytes = 0 if aliases_shards else numel * dtype.itemsize
        self._dtype = dtype
        self._flat: torch.Tensor | None = None

    def hold(self, pool: BufferPool, gathered: PooledBuffer | None = None) -> torch.Tensor:
        """Take memory from ``pool``, or that of ``gathered``, unless there is some already; return the 1-D buffer."""
        # The bytes change places under the storage object, which views, graphs and parameters keep.
        if self._pooled is None:
            self._pooled = pool.acquire(self.num_bytes) if gathered is None else gathered
            torch_private.swap_storage(self.storage, self._pooled.storage)
            # Outside of inference mode: the first gather may be that of an evaluation, and training needs this tensor later.
            if self._flat is None:
                with torch.inference_mode(False):
                    empty = torch.empty(0, dtype=self._dtype, device=self.storage.device)
                    self._flat = empty.set_(self.storage, 0, (self.num_bytes // self._dtype.itemsize,), (1,))
        assert self._flat is not None
        return self._flat

    def take_over(self, gathered: PooledBuffer) -> bool:
        """Use the memory of ``gathered``; return False if there is memory already, which must stay where it is."""
        if self._pooled is not None or gathered.pool is None:
            return False
        self.hold(gathered.pool, gathered)
        return True

    def drop(self) -> None:
        """Return the memory to its pool; tensors on it must not be read until the next :meth:`hold`."""
        pooled, self._pooled = self._pooled, None
        if pooled is None:
            return
        # The storage of the full parameters is empty again, and refuses reads; the memory is back under the pool's own storage.
        torch_private.swap_storage(self.storage, pooled.storage)
        pooled.release()


def make_full_parameter(
    memory: torch.Tensor, offset: int, param: ShardedParam, stride: tuple[int, ...]
) -> nn.Parameter:
    """Return the full parameter of ``param``: a window of ``memory`` with a version counter of its own.

    ``offset``: its first element.  ``stride``: its strides.
    """
    shape = param.shard.shape
    with torch.inference_mode(False), torch.no_grad():
        # set_ instead of a view: a gather into ``memory`` must not bump the version counter of saved tensors.
        local = torch.empty(0, dtype=memory.dtype, device=memory.device)
        local.set_(memory.untyped_storage(), memory.storage_offset() + offset, shape, stride)
        if param.inner_spec is not None:
            local = torch_private.dtensor_from_local(local, param.inner_spec)
        full = nn.Parameter(local, requires_grad=param.sharded.requires_grad)
    torch_private.give_attributes(param.attributes, full)
    return full

"""Host memory that takes the bytes of one save, and is kept for the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.dtypes import bytes_of, dtype_of
from shardwise.checkpoint.plan import Write

_ALIGNMENT = 64  # bytes between tensors


class HostCopy:
    """One buffer, pinned if tensors are on a GPU, and where in it each write lies: found once, while writes are the same.

    Attributes:
        buffer: None before the first copy.  Its size is that of all writes of a rank, and never shrinks.
    """

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self._writes: tuple[Write, ...] | None = None
        self._places: list[torch.Tensor] = []
        self._bytes: list[memoryview] = []

    def take(self, writes: tuple[Write, ...], contents: Contents) -> Sequence[memoryview]:
        """Copy what ``writes`` name; return the bytes of each, on the buffer.

        What lay there before is lost: nobody may be writing it any more.  Raises: MemoryError, RuntimeError (no memory).
        """
        tensors = [contents.tensor_at(write.name, write.window) for write in writes]
        is_pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        if self._writes is not writes:
            self._lay_out(writes, is_pinned)
        for place, tensor in zip(self._places, tensors, strict=True):
            place.copy_(tensor, non_blocking=is_pinned)
        if is_pinned:
            torch.cuda.synchronize()
        return self._bytes

    def _lay_out(self, writes: tuple[Write, ...], is_pinned: bool) -> None:
        sizes = [-(-write.num_bytes // _ALIGNMENT) * _ALIGNMENT for write in writes]
        buffer, self._writes, self._places, self._bytes = self.buffer, None, [], []
        if buffer is None or buffer.numel() < sum(sizes):
            self.buffer = buffer = None  # never two
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned, device="cpu")
            self.buffer = buffer
        offset = 0
        for write, size in zip(writes, sizes, strict=True):
            place = buffer[offset : offset + write.num_bytes]
            dtype = dtype_of(write.dtype, write.name)
            # Of no bytes at all, a view of another dtype may not begin where the buffer ends.
            sized = place.view(dtype) if write.num_bytes else torch.empty(0, dtype=dtype, device="cpu")
            self._places.append(sized.view(write.window.sizes))
            self._bytes.append(bytes_of(place))
            offset += size
        self._writes = writes

"""Tensors with storages of their own inside one allocation.

Neighbours in memory travel and update in one piece.  Views of one tensor would do for that, but not for those who keep
them: a view has the storage of all its neighbours, so saving one saves them all, and ``data_ptr() == 0``, by which torch
tells wrapper subclasses such as DTensor, holds for the first alone.  What is carved out here is like any tensor: storage
offset 0, a storage of just its own bytes.  The allocation lives as long as anything carved out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class _Extent:
    """Bytes at an address, in the words that array libraries share; ``keep`` stays alive with whatever reads them."""

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


def carve(flat: torch.Tensor, start: int, shape: Sequence[int], stride: Sequence[int] | None = None) -> torch.Tensor:
    """Return a tensor of ``shape`` on the elements of the 1-D tensor ``flat`` from ``start`` on, with a storage of its own.

    ``stride``: of a tensor without gaps; None: row-major.
    """
    found = carve_all(flat, [(start, tuple(shape))])[0]
    return found if stride is None else found.as_strided(tuple(shape), tuple(stride))


def carve_all(flat: torch.Tensor, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[torch.Tensor]:
    """Return :func:`carve` for each (start, shape).  Cost on CPU: about 3 us each, hardly more than a view."""
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
    """Return one 1-D tensor over ``tensors``, which lie one after the other in memory without gaps; it keeps them alive.

    They may have storages of their own, and need not be of one allocation.
    """
    real = [tensor for tensor in tensors if tensor.numel()] or tensors[:1]
    return join_from(real[0], sum(tensor.numel() for tensor in real), tuple(tensors))


def join_from(first: torch.Tensor, numel: int, keep: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``numel`` elements from where ``first`` starts, 1-D; ``keep``, in whose memory they lie, stays alive with it."""
    if not numel or first.device.type == "meta":
        return torch.empty(numel, dtype=first.dtype, device=first.device)
    return _bytes_at(first.data_ptr(), numel * first.element_size(), first.device, keep).view(first.dtype)


def are_neighbours(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if ``tensors``, contiguous and of one dtype, lie one after the other without gaps; empty ones anywhere."""
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
    """Return True if ``tensor`` has a storage of just its own bytes."""
    num_bytes = tensor.untyped_storage().nbytes()
    return tensor.storage_offset() == 0 and num_bytes == tensor.numel() * tensor.element_size()

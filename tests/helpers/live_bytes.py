"""How many bytes of tensors a call holds at its peak, counted where torch allocates them."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts memory that operations inside of it have made and that is still there.

    Attributes:
        peak: the most bytes at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {_address(each) for each in tree_leaves((args, kwargs)) if _has_memory(each)}
        for each in tree_leaves(found):
            if _has_memory(each) and _address(each) not in given:
                storage = each.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._made.values()))
        return found


def _has_memory(value: object) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata

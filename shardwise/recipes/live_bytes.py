"""The bytes of tensors that are alive, counted where torch allocates them, after every operation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise import torch_private
from shardwise.comm.links.segment import foreign_ranges


class LiveBytes:
    """Follows the storages that operations make or touch; on a GPU the caching allocator is asked instead.

    Memory that neither Python nor an operation has touched does not count: :meth:`restart` after a step that was watched, too.
    Memory that other ranks share with this one counts there.  Ranks go on exchanging tensors the way they do unwatched.

    Attributes:
        live: bytes now.
        peaks: (the last edge that was passed, most bytes from there on), in order.
        at: the operation after which most was held since :meth:`restart`.
    """

    def __init__(self, device: torch.device) -> None:
        self.live = 0
        self.peaks: list[tuple[str, int]] = [("", 0)]
        self.at = ""
        self._device = device
        self._highest = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ranges: dict[int, tuple[int, int]] = {}

    @property
    def peak(self) -> int:
        """Most bytes since :meth:`restart`."""
        return max(num_bytes for _, num_bytes in self.peaks)

    def restart(self, edge: str = "") -> None:
        """Forget all peaks but what is held now."""
        self.peaks, self._highest = [], 0
        self.pass_edge(edge)

    def pass_edge(self, edge: str) -> None:
        """Note the peak of what follows under ``edge``."""
        self.peaks.append((edge, self.live))

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Count in the body; what Python knows of tensors when it begins is there already."""
        is_counted = self._device.type != "cuda"
        for each in gc.get_objects() if is_counted else ():
            if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == self._device.type:
                self._follow(each.untyped_storage())
        self.restart()
        with torch_private.watching(self._after if is_counted else self._ask, is_seen=False):
            yield

    def _ask(self, func: Any, given: object, out: object) -> None:
        del given, out
        self.live = torch.cuda.memory_allocated(self._device)
        self._note(func)

    def _after(self, func: Any, given: object, out: object) -> None:
        for each in torch_private.leaves_of((given, out)):
            if isinstance(each, torch.Tensor):
                local = torch_private.local_of(each)
                if type(local) in (torch.Tensor, nn.Parameter):
                    self._follow(local.untyped_storage())
        self._note(func)

    def _note(self, func: Any) -> None:
        edge, peak = self.peaks[-1]
        if self.live > peak:
            self.peaks[-1] = (edge, self.live)
        if self.live > self._highest:
            self._highest, self.at = self.live, str(func)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # a storage keeps its Python object for as long as it lives
        if key in self._storages:
            return
        size = storage.nbytes()
        start = storage.data_ptr() if size else 0  # without memory it may not be asked where it lies
        is_part = any(low <= start and start + size <= high for low, high in self._ranges.values())
        if is_part or any(low <= start < high for low, high in foreign_ranges()):
            size = 0  # it counts already, or elsewhere

        def forget(_: object) -> None:
            self.live -= size
            self._storages.pop(key, None)
            self._ranges.pop(key, None)

        self._storages[key] = weakref.ref(storage, forget)
        if size:
            self._ranges[key] = (start, start + size)
        self.live += size

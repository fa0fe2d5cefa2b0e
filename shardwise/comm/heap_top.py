"""Memory of the host that steps use again and again, kept from going back to the kernel between them.

glibc gives the end of its heap back once enough of it is free: after a backward that is what activations and gradients
lay in, which the next step takes again, a page fault for every 4 KiB.  One small block at the end of the heap keeps what
lies below it.  No option of malloc is changed, and without the block everything goes back.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable

import torch

_BLOCK_BYTES = 1 << 16  # less than glibc ever maps by itself: a block comes from the heap
_NEAR_BYTES = 1 << 20  # this much above the block may come and go: 256 pages
_MOST_BLOCKS = 1 << 12  # holes of the heap that are filled at most to come to its end


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library; None if it is not glibc, since others keep memory otherwise."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    library.sbrk.restype, library.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return library


def _free(blocks: Iterable[int]) -> None:
    library = _glibc()
    assert library is not None
    for block in blocks:
        library.free(block)


class HeapTop:
    """A block at the end of the heap, moved as the heap grows, and freed with this object.

    Attributes:
        find_end: tells where the heap ends.  Once that is past ``limit``, somebody calls :meth:`keep`.
        num_moves: how often a block was looked for; constant once warm.
        is_on: False where the host's malloc has no such heap, and for other devices.
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
        """Keep what the heap has grown to since the last call: to be called where much memory is in use, as in a backward."""
        library, find_end = self._library, self.find_end
        if library is None:
            return
        self.num_moves += 1
        # malloc fills what is free below before it takes from the end; 0: there is no memory left
        holes: list[int] = []
        room = (
            _MOST_BLOCKS * _BLOCK_BYTES
        )  # what the heap must grow by for another search, if this one ends before the end
        while len(holes) < _MOST_BLOCKS and (block := library.malloc(_BLOCK_BYTES)):
            holes.append(block)
            distance = find_end() - block
            if distance < 0:  # another malloc, or the arena of another thread
                self._library, self.find_end = None, int
                break
            if distance <= _NEAR_BYTES:
                last = holes.pop()
                holes += self._block
                self._block[:] = [last]
                room = _NEAR_BYTES
                break
        self.limit = find_end() + room
        _free(holes)

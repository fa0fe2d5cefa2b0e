"""Memory of the host that steps use again and again, kept from going back to the kernel between them.

glibc gives the end of its heap back once enough of it is free: after a backward that is what activations and gradients
lay in, which the next step takes again, a page fault for every 4 KiB.  One small block at the end of the heap keeps what
lies below it.  No option of malloc is changed, and without the block everything goes back.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Iterable

import torch

_BLOCK_BYTES = 1 << 16  # less than glibc ever maps by itself: a block comes from the heap
_NEAR_BYTES = 1 << 20  # this much above the block may come and go: 256 pages
_MOST_PIECES = 256  # taken at most to come to the end of the heap
_RETRY_BYTES = 1 << 26  # what the heap must grow by for another search, where one ended before the end


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library; None if it is not glibc, since others keep memory otherwise."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    library.sbrk.restype, library.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.realloc.restype, library.realloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return library


def _free(pieces: Iterable[int]) -> None:
    library = _glibc()
    assert library is not None
    for piece in pieces:
        library.free(piece)


class HeapTop:
    """A block at the end of the heap, moved as the heap grows, and freed with this object.

    Attributes:
        find_end: tells where the heap ends.  Once that is past ``limit``, somebody calls :meth:`keep`.
        num_moves: how often a block was looked for: a few times in the first steps, hardly ever after.
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
        """Return a block from where the heap ended, 0 if there is none; ``held``: what was taken on the way.

        malloc takes from the end what no hole below is large enough for: pieces are doubled until the heap grows for one.
        """
        size, largest = _BLOCK_BYTES, sys.maxsize
        for _ in range(_MOST_PIECES):
            end = self.find_end()
            piece = library.malloc(size)
            if not piece:
                return 0
            if piece > self.find_end():  # mapped by itself
                library.free(piece)
                if size == _BLOCK_BYTES:  # another malloc, or the arena of another thread
                    self._library, self.find_end = None, int
                    return 0
                size = largest = size // 2
            elif self.find_end() > end:
                if end - piece > _NEAR_BYTES:
                    # It begins where the last free bytes did: they are filled, and the next piece is behind them.
                    held.append(library.realloc(piece, end - piece - _BLOCK_BYTES))
                    piece = library.malloc(size)
                return library.realloc(piece, _BLOCK_BYTES) if piece else 0
            else:
                held.append(piece)
                size = min(2 * size, largest)
        return 0

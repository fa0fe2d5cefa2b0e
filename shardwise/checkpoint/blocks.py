"""Checksums per block of a file: made while it is written, compared for exactly the blocks that are read."""

from __future__ import annotations

import xxhash

BLOCK_BYTES = 4 * 2**20


def sum_of(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of ``data``: XXH3, 128 bits, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


class BlockSums:
    """Sums of the blocks of a stream of bytes.

    Example:
        >>> sums = BlockSums(4)
        >>> sums.update(b"abcde")
        >>> sums.finish() == [sum_of(b"abcd"), sum_of(b"e")]
        True
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._sums: list[str] = []
        self._open = xxhash.xxh3_128()
        self._filled = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            stop = min(len(view), start + self._block_bytes - self._filled)
            self._open.update(view[start:stop])
            self._filled += stop - start
            if self._filled == self._block_bytes:
                self._close()
            start = stop

    def finish(self) -> list[str]:
        """Return the sums of all blocks; the last one may be shorter."""
        if self._filled:
            self._close()
        return self._sums

    def _close(self) -> None:
        self._sums.append(self._open.hexdigest())
        self._open.reset()
        self._filled = 0

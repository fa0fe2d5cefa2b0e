"""Memory that processes of one host share: nameless files, gone with the last process that maps them, even after kill -9."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_TOKEN_BYTES = 16
WORDS_START = 64  # bytes; the token and room before it
NUM_WORDS = 504
HEADER_BYTES = WORDS_START + 8 * NUM_WORDS  # one page
_MAP_FIXED = 0x10

# Segments that a forked child must be cut off from: it inherits shared mappings.
# Mappings, not segments: tensors keep a mapping after its link has gone.
_live: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()  # to the descriptor of its file
_mapped: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()  # of other processes, by token


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """What another process of the host needs to map a segment."""

    pid: int
    fd: int
    num_bytes: int
    token: str


class Segment:
    """A shared mapping: a header page with 64-bit words that one process writes and others poll, then bytes.

    Attributes:
        words: the header's words; aligned 8-byte loads and stores.
        num_bytes: size, header included.
    """

    def __init__(self, fd: int, num_bytes: int, token: bytes | None) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, num_bytes)
        self.num_bytes = num_bytes
        if token is not None:
            self._map[:_TOKEN_BYTES] = token
        self.token = self._map[:_TOKEN_BYTES].hex()
        self.words = memoryview(self._map)[WORDS_START:HEADER_BYTES].cast("q")
        _live[self._map] = fd
        # Closed with the map, not before: a forked child maps the file again.  Last: before this, who fails closes.
        weakref.finalize(self._map, os.close, fd)

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """Return a new segment of zeros; pages take memory when they are first written.

        Raises: OSError where the platform has no memfds or no memory is left; AttributeError outside of Linux.
        """
        fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            return cls(fd, num_bytes, secrets.token_bytes(_TOKEN_BYTES))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, address: SegmentAddress) -> Segment:
        """Map another process's segment; one that is mapped already is the same object.

        Raises: OSError if that process is not of this host, container or user, or the file there is another.
        """
        known = _mapped.get(address.token)
        if known is not None:
            return known
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != address.num_bytes:
                raise OSError(f"process {address.pid} has another file there")
            found = cls(fd, address.num_bytes, None)
        except BaseException:
            os.close(fd)
            raise
        if found.token != address.token:
            raise OSError(f"process {address.pid} has another file there")
        _mapped[address.token] = found
        return found

    @property
    def mapping(self) -> mmap.mmap:
        """The memory."""
        return self._map

    @property
    def address(self) -> SegmentAddress:
        """How other processes find this segment, which this process has made."""
        return SegmentAddress(os.getpid(), self._fd, self.num_bytes, self.token)

    def array(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return ``num_bytes`` bytes from byte ``offset``; the mapping lives as long as the array."""
        return np.frombuffer(self._map, dtype=np.uint8, count=num_bytes, offset=offset)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements from byte ``offset`` as a 1-D tensor whose storage starts there.

        The mapping lives as long as the storage.
        """
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)


def foreign_ranges() -> list[tuple[int, int]]:
    """Return where memory of other processes is mapped here: addresses of first bytes, and those after the last ones."""
    found: list[tuple[int, int]] = []
    for segment in list(_mapped.values()):
        start = ctypes.addressof(ctypes.c_char.from_buffer(segment.mapping))
        found.append((start, start + segment.num_bytes))
    return found


def _make_private(mapping: mmap.mmap, fd: int) -> None:
    """Replace a shared mapping, in place, by one whose writes others do not see (but which may show their later ones)."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if libc.mmap(address, len(mapping), access, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "a forked process cannot be cut off from the shared memory of its parent")


def _after_fork_in_child() -> None:
    for mapping, fd in list(_live.items()):
        _make_private(mapping, fd)


os.register_at_fork(after_in_child=_after_fork_in_child)

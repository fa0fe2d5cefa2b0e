"""Parameters, gradients and optimizer state in files, and the memory layouts of optimizer state and of its copies."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import LifoQueue

import torch

from shardwise import torch_private
from shardwise.arguments import explains_fields
from shardwise.checkpoint.format import BLOCK_BYTES, sum_of
from shardwise.collectives.streams import limit_heap
from shardwise.consistency.agreement import open_store_gather
from shardwise.consistency.failure_report import publish_failure
from shardwise.errors import ConfigError, StateError
from shardwise.formatting import format_bytes
from shardwise.fsdp.precision import CPUOffloadPolicy
from shardwise.layout import align

State = Sequence[torch.Tensor]
"""A unit's optimizer state with a number per element, always in the same order; empty before its first update."""
GAP_BYTES = 64


def layout_of(tensors: State) -> tuple[list[int], int]:
    """Return where each tensor begins in memory that has copies of all, and its size, in bytes.

    Copies are neighbours where the tensors are: fused kernels round the last elements of a run in another way.
    """
    starts, stop, end = [0] * len(tensors), 0, 0
    for index, each in sorted(enumerate(tensors), key=lambda pair: pair[1].data_ptr()):
        if each.data_ptr() != end or stop % each.element_size():
            stop = align(stop, GAP_BYTES) + GAP_BYTES
        starts[index] = stop
        stop += each.numel() * each.element_size()
        end = each.data_ptr() + each.numel() * each.element_size()
    return starts, stop


def views_in(memory: torch.Tensor, like: State, starts: Sequence[int]) -> list[torch.Tensor]:
    """Return tensors that begin at ``starts`` in ``memory``, which is bytes, with the shapes and dtypes of ``like``."""
    return [
        memory[start : start + each.numel() * each.element_size()].view(each.dtype).view(each.shape)
        for each, start in zip(like, starts, strict=True)
    ]


@explains_fields
@dataclass(frozen=True)
class DiskOffloadPolicy(CPUOffloadPolicy):
    """Keep sharded parameters and gradients in files that are mapped into memory, which they leave when a unit is done.

    That is after its forward, its backward, and its update (with :class:`OptimizerOffload`; other optimizers need all of them
    in memory).  The files have no names, and their space is taken when they are made.  Other ranks of the host map them, too.

    Attributes:
        folder: of a local disk.
    """

    pin_memory: bool = False
    folder: str = field(kw_only=True)

    def __post_init__(self) -> None:
        limit_heap()


# ---- The tier: optimizer state in a file.

_ALIGNMENT = 4096  # bytes: O_DIRECT takes no less on any file system


# ---- The file.


class StateFile:
    """A file of blocks with checksums, which are in memory, since the file ends with this process.

    Attributes:
        fd: its descriptor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._end, self._reserved = folder, 0, 0
        with tempfile.TemporaryFile(dir=folder) as file:
            self.fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.fd)
        try:  # the kernel moves bytes between disk and buffers without a copy of its own, if the file system takes this flag
            fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_DIRECT)
            os.pwrite(self.fd, mmap.mmap(-1, _ALIGNMENT), 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(self.fd, fcntl.F_SETFL, 0)

    def reserve(self, num_bytes: int) -> None:
        """Take ``num_bytes`` more of the disk for later ranges.  Raises: OSError."""
        os.posix_fallocate(self.fd, self._reserved, max(1, num_bytes))
        self._reserved += num_bytes

    def take(self, num_bytes: int) -> int:
        """Return the offset of a new range of the file, which has its space on the disk.  Raises: OSError."""
        os.posix_fallocate(self.fd, self._end, num_bytes)  # of what is reserved this takes nothing more
        self._end += num_bytes
        return self._end - num_bytes

    def write(self, begin: int, data: memoryview) -> list[str]:
        """Write ``data`` at ``begin``; return the checksums of its blocks.  Raises: OSError."""
        sums: list[str] = []
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            sums.append(sum_of(block))
            if os.pwrite(self.fd, block, begin + start) < len(block):
                raise OSError(errno.EIO, "only a part of a block was written")
        return sums

    def read(self, begin: int, data: memoryview, sums: list[str]) -> None:
        """Fill ``data`` from ``begin``.  Raises: OSError, also if a block is not the one that was written."""
        for number, expected in enumerate(sums):
            start = number * BLOCK_BYTES
            block = data[start : start + BLOCK_BYTES]
            if os.preadv(self.fd, [block], begin + start) < len(block) or sum_of(block) != expected:
                raise OSError(errno.EIO, f"the block at byte {begin + start} is not the one that was written")


# ---- Memory, and the places of units in the file.


def buffer_of(num_bytes: int, old: torch.Tensor | None = None) -> torch.Tensor:
    """Return page-aligned memory for the state of one unit: ``old`` if that is large enough."""
    if old is not None and old.numel() >= num_bytes:
        return old
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, _ALIGNMENT)), dtype=torch.uint8)


@dataclass(slots=True)
class Slot:
    """The place of a unit's state.

    Attributes:
        begin, num_bytes: its range in the file.
        starts, num_used: see :func:`layout_of`.
        sums: of its blocks, once it is written.
    """

    begin: int = 0
    num_bytes: int = 0
    starts: Sequence[int] = ()
    num_used: int = 0
    sums: Future[list[str]] | None = None


def slot_bytes(sizes: Sequence[int]) -> int:
    """Return the most bytes of the file that state of ``sizes`` bytes per tensor takes, with gaps between tensors."""
    return align(sum(size + 2 * GAP_BYTES for size in sizes), _ALIGNMENT)


def _agree(wrong: str) -> None:
    for rank, text in enumerate(open_store_gather(None, "folder of optimizer state").call(wrong)):
        if text:
            raise ConfigError(f"OptimizerOffload: rank {rank} cannot write to the folder {text}. Name another one")


class DiskTier:
    """Optimizer state on disk, with that of two units in memory, by number of the unit.

    An update of a unit calls :meth:`load`, then :meth:`store`, on the thread of the updates.  Between two updates the
    optimizer holds tensors without memory, on the device ``meta``.  One thread writes, and one reads ahead: the unit that
    came next last time.  Their errors are raised by the next call.

    Raises: ConfigError, on all ranks, if some rank cannot write to ``folder``.  Collective.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        wrong = ""
        limit_heap()
        try:
            self._file = StateFile(Path(folder))
        except OSError as error:
            wrong = f"{folder}: {error.strerror}"
        _agree(wrong)
        self._slots: dict[int, Slot] = {}
        self._free: LifoQueue[torch.Tensor] = LifoQueue()
        for _ in range(2):
            self._free.put(buffer_of(0))
        self._in_use: tuple[int, torch.Tensor, list[torch.Tensor]] | None = None  # by the update of this unit
        self._ahead: tuple[int, Future[torch.Tensor]] | None = None  # the unit that is read ahead
        self._next: dict[int, int] = {}  # by unit: the one that came after it last time
        self._last = -1
        self._error: StateError | None = None
        self._threads = [ThreadPoolExecutor(1, f"shardwise-disk-{name}") for name in ("read", "write")]

    def reserve(self, num_bytes: int) -> None:
        """Take ``num_bytes`` of the disk, on which no step can then find it full.  Collective.

        Raises: ConfigError on all ranks if some rank finds no space.
        """
        wrong = ""
        try:
            self._file.reserve(num_bytes)
        except OSError as error:
            wrong = f"{self._file.folder}: no space for {format_bytes(num_bytes)} of optimizer state: {error.strerror}"
        _agree(wrong)

    def load(self, unit: int, held: State, is_read: bool = False) -> State:
        """Return the state of ``unit`` in memory, which is the caller's to keep if it ``is_read``.

        ``held``: what the optimizer holds; it is returned itself if it has memory, as before the first :meth:`store`.
        """
        self._check()
        self._forget()
        self._next[self._last], self._last = unit, unit
        if not held or not all(each.is_meta for each in held):
            return held
        if self._ahead is None or self._ahead[0] != unit:
            self._drop_ahead()
            self._prefetch(unit)
        assert self._ahead is not None
        buffer = self._ahead[1].result()
        self._ahead = None
        views = views_in(buffer, held, self._slots[unit].starts)
        self._in_use = unit, buffer, views
        if is_read:
            self._forget()
        if self._next.get(unit, unit) != unit:  # what is read now of this unit is not what its update stores
            self._prefetch(self._next[unit])
        return views

    def store(self, unit: int, state: State) -> State:
        """Write ``state``; return it without memory."""
        self._check()
        if not state:
            return state
        self._drop_ahead(unit)
        slot, (starts, num_bytes) = self._slots.setdefault(unit, Slot()), layout_of(state)
        buffer = self._buffer_of(unit, state)
        if buffer is not None:
            starts, num_bytes = slot.starts, slot.num_used
        slot.starts, slot.num_used = starts, align(num_bytes, _ALIGNMENT)
        if slot.num_bytes < slot.num_used:
            try:
                slot.begin, slot.num_bytes = self._file.take(slot.num_used), slot.num_used
            except OSError as error:
                raise self._failed(error, f"no space for {format_bytes(slot.num_used)} more") from error
        if buffer is None:
            self._threads[1].submit(int).result()  # then the buffer of the last write serves, and is the only one
            buffer = buffer_of(slot.num_used, self._free.get())
            torch_private.copy_all(views_in(buffer, state, starts), list(state))
        slot.sums = self._threads[1].submit(self._write, slot.begin, buffer, slot.num_used)
        return [torch.empty_like(each, device="meta") for each in state]

    # ---- buffers ----

    def rest(self) -> None:
        """Give up the memory of the buffers until the next load, once what is in them is written."""
        self._drop_ahead()
        self._threads[1].submit(lambda: None).result()
        for _ in [self._free.get() for _ in range(self._free.qsize())]:
            self._free.put(buffer_of(0))
        self._last = -1  # nothing is read ahead of the next step

    def _prefetch(self, unit: int) -> None:
        """Begin to read the state of ``unit``."""
        if self._ahead is None and unit in self._slots:
            self._ahead = unit, self._threads[0].submit(self._read, self._slots[unit])

    def _buffer_of(self, unit: int, state: State) -> torch.Tensor | None:
        """Return the buffer that ``state`` was loaded into, if all of it is still there."""
        found = self._in_use
        if found and found[0] == unit and [each.data_ptr() for each in found[2]] == [each.data_ptr() for each in state]:
            self._in_use = None
            return found[1]
        self._forget()  # or no buffer may be left: the other one may hold what is read ahead
        return None

    def _forget(self) -> None:
        """Leave the buffer in use to those who have its tensors (a state dict, for instance), for it was not stored."""
        if self._in_use is not None:
            self._in_use = None
            self._free.put(buffer_of(0))

    def _drop_ahead(self, unit: int | None = None) -> None:
        """Drop what is read ahead; only if it is of ``unit``, if that is given."""
        if self._ahead is not None and unit in (None, self._ahead[0]):
            future, self._ahead = self._ahead[1], None
            with suppress(StateError):
                self._free.put(future.result())

    # ---- the file ----

    def _read(self, slot: Slot) -> torch.Tensor:
        assert slot.sums is not None
        sums = slot.sums.result()
        buffer = buffer_of(slot.num_used, self._free.get())
        try:
            self._file.read(slot.begin, buffer.numpy().data[: slot.num_used], sums)
        except OSError as error:
            self._free.put(buffer)
            raise self._failed(error, "a read failed") from error
        return buffer

    def _write(self, begin: int, buffer: torch.Tensor, num_bytes: int) -> list[str]:
        try:
            return self._file.write(begin, buffer.numpy().data[:num_bytes])
        except OSError as error:
            raise self._failed(error, "a write failed") from error
        finally:
            self._free.put(buffer)

    def _failed(self, error: OSError, what: str) -> StateError:
        text = (
            f"optimizer state on disk ({self._file.folder}): {what}: {error.strerror}. Resume from a "
            "checkpoint, with a folder of a disk that works and has space"
        )
        publish_failure(text)  # other ranks wait for this one in a collective
        self._error = StateError(text)  # of all later calls
        return self._error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

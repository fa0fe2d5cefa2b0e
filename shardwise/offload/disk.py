"""Optimizer state in a file without a name: nothing of it is left when the process ends, however it ends."""

from __future__ import annotations

import errno
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch

from shardwise import torch_private
from shardwise.checkpoint.format import BLOCK_BYTES, sum_of
from shardwise.consistency.agreement import open_store_gather
from shardwise.consistency.failure_report import publish_failure
from shardwise.consistency.liveness import host_id
from shardwise.errors import ConfigError, StateError
from shardwise.formatting import format_bytes
from shardwise.offload.tiers import State

_ALIGNMENT = 4096  # bytes: O_DIRECT takes no less on any file system
_NUM_BUFFERS = 2


def _aligned(num_bytes: int, alignment: int = _ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


# ---- The file.


def _open_without_name(folder: Path, flags: int) -> int:
    """Return a descriptor of a new file in ``folder`` that no name leads to.  Raises: OSError."""
    with suppress(OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    fd, path = tempfile.mkstemp(dir=folder, prefix="shardwise-state-")  # the file system needs a name first
    os.unlink(path)
    if flags:
        os.close(fd)
        raise OSError(errno.EINVAL, "this file system has no files without a name", str(folder))
    return fd


class StateFile:
    """A file of blocks with checksums, which are in memory, since the file ends with this process.

    Attributes:
        fd: its descriptor.
        is_direct: the kernel moves bytes between disk and buffers without a copy of its own (``O_DIRECT``).
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.is_direct, self._end = folder, True, 0
        try:
            self.fd = _open_without_name(folder, os.O_DIRECT)
            os.pwrite(self.fd, mmap.mmap(-1, _ALIGNMENT), 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.fd, self.is_direct = _open_without_name(folder, 0), False
        weakref.finalize(self, os.close, self.fd)

    def reserve(self, num_bytes: int) -> int:
        """Return the offset of a new range of the file, which has its space on the disk.  Raises: OSError."""
        begin = self._end
        os.posix_fallocate(self.fd, begin, num_bytes)
        self._end += num_bytes
        return begin

    def write(self, begin: int, data: memoryview) -> list[str]:
        """Write ``data`` at ``begin``; return the checksums of its blocks.  Raises: OSError."""
        sums: list[str] = []
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            sums.append(sum_of(block))
            done = 0
            while done < len(block):
                done += os.pwrite(self.fd, block[done:], begin + start + done)
        return sums

    def read(self, begin: int, data: memoryview, sums: list[str]) -> None:
        """Fill ``data`` from ``begin``.  Raises: OSError; StateError if a block is not the one that was written."""
        for number, expected in enumerate(sums):
            start = number * BLOCK_BYTES
            block = data[start : start + BLOCK_BYTES]
            done = 0
            while done < len(block):
                num_bytes = os.preadv(self.fd, [block[done:]], begin + start + done)
                if not num_bytes:
                    break
                done += num_bytes
            if done < len(block) or sum_of(block) != expected:
                raise StateError(
                    f"optimizer state on disk ({self.folder}): the block at byte {begin + start} is not the one that was "
                    "written. The disk, or a program that writes to it, is faulty: resume from a checkpoint on another disk"
                )


# ---- Memory, and the places of units in the file.


class Buffer:
    """Page-aligned memory for the state of one unit."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, max(num_bytes, _ALIGNMENT))
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def views(self, like: State, starts: Sequence[int]) -> list[torch.Tensor]:
        """Return tensors that begin at ``starts`` in this memory, with the shapes and dtypes of ``like``."""
        return [
            self._bytes[start : start + each.numel() * each.element_size()].view(each.dtype).view(each.shape)
            for each, start in zip(like, starts, strict=True)
        ]


def layout_of(state: State) -> tuple[list[int], int]:
    """Return where each tensor begins in the file, and the bytes of all.

    Tensors follow each other without a gap where they do in memory: the optimizer updates such runs as one tensor.
    """
    starts, stop, end = [0] * len(state), 0, 0
    for index in sorted(range(len(state)), key=lambda index: state[index].data_ptr()):
        each = state[index]
        if each.data_ptr() != end or stop % each.element_size():
            stop = _aligned(stop, 64) + 64  # a gap
        starts[index] = stop
        stop += each.numel() * each.element_size()
        end = each.data_ptr() + each.numel() * each.element_size()
    return starts, _aligned(stop)


@dataclass(slots=True)
class Slot:
    """One of the two places of a unit's state.

    Attributes:
        begin, num_bytes: its range in the file.
        held: what is there, as tensors on the device "meta".  starts, num_used: see :func:`layout_of`.
        sums: of its blocks, once it is written.
    """

    begin: int = 0
    num_bytes: int = 0
    held: State = ()
    starts: Sequence[int] = ()
    num_used: int = 0
    sums: Future[list[str]] | None = None


@dataclass(slots=True)
class Place:
    """The state of one unit: an update writes the slot that is not ``committed``, and the next load reads ``current``."""

    slots: tuple[Slot, Slot] = field(default_factory=lambda: (Slot(), Slot()))
    committed: int = 0
    current: int = 0


class DiskTier:
    """A :class:`~shardwise.offload.tiers.Tier` on disk, with the state of two units in memory.

    An update leaves the slot from before it as it was, so that to undo it is to read that slot.  One thread writes, and one
    reads ahead: the unit that came next last time.  Their errors are raised by the next call.

    Raises: ConfigError, on all ranks, if some rank cannot write to ``folder``.  Collective.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        wrong = ""
        try:
            self._file = StateFile(Path(folder))
        except OSError as error:
            wrong = f"{folder}: {error.strerror}"
        for rank, text in enumerate(open_store_gather(None, "folder of optimizer state").call(wrong)):
            if text:
                raise ConfigError(f"OptimizerOffload: rank {rank} cannot write to the folder {text}. Name another one")
        self._places: dict[int, Place] = {}
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        for _ in range(_NUM_BUFFERS):
            self._free.put(Buffer(0))
        self._in_use: tuple[int, Buffer, list[torch.Tensor]] | None = None  # by the update of this unit
        self._ahead: tuple[int, Future[Buffer]] | None = None  # the unit that is read ahead
        self._next: dict[int, int] = {}  # by unit: the one that came after it last time
        self._last = -1
        self._error: StateError | None = None
        self._reader, self._writer = (ThreadPoolExecutor(1, f"shardwise-disk-{name}") for name in ("read", "write"))

    def expect(self, num_bytes: int) -> None:
        """Check that each file system has space for the states of its ranks, of ``num_bytes`` on this one.  Collective.

        Raises: ConfigError on all ranks.
        """
        folder, system = str(self._file.folder), os.fstatvfs(self._file.fd)
        disk = f"{os.fstat(self._file.fd).st_dev} of {host_id()}"
        mine = disk, system.f_bavail * system.f_frsize, 2 * num_bytes, folder
        found = [json.loads(text) for text in open_store_gather(None, "space of states").call(json.dumps(mine))]
        for disk, free, _, folder in found:
            ranks = [rank for rank, each in enumerate(found) if each[0] == disk]
            needed = sum(found[rank][2] for rank in ranks)
            if needed > free:
                raise ConfigError(
                    f"OptimizerOffload: optimizer state of ranks {ranks} needs {format_bytes(needed, 1024)} in {folder}, where "
                    f"{format_bytes(free, 1024)} are free. Free some, or name a folder of another disk"
                )

    def load(self, unit: int, held: State, keeps: bool) -> State:
        """Return the state of ``unit`` in memory; ``held`` itself if that has memory, as after the first update."""
        self._check()
        self._forget()
        self._next[self._last], self._last = unit, unit
        place = self._places.get(unit)
        if place is None or not held or not all(each.is_meta for each in held):
            if place is not None and held and keeps:  # the user may have changed it since it was read
                self.store(unit, held)
                self.commit(unit)
            return held
        if self._ahead is None or self._ahead[0] != unit:
            self._drop_ahead()
            self._prefetch(unit)
        assert self._ahead is not None
        buffer = self._result(self._ahead[1])
        self._ahead = None
        views = buffer.views(held, place.slots[place.current].starts)
        self._in_use = unit, buffer, views
        if self._next.get(unit, unit) != unit:  # what is read now of this unit is not what its update stores
            self._prefetch(self._next[unit])
        return views

    def store(self, unit: int, state: State) -> State:
        """Write ``state``; return it without memory."""
        self._check()
        if not state:
            return state
        if self._ahead is not None and self._ahead[0] == unit:
            self._drop_ahead()
        place, (starts, num_bytes) = self._places.setdefault(unit, Place()), layout_of(state)
        self._reserve(place, num_bytes)
        buffer = self._buffer_of(unit, state)
        if buffer is None:
            buffer = self._of_size(self._free.get(), num_bytes)
            torch_private.copy_all(buffer.views(state, starts), list(state))
        else:
            starts, num_bytes = place.slots[place.current].starts, place.slots[place.current].num_used
        place.current = 1 - place.committed
        slot = place.slots[place.current]
        slot.starts, slot.num_used = starts, num_bytes
        slot.held = [torch.empty_like(each, device="meta") for each in state]
        slot.sums = self._writer.submit(self._write, slot.begin, buffer, num_bytes)
        return slot.held

    def commit(self, unit: int) -> None:
        """Make the slot of the last :meth:`store` the one that stays."""
        if (place := self._places.get(unit)) is not None:
            place.committed = place.current

    def restore(self, unit: int) -> State:
        """Go back to the slot of the last :meth:`commit`."""
        self._forget()
        if self._ahead is not None and self._ahead[0] == unit:
            self._drop_ahead()
        place = self._places.setdefault(unit, Place())
        place.current = place.committed
        return place.slots[place.current].held

    # ---- buffers ----

    def _prefetch(self, unit: int) -> None:
        """Begin to read the state of ``unit``."""
        place = self._places.get(unit)
        if self._ahead is None and place is not None and place.slots[place.current].held:
            self._ahead = unit, self._reader.submit(self._read, place.slots[place.current])

    def _buffer_of(self, unit: int, state: State) -> Buffer | None:
        """Return the buffer that ``state`` was loaded into, if all of it is still there."""
        if self._in_use is None or self._in_use[0] != unit:
            return None
        _, buffer, views = self._in_use
        if [each.data_ptr() for each in views] != [each.data_ptr() for each in state]:
            self._forget()
            return None
        self._in_use = None
        return buffer

    def _of_size(self, buffer: Buffer, num_bytes: int) -> Buffer:
        return buffer if len(buffer.memory) >= num_bytes else Buffer(num_bytes)

    def _forget(self) -> None:
        """Leave the buffer in use to those who have its tensors (a state dict, for instance), for it was not stored."""
        if self._in_use is not None:
            self._in_use = None
            self._free.put(Buffer(0))

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            future, self._ahead = self._ahead[1], None
            with suppress(OSError, StateError):
                self._free.put(future.result())

    # ---- the file ----

    def _reserve(self, place: Place, num_bytes: int) -> None:
        for slot in place.slots:
            if slot.num_bytes < num_bytes and (slot is not place.slots[place.committed] or not slot.held):
                try:
                    slot.begin, slot.num_bytes = self._file.reserve(num_bytes), num_bytes
                except OSError as error:
                    raise self._failed(error, f"no space for {format_bytes(num_bytes, 1024)} more") from error

    def _read(self, slot: Slot) -> Buffer:
        buffer = self._free.get()
        try:
            assert slot.sums is not None
            buffer = self._of_size(buffer, slot.num_used)
            self._file.read(slot.begin, memoryview(buffer.memory)[: slot.num_used], slot.sums.result())
        except BaseException:
            self._free.put(buffer)
            raise
        return buffer

    def _write(self, begin: int, buffer: Buffer, num_bytes: int) -> list[str]:
        try:
            return self._file.write(begin, memoryview(buffer.memory)[:num_bytes])
        except OSError as error:
            self._error = self._failed(error, "a write failed")
            raise self._error from error
        finally:
            self._free.put(buffer)

    def _result(self, future: Future[Buffer]) -> Buffer:
        try:
            return future.result()
        except OSError as error:
            raise self._failed(error, "a read failed") from error
        except StateError as error:
            publish_failure(str(error))
            raise

    def _failed(self, error: OSError, what: str) -> StateError:
        text = (
            f"optimizer state on disk ({self._file.folder}): {what}: {error.strerror}. Resume from a "
            "checkpoint, with a folder that has space"
        )
        publish_failure(text)  # other ranks wait for this one in a collective
        return StateError(text)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

"""Devices: their streams and the order between them, of which the host has one, and the memory that serves again.

The engine uses a device through one class, :class:`Device`, with three kinds: the host, the real
accelerator through ``torch.accelerator``, and the fake one of the tests (``fake_accelerator``), which records its
calls.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.consistency.failure_report import (
    found_among,
    gone_in_words,
    kernel_waits,
    look_next,
    publish_failure,
)
from shardwise.consistency.process_groups import is_gone, patience_s
from shardwise.consistency.store import BRIEF_S, JobStore, default_store
from shardwise.errors import StateError, TransportError
from shardwise.observe import EVERYBODY, last_time, note
from shardwise.torch_private import abort_groups


class Device:
    """Where parameters are gathered and used: here the host itself, or no memory at all, where all work has one order.

    Attributes:
        has_streams: work can run concurrently with the current stream, and memory belongs to the stream it was
            allocated on.
        can_pin: the host has page-locked memory for it.
        has_values: its tensors have values; those of the fake device and of "meta" have only shapes.
        alignment: bytes to a multiple of which torch aligns what it allocates; libraries choose kernels, and with them bits,
            by the alignment of their operands.
    """

    has_streams = can_pin = False
    alignment = 64
    has_values = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.has_values = device.type != "meta"

    def new_stream(self, name: str, priority: int) -> torch.Stream:
        """Return a stream; messages call it ``name``, and a lower ``priority`` runs first."""
        raise RuntimeError(f"the host has no stream '{name}'; create one only if has_streams")

    def current_stream(self) -> torch.Stream:
        """Return the current stream."""
        raise RuntimeError("the host has no streams; ask only if has_streams")

    def host_memory(self, numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
        """Return ``numel`` elements of host memory, 1-D, with undefined values; page-locked if ``pins``."""
        return torch.empty(numel, dtype=dtype, pin_memory=pins, device="cpu")

    def fetch(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``source``, of the host or this device, on this device in ``dtype``: ``source`` itself if nothing changes.

        The current stream copies it; the host does not wait if ``source`` is page-locked.
        """
        return source.to(self._device, dtype)


class Accelerator(Device):
    """The accelerator of this process, as torch.accelerator finds it."""

    has_streams = can_pin = True
    alignment = 512

    def new_stream(self, name: str, priority: int) -> torch.Stream:
        del name
        return torch.Stream(self._device, priority=priority)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device.index)

    def fetch(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Two steps: in one, torch casts on the host into memory that is not page-locked, and the host waits for both.
        return source.to(self._device, non_blocking=True).to(dtype)


# The device that is used in place of the host, for tests; a context variable, so that it ends with the code that set it.
stand_in: ContextVar[Device | None] = ContextVar("stand_in", default=None)


def accelerator_type() -> str:
    """Return the device type of default meshes: the accelerator's, or "cpu" without one."""
    return (torch.accelerator.current_accelerator() or torch.device("cpu")).type


def device_of(device: torch.device) -> Device:
    """Return the :class:`Device` of ``device``."""
    if device.type not in ("cpu", "meta"):
        return Accelerator(device)
    return (stand_in.get() if device.type == "cpu" else None) or Device(device)


class SideStream:
    """Work that may run concurrently with the current stream.

    The stream is created at first use, and only on an accelerator.

    Args:
        device: the stream's device.  name: its name in messages.

    Attributes:
        is_concurrent: work of this stream can run concurrently with the current stream.
    """

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._name = name
        self._stream: torch.Stream | None = None
        self.is_concurrent = device.has_streams

    def run(self) -> AbstractContextManager[object]:
        """Return a context in which work goes to this stream."""
        return self._started() if self.is_concurrent else nullcontext()

    def wait_current(self) -> None:
        """Start this stream's next work after all work that is enqueued on the current stream."""
        if self.is_concurrent:
            self._started().wait_event(self._device.current_stream().record_event())

    def wait_event(self, event: Any) -> None:
        """Start this stream's next work after ``event``."""
        if self.is_concurrent:
            self._started().wait_event(event)

    def mark(self) -> Any:
        """Return an event after this stream's work so far; None on the host, which has no streams."""
        return self._started().record_event() if self.is_concurrent else None

    def current_waits(self, mark: Any) -> None:
        """Start the current stream's next work after ``mark``."""
        if mark is not None:
            self._device.current_stream().wait_event(mark)

    @property
    def is_started(self) -> bool:
        """True once work was sent to it."""
        return self._stream is not None

    def _started(self) -> torch.Stream:
        if self._stream is None:
            self._stream = self._device.new_stream(self._name, priority=-1)
        return self._stream


@dataclass(slots=True)
class CommStreams:
    """The streams of an engine; engines of pipeline stages may share one set.

    Attributes:
        are_concurrent: work of these streams can run concurrently with the current stream.
        gather: all-gathers.  reduce: reduce-scatters.  replicas: all-reduces over replicas, which overlap the next
            reduce-scatter.
        fetch: copies of shards from the host.  store: copies of gradients to the host.
    """

    are_concurrent: bool
    gather: SideStream
    reduce: SideStream
    replicas: SideStream
    fetch: SideStream
    store: SideStream

    @classmethod
    def on(cls, device: Device) -> CommStreams:
        """Return new streams for ``device``."""
        return cls(
            device.has_streams,
            *(SideStream(device, name) for name in ("gather", "reduce", "replicas", "fetch", "store")),
        )

    def current_waits_for_reductions(self) -> None:
        """Start the current stream's next work after all reductions, by one event for all of them."""
        for stream in (self.reduce, self.replicas):
            if stream.is_started:
                stream.current_waits(stream.mark())

    def host_waits_for_copies(self) -> None:
        """Block until no copy reads or writes host memory; return at once if there were none."""
        if self.fetch.is_started:
            self.store.wait_event(self.fetch.mark())
        if self.store.is_started:
            note(EVERYBODY)  # gradients have arrived from all ranks
            self.store.mark().synchronize()

    def current_waits_for_results(self) -> None:
        """Start the current stream's next work after all work that reads results of reductions, which may then be freed."""
        for stream in (self.replicas, self.store):
            if stream.is_started:
                stream.current_waits(stream.mark())


# ---- A watch names the rank that this one waits for when no error can: the host waits for the device, and a kernel
# there waits for the rank.
# Over gloo the host itself waits for other ranks, and checks them meanwhile. A collective of NCCL is a kernel, which
# ends when all ranks have arrived, or never: over NVLink and shared memory NCCL does not notice that a process has
# ended. torch then ends this process by SIGABRT after the timeout of the group, without naming a rank.
#
# So a separate thread checks. While the host or the device makes progress, it checks nothing: a long evaluation on one
# rank, after the others have finished, is no fault.

_LOOK_S = 0.5
_STILL_S = 10.0  # seconds without progress, on the host and on the device
_NEAR = 8  # ranks of a host are neighbours: each checks that many ranks on each side, and notifies all of what it finds
_RETURNS_S = 30.0  # how long a thread may take to return once the collectives are aborted
_ASKING_S = 8.0  # time for the other ranks to report why
_PART_OF_TIMEOUT = 0.9  # torch ends the process once the whole timeout is over
_REPORTED = "shardwise/lost in a kernel"

_watches: weakref.WeakKeyDictionary[dist.Store, DeviceWatch] = weakref.WeakKeyDictionary()


def watch_device(device: torch.device) -> None:
    """Start a thread that watches the ranks of the job: a wait for a collective on ``device`` has no timeout.

    Does nothing on the host, in a job of one rank, and if the job is watched already.  Errors are raised in the calling
    thread.
    """
    store, world = default_store(), dist.group.WORLD
    if device.type == "cpu" or store is None or world is None or world.size() == 1 or store in _watches:
        return
    stream = torch.accelerator.current_stream(device)
    timeout_s = patience_s(world, device)
    limit_s = max(min(_PART_OF_TIMEOUT * timeout_s, timeout_s - _ASKING_S), timeout_s / 2)
    watch = DeviceWatch(store, dist.get_rank(), range(world.size()), limit_s, StreamProgress(stream), abort_groups)
    _watches[store] = watch
    watch.start()
    kernel_waits.append(lambda: watch.waited_s)
    Finalize(None, watch.end_process, exitpriority=-1000)


class StreamProgress:
    """Return for how many seconds a stream has not reached the end of the work that it had then."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._event: Any = None
        self._since = 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        try:
            torch.accelerator.set_stream(self._stream)  # of this thread, whose device is else the first one
            if self._stream.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return 0.0  # an event would become part of the graph, and a query of it would end the capture
            if self._event is None or self._event.query():
                self._event, self._since = self._stream.record_event(), now
        except RuntimeError:  # the device has failed; its next use raises the error
            self._event, self._since = None, now
        return now - self._since


class DeviceWatch:
    """Check whether this process waits for a rank that will not arrive.

    Args:
        rank: this one, of ``ranks``; all are global.
        limit_s: how long a live rank may take.
        stuck_s: returns for how long the device has made no progress.  abort: makes waiting threads of this process
            return.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        limit_s: float,
        stuck_s: Callable[[], float],
        abort: Callable[[], None],
    ) -> None:
        self._store = weakref.ref(store)
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._limit_s = limit_s
        self._stuck_s, self._abort = stuck_s, abort
        self._waiter = threading.get_ident()
        self._pid = os.getpid()
        self._has_reported = False
        self.waited_s = 0.0  # how long the program has waited for a kernel

    def start(self) -> None:
        """Start the thread; it ends with the default process group."""
        threading.Thread(target=self._run, name="shardwise-device", daemon=True).start()

    def _run(self) -> None:
        began = time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            store = self._store()
            if store is None or default_store() is not store:
                return
            waited_s = min(self._stuck_s(), time.monotonic() - max(last_time(), began))
            self.waited_s = waited_s
            if waited_s < _STILL_S:
                continue
            reason = self.reason(store, waited_s)
            if reason:
                self.tell(reason)
                return

    def reason(self, store: dist.Store, waited_s: float) -> str:
        """Return why the wait, which has lasted ``waited_s``, will not end; an empty text if it may end."""
        job, near = JobStore(store, BRIEF_S), [rank for rank in self._others if abs(rank - self._rank) <= _NEAR]
        try:
            reported = job.peek(_REPORTED)
            lost = [int(reported)] if reported else [rank for rank in near if is_gone(store, rank)]
            if lost:
                job.set(_REPORTED, str(lost[0]))
        except TransportError as silence:  # the process that hosts the store is gone
            return f"{silence}; rank {self._rank} waits for a kernel"
        if lost:
            return f"{gone_in_words(store, lost)}; rank {self._rank} waits in a kernel. {look_next()}"
        if waited_s < self._limit_s:
            return ""
        who = found_among(self._others, store)
        return f"rank {self._rank} has waited in a kernel for {waited_s:.0f} s: {who}. {look_next()}"

    def tell(self, reason: str) -> None:
        """Raise ``reason`` in the waiting thread; it returns because this aborts the collectives of the process."""
        publish_failure(reason)
        # torch may end the process first: its own watchdog finds the closed connections.
        print(f"shardwise: {reason}", file=sys.stderr, flush=True)
        self._has_reported = True
        # In a thread of its own, because it may itself wait for the device.
        aborting = threading.Thread(target=self._abort, name="shardwise-abort", daemon=True)
        raised = raise_in(self._waiter, reason, lambda: aborting.join(_RETURNS_S))
        aborting.start()
        if not raised.wait(_RETURNS_S) and self._store() is not None:
            print("shardwise: the kernel does not end; this process does", file=sys.stderr, flush=True)
            os._exit(1)

    def end_process(self) -> None:
        """At exit, end the process without torch's destructors if an error has ended it or its groups are aborted.

        The destructors would wait for the lost rank, and then abort.
        """
        is_lost = self._has_reported or getattr(sys, "last_value", None) is not None
        if os.getpid() == self._pid and is_lost and self._store() is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def raise_in(thread: int, reason: str, first: Callable[[], None] = lambda: None) -> threading.Event:
    """Raise a TransportError in ``thread`` as soon as it runs Python again, before it can use what it waited for.

    Returns: an event that is set at that moment.  ``first``: what ``thread`` calls before it continues.
    """
    raised = threading.Event()

    class Found(TransportError):
        def __init__(self) -> None:
            super().__init__(reason)
            raised.set()
            first()

    Found.__name__, Found.__qualname__, Found.__module__ = "TransportError", "TransportError", TransportError.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Found))
    return raised


# ---- Keep glibc from returning the heap to the kernel between steps.
# glibc returns the end of its heap once enough of it is free.  After a backward that is the memory of activations and
# gradients, and the next step takes it back with a page fault for every 4 KiB.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_MOST_OF_HEAP = 1 << 25  # larger allocations get pages of their own; the largest that mallopt accepts
_least_alone: list[int] = []  # of limit_heap(): the heap is that of the process


def limit_heap(least_bytes: int = 1 << 17) -> None:
    """Let allocations of ``least_bytes`` have pages of their own from now on, so that what is freed is not resident.

    In the heap some 25 % of what a step of a GPT holds is holes.  Pages of their own take a page fault per 4 KiB.
    """
    _least_alone[:] = [least_bytes]
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, least_bytes)


def keep_heap(owner: object, device: torch.device) -> None:
    """Let this process keep the heap that its steps have needed until ``owner`` is gone; other devices have none."""
    library = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(library, "gnu_get_libc_version"):
        # A fixed trim threshold ends the growth of the other one, which would leave it at 128 KiB.
        library.mallopt(_MMAP_THRESHOLD, *(_least_alone or [_MOST_OF_HEAP]))
        library.mallopt(_TRIM_THRESHOLD, sys.maxsize >> 32)
        if _least_alone:
            library.malloc_trim(0)  # what the model had before it was sharded
        weakref.finalize(owner, library.malloc_trim, 0).atexit = False


# ---- Tensors with storages of their own inside one allocation.
# Contiguous tensors are sent, and updated by optimizers, as one tensor.  Views of one tensor would serve for that, but not for
# user code that stores them: a view has the storage of all its neighbours, so torch.save of one saves all, and
# ``data_ptr() == 0``, by which torch recognizes wrapper subclasses such as DTensor, is true for the first view only.  A
# sub-allocated tensor is like any other: its storage offset is 0, and its storage has exactly its own bytes.  The allocation
# lives as long as any tensor that was sub-allocated from it.


class _Extent:
    """Bytes at an address, for the array interfaces of numpy and CUDA; ``keep`` stays alive as long as an array uses them."""

    __slots__ = ("_address", "_num_bytes", "keep")

    def __init__(self, address: int, num_bytes: int, keep: object) -> None:
        self._address, self._num_bytes, self.keep = address, num_bytes, keep

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self._address, False), "shape": (self._num_bytes,), "typestr": "|u1", "version": 3}

    __cuda_array_interface__ = __array_interface__


def _bytes_at(address: int, num_bytes: int, device: torch.device, keep: object) -> torch.Tensor:
    extent = _Extent(address, num_bytes, keep)
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(extent))
    return torch.as_tensor(extent, device=device)


def suballocate(flat: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a row-major tensor of ``shape`` over the elements of the 1-D ``flat`` from ``start`` on, with its own storage."""
    return suballocate_all(flat, [(start, tuple(shape))])[0]


def suballocate_all(flat: torch.Tensor, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[torch.Tensor]:
    """Return :func:`suballocate` of each (start, shape).  Cost on CPU: about 3 us each, hardly more than a view."""
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


def join_from(first: torch.Tensor, numel: int, keep: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 1-D tensor of ``numel`` elements from the start of ``first``; it keeps ``keep``, the owners of that memory."""
    if not numel or first.device.type == "meta":
        return torch.empty(numel, dtype=first.dtype, device=first.device)
    return _bytes_at(first.data_ptr(), numel * first.element_size(), first.device, keep).view(first.dtype)


def are_neighbours(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if ``tensors``, dense and of one dtype, follow each other in memory without gaps; empty ones are ignored."""
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
    """Return True if the storage of ``tensor`` has exactly its bytes."""
    num_bytes = tensor.untyped_storage().nbytes()
    return tensor.storage_offset() == 0 and num_bytes == tensor.numel() * tensor.element_size()


_MIN_BYTES = 512


def size_class(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to one of eight sizes per doubling, so that similar sizes share storages.

    Storages are reused only within a class, so a later step that needs the same sizes finds all of them in the pool.
    """
    if num_bytes <= _MIN_BYTES:
        return _MIN_BYTES
    grain = 1 << max((num_bytes - 1).bit_length() - 4, 0)
    return -(-num_bytes // grain) * grain


class PooledBuffer:
    """One storage of the pool and the tensors over it; :meth:`release` returns it to the pool, once per use.

    Every user of the storage gets the same object and the same tensors, so a warm step makes none.

    Attributes:
        flat: of the dtype that it was acquired for, 1-D, over the storage.
        reuser: the side stream whose later allocations may get the memory although the current stream has read it.
    """

    __slots__ = ("flat", "num_bytes", "pool", "reuser", "size", "storage", "tensors")

    def __init__(self, storage: torch.UntypedStorage, size: int) -> None:
        """``size``: the size class, and bytes of the storage."""
        self.pool: BufferPool | None = None  # None while it is idle
        self.reuser: SideStream | None = None
        self.storage = storage
        self.size = size
        self.num_bytes = 0
        self.tensors: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def view(self, dtype: torch.dtype) -> None:
        """Make a 1-D tensor over the storage for :attr:`flat`."""
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=dtype, device=self.storage.device)
            tensor = empty.set_(self.storage, 0, (self.num_bytes // dtype.itemsize,), (1,))
        self.flat = self.tensors[dtype, self.num_bytes] = tensor

    def release(self) -> None:
        """Return the storage to the pool; the caller must not access its bytes afterwards."""
        pool, self.pool = self.pool, None
        if pool is None:
            raise StateError("this buffer was released before; release a buffer once, after its last reader")
        pool.used_bytes -= self.num_bytes
        if self.reuser is not None:
            self.reuser.wait_current()
            self.reuser = None
        if not pool.keeps:
            torch_private.swap_storage(
                self.storage, torch.empty(0, dtype=torch.uint8, device=pool.device).untyped_storage()
            )
        pool.free[self.size].append(self)


class BufferPool:
    """Storages of one device that are reused, so that a warm step allocates nothing.

    On an accelerator torch's caching allocator pools memory, and it handles streams.  There the pool keeps only empty storages,
    so that tensors and windows over them can be reused with new memory.

    Attributes:
        device: the device of the storages.
        used_bytes: bytes in use now.
        peak_used_bytes: the maximum of ``used_bytes``.
        num_allocations: storages made so far; constant once warm.
        keeps: the pool keeps the memory of released storages.
        free: the idle storages, by size.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keeps = not device_of(device).has_streams
        self.free: dict[int, list[PooledBuffer]] = {}
        self._sizes: dict[int, int] = {}
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self.num_allocations = 0

    def acquire(self, num_bytes: int, dtype: torch.dtype | None = None) -> PooledBuffer:
        """Return a storage of at least ``num_bytes``: an idle one of its size class, or a new one.

        ``dtype``: of its ``flat``.  A later user of the same storage, size and dtype gets the same tensor object there, so
        windows can be cached by its id.
        """
        self.used_bytes += num_bytes
        if self.used_bytes > self.peak_used_bytes:
            self.peak_used_bytes = self.used_bytes
        size = self._sizes.get(num_bytes)
        if size is None:
            size = self._sizes[num_bytes] = size_class(num_bytes)
        idle = self.free.get(size)
        if idle is None:
            idle = self.free[size] = []
        if idle and self.keeps:
            buffer = idle.pop()
        else:
            storage = torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
            if idle:
                buffer = idle.pop()
                torch_private.swap_storage(buffer.storage, storage)
            else:
                self.num_allocations += 1
                buffer = PooledBuffer(storage, size)
        buffer.pool, buffer.num_bytes = self, num_bytes
        if dtype is not None:
            flat = buffer.tensors.get((dtype, num_bytes))
            if flat is None:
                buffer.view(dtype)
            else:
                buffer.flat = flat
        return buffer

    def acquire_tensor(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, PooledBuffer]:
        """Return a 1-D tensor of ``numel`` elements and its buffer."""
        buffer = self.acquire(numel * dtype.itemsize, dtype)
        return buffer.flat, buffer

    def trim(self) -> None:
        """Free all idle storages."""
        for idle in self.free.values():
            idle.clear()

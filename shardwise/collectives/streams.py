"""Devices, their streams, and the order between them; on the host there is one order and nothing to do.

What the engine asks of a device is one protocol, :class:`Device`, with three things behind it: the host, the real
accelerator through ``torch.accelerator``, and the fake one of ``fake_accelerator``, which writes down
what it is asked.  Streams appear in this file alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from shardwise.consistency.failure_report import (
    found_among,
    gone_in_words,
    kernel_waits,
    leave,
    look_next,
    store_of_job,
)
from shardwise.consistency.liveness import is_gone
from shardwise.consistency.process_groups import patience_s
from shardwise.consistency.store import BRIEF_S, JobStore
from shardwise.errors import TransportError
from shardwise.observe import EVERYBODY, last_time, note
from shardwise.torch_private import abort_groups


class Stream(Protocol):
    """Work of a device in one order, as torch.Stream."""

    def __enter__(self) -> object:
        """Send what follows here."""
        ...

    def __exit__(self, *_: Any) -> object:
        """Send it where it went before."""
        ...

    def wait_event(self, event: Any) -> None:
        """Start what follows after ``event``."""
        ...

    def record_event(self) -> Any:
        """Return an event at the end of what this stream has been given."""
        ...


class Device(Protocol):
    """Where parameters are put together and computed with.

    Attributes:
        has_streams: work can run beside the current stream, and memory belongs to the stream it was allocated on.
        can_pin: the host has page-locked memory for it.
        has_values: its tensors have any; those of the fake one have only shapes.
    """

    @property
    def has_streams(self) -> bool: ...

    @property
    def can_pin(self) -> bool: ...

    @property
    def has_values(self) -> bool: ...

    def new_stream(self, name: str, priority: int) -> Stream:
        """Return a stream; ``name`` is what messages call it, a lower ``priority`` runs first."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream that work goes to now."""
        ...

    def host_memory(self, numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
        """Return ``numel`` elements of the host's memory, 1-D, with undefined values; page-locked if ``pins``."""
        ...

    def fetch(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``source``, of the host or this device, here in ``dtype``: itself if it is that; else copied by the current
        stream, which the host does not wait for if ``source`` is page-locked."""
        ...


class HostDevice:
    """The host itself, or no memory at all: everything has one order.  ``device``: "cpu" or "meta"."""

    has_streams = can_pin = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.has_values = device.type != "meta"

    def new_stream(self, name: str, priority: int) -> Stream:
        raise RuntimeError(f"the host has no stream '{name}'; ask for one only if has_streams")

    def current_stream(self) -> Stream:
        raise RuntimeError("the host has no streams; ask for one only if has_streams")

    def host_memory(self, numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=pins, device="cpu")

    def fetch(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return source.to(self._device, dtype)


class Accelerator:
    """The accelerator of this process, whatever torch.accelerator finds."""

    has_streams = can_pin = has_values = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self, name: str, priority: int) -> Stream:
        del name
        return cast(Stream, torch.Stream(self._device, priority=priority))

    def current_stream(self) -> Stream:
        return cast(Stream, torch.accelerator.current_stream(self._device.index))

    def host_memory(self, numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=pins, device="cpu")

    def fetch(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Two steps: in one, torch casts on the host, into memory that is not page-locked, and the host waits for both.
        return source.to(self._device, non_blocking=True).to(dtype)


_stand_in: ContextVar[Device | None] = ContextVar("stand_in", default=None)


def device_of(device: torch.device) -> Device:
    """Return what the engine asks ``device`` through."""
    if device.type not in ("cpu", "meta"):
        return Accelerator(device)
    stand_in = _stand_in.get() if device.type == "cpu" else None
    return HostDevice(device) if stand_in is None else stand_in


@contextmanager
def standing_in(device: Device) -> Generator[None, None, None]:
    """Let ``device`` stand for the host in engines that are made inside: their tensors are of "cpu", their streams its."""
    token = _stand_in.set(device)
    try:
        yield
    finally:
        _stand_in.reset(token)


class SideStream:
    """Work that may run beside the current stream.

    The stream is made at first use, and only on an accelerator.

    Args:
        device: whose.  name: what messages call it.

    Attributes:
        is_concurrent: work of this stream can run beside the current stream.
    """

    def __init__(self, device: Device, name: str, high_priority: bool = True) -> None:
        self._device = device
        self._name = name
        self._priority = -1 if high_priority else 0
        self._stream: Stream | None = None
        self.is_concurrent = device.has_streams

    def run(self) -> AbstractContextManager[object]:
        """Return a context in which work goes to this stream."""
        return cast(AbstractContextManager[object], self._started()) if self.is_concurrent else nullcontext()

    def wait_current(self) -> None:
        """Let this stream's next work start after what the current stream has been given so far."""
        if self.is_concurrent:
            self._started().wait_event(self._device.current_stream().record_event())

    def wait_event(self, event: Any) -> None:
        """Let this stream's next work start after ``event``."""
        if self.is_concurrent:
            self._started().wait_event(event)

    def mark(self) -> Any:
        """Return an event at the end of this stream's work so far; None on the host, which has no streams."""
        return self._started().record_event() if self.is_concurrent else None

    def current_waits(self, mark: Any) -> None:
        """Let the current stream's next work start after ``mark``."""
        if mark is not None:
            self._device.current_stream().wait_event(mark)

    def here(self) -> Stream | None:
        """Return the current stream, for :func:`back_at`; None on the host, which has no streams."""
        return self._device.current_stream() if self.is_concurrent else None

    @property
    def is_started(self) -> bool:
        """True once it has been given anything."""
        return self._stream is not None

    def _started(self) -> Stream:
        if self._stream is None:
            self._stream = self._device.new_stream(self._name, self._priority)
        return self._stream


def back_at(stream: Stream | None) -> AbstractContextManager[object]:
    """Return a context in which ``stream``, of :meth:`SideStream.here`, is the current one again."""
    return nullcontext() if stream is None else cast(AbstractContextManager[object], stream)


@dataclass(slots=True)
class CommStreams:
    """The streams of an engine; engines of pipeline stages may share one set.

    Attributes:
        are_concurrent: work of these streams can run beside the current stream.
        gather: all-gathers.  reduce: reduce-scatters.  replicas: all-reduces over replicas, beside the next reduce-scatter.
        fetch: shards on their way from the host.  store: gradients on their way to the host.
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
        """Let the current stream's next work start after all reductions: one event for all of them, not one each."""
        for stream in (self.reduce, self.replicas):
            if stream.is_started:
                stream.current_waits(stream.mark())

    def host_waits_for_copies(self) -> None:
        """Block until no copy reads or writes the host's memory; at once if there were none."""
        if self.fetch.is_started:
            self.store.wait_event(self.fetch.mark())
        if self.store.is_started:
            note(EVERYBODY)  # gradients have come from all ranks
            self.store.mark().synchronize()

    def current_waits_for_results(self) -> None:
        """Let the current stream's next work start after all that reads results of reductions: they may be freed then."""
        for stream in (self.replicas, self.store):
            if stream.is_started:
                stream.current_waits(stream.mark())


# ---- Names the rank that this one waits for where no error can: the host waits for the device, and a kernel there
# for the rank.
# Over gloo the host itself waits for other ranks, and looks around meanwhile.  A collective of NCCL is a kernel, which ends
# when all ranks have come, or never: over NVLink and shared memory NCCL does not see that a process has ended.  torch ends this
# one by SIGABRT then, after the timeout of the group, and without a name.
#
# So a thread looks beside.  While the host moves, or the device does, it asks nobody: a long evaluation on one rank, after the
# others have ended, is no fault.

_LOOK_S = 0.5
_STILL_S = 10.0  # for which nothing has moved, on the host or on the device
_NEAR = 8  # ranks of a host are neighbours: that many on each side are looked after, and what one finds all are told
_COMES_BACK_S = 30.0  # once the collectives are ended
_ASKING_S = 8.0  # for the others to say why
_PART_OF_TIMEOUT = 0.9  # torch ends the process when all of it is over
_TOLD = "shardwise/lost in a kernel"

_watches: weakref.WeakKeyDictionary[dist.Store, DeviceWatch] = weakref.WeakKeyDictionary()


def watch_device(device: torch.device) -> None:
    """Let a thread beside look after the ranks of the job, whose collectives on ``device`` nobody can be waited out of.

    Does nothing on the host, alone, and where the job is looked after already.  The calling thread is the one that hears of it.
    """
    store, world = store_of_job(), dist.group.WORLD
    if device.type == "cpu" or store is None or world is None or world.size() == 1 or store in _watches:
        return
    stream = cast(Stream, torch.accelerator.current_stream(device))
    timeout_s = patience_s(world, device)
    limit_s = max(min(_PART_OF_TIMEOUT * timeout_s, timeout_s - _ASKING_S), timeout_s / 2)
    watch = DeviceWatch(store, dist.get_rank(), range(world.size()), limit_s, StreamProgress(stream), abort_groups)
    _watches[store] = watch
    watch.start()
    kernel_waits.append(lambda: watch.waited_s)
    Finalize(None, watch.end_process, exitpriority=-1000)


class StreamProgress:
    """Says for how many seconds a stream has not come to the end of what it had been given before."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._event: Any = None
        self._since = 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        try:
            if self._event is None or self._event.query():
                self._event, self._since = self._stream.record_event(), now
        except RuntimeError:  # the device has failed, which is said where it is used
            self._event, self._since = None, now
        return now - self._since


class DeviceWatch:
    """Looks whether this process waits for a rank that will not come.

    Args:
        rank: this one, of ``ranks``, all global.
        limit_s: how long a rank that is there may take.
        stuck_s: for how long the device has not gone on.  abort: makes what waits there come back.
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
        self._near = [other for other in self._others if abs(other - rank) <= _NEAR]
        self._limit_s = limit_s
        self._stuck_s, self._abort = stuck_s, abort
        self._waiter = threading.get_ident()
        self._began = time.monotonic()
        self._pid = os.getpid()
        self._has_told = False
        self.waited_s = 0.0  # for which the program has waited for a kernel

    def start(self) -> None:
        """Begin; it ends with the default process group."""
        threading.Thread(target=self._run, name="shardwise-device", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            store = self._store()
            if store is None or store_of_job() is not store:
                return
            waited_s = min(self._stuck_s(), time.monotonic() - max(last_time(), self._began))
            self.waited_s = waited_s
            if waited_s < _STILL_S:
                continue
            reason = self.reason(store, waited_s)
            if reason:
                self.tell(reason)
                return

    def reason(self, store: dist.Store, waited_s: float) -> str:
        """Return why waiting, which has lasted ``waited_s``, will not end; an empty text if it may."""
        job = JobStore(store, BRIEF_S)
        try:
            told = job.peek(_TOLD)
            lost = [int(told)] if told else [rank for rank in self._near if is_gone(store, rank)]
            if lost:
                job.set(_TOLD, str(lost[0]))
        except TransportError as silence:  # who keeps the store is gone
            return f"{silence}; rank {self._rank} waits for a kernel"
        if lost:
            return f"{gone_in_words(store, lost)}; rank {self._rank} waits in a kernel. {look_next()}"
        if waited_s < self._limit_s:
            return ""
        who = found_among(self._others, store)
        return f"rank {self._rank} has waited in a kernel for {waited_s:.0f} s: {who}. {look_next()}"

    def tell(self, reason: str) -> None:
        """Raise ``reason`` in the thread that waits; it comes back because the collectives of this process are ended."""
        leave(reason)
        # torch may end the process first: its own watch finds connections that were closed.
        print(f"shardwise: {reason}", file=sys.stderr, flush=True)
        self._has_told = True
        # In a thread of its own: it may itself wait for the device.
        aborting = threading.Thread(target=self._abort, name="shardwise-abort", daemon=True)
        heard = raise_in(self._waiter, reason, lambda: aborting.join(_COMES_BACK_S))
        aborting.start()
        if not heard.wait(_COMES_BACK_S) and self._store() is not None:
            print("shardwise: the kernel does not end; this process does", file=sys.stderr, flush=True)
            os._exit(1)

    def end_process(self) -> None:
        """At the end of this process: end it without torch's destructors if an error has ended it, or its groups are ended.

        They would wait for the rank that is lost, and then abort.
        """
        is_lost = self._has_told or getattr(sys, "last_value", None) is not None
        if os.getpid() == self._pid and is_lost and self._store() is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def raise_in(thread: int, reason: str, first: Callable[[], None] = lambda: None) -> threading.Event:
    """Let a TransportError be raised in ``thread`` as soon as it runs Python again: before it sees what it has waited for.

    Returns: what is set then.  ``first``: what ``thread`` calls before it goes on.
    """
    heard = threading.Event()

    class Found(TransportError):
        def __init__(self) -> None:
            super().__init__(reason)
            heard.set()
            first()

    Found.__name__, Found.__qualname__, Found.__module__ = "TransportError", "TransportError", TransportError.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Found))
    return heard

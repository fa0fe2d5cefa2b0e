"""Devices, their streams, and the order between them; on the host there is one order and nothing to do.

What the engine asks of a device is one protocol, :class:`Device`, with three things behind it: the host, the real
accelerator through ``torch.accelerator``, and the fake one of ``fake_accelerator``, which writes down
what it is asked.  Streams appear in this file alone.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from shardwise.black_box import EVERYBODY, note


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
        has_lanes: work can run beside the current stream, and memory belongs to the stream it was allocated on.
        can_pin: the host has page-locked memory for it.
        has_values: its tensors have any; those of the fake one have only shapes.
    """

    @property
    def has_lanes(self) -> bool: ...

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

    has_lanes = can_pin = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.has_values = device.type != "meta"

    def new_stream(self, name: str, priority: int) -> Stream:
        raise RuntimeError(f"the host has no stream to be lane '{name}'; ask for one only if has_lanes")

    def current_stream(self) -> Stream:
        raise RuntimeError("the host has no streams; ask for one only if has_lanes")

    def host_memory(self, numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=pins, device="cpu")

    def fetch(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return source.to(self._device, dtype)


class Accelerator:
    """The accelerator of this process, whatever torch.accelerator finds."""

    has_lanes = can_pin = has_values = True

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
    """Let ``device`` stand for the host in engines that are made inside: their tensors are of "cpu", their lanes its."""
    token = _stand_in.set(device)
    try:
        yield
    finally:
        _stand_in.reset(token)


class Lane:
    """Work that may run beside the current stream.

    A lane starts lazily: on the host it never has a stream, on an accelerator it gets one at first use.

    Args:
        device: whose.  name: what messages call it.

    Attributes:
        is_concurrent: work of this lane can run beside the current stream.
    """

    def __init__(self, device: Device, name: str, high_priority: bool = True) -> None:
        self._device = device
        self._name = name
        self._priority = -1 if high_priority else 0
        self._stream: Stream | None = None
        self.is_concurrent = device.has_lanes

    def run(self) -> AbstractContextManager[object]:
        """Return a context in which work goes to this lane."""
        return cast(AbstractContextManager[object], self._started()) if self.is_concurrent else nullcontext()

    def wait_current(self) -> None:
        """Let this lane's next work start after what the current stream has been given so far."""
        if self.is_concurrent:
            self._started().wait_event(self._device.current_stream().record_event())

    def wait_event(self, event: Any) -> None:
        """Let this lane's next work start after ``event``."""
        if self.is_concurrent:
            self._started().wait_event(event)

    def mark(self) -> Any:
        """Return an event at the end of this lane's work so far; None where lanes have no streams."""
        return self._started().record_event() if self.is_concurrent else None

    def current_waits(self, mark: Any) -> None:
        """Let the current stream's next work start after ``mark``."""
        if mark is not None:
            self._device.current_stream().wait_event(mark)

    def here(self) -> Stream | None:
        """Return the current stream, for :func:`back_at`; None where lanes have no streams."""
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
    """Return a context in which ``stream``, of :meth:`Lane.here`, is the current one again."""
    return nullcontext() if stream is None else cast(AbstractContextManager[object], stream)


@dataclass(slots=True)
class Lanes:
    """The streams of an engine; engines of pipeline stages may share one set.

    Attributes:
        are_concurrent: work of these lanes can run beside the current stream.
        gather: all-gathers.  reduce: reduce-scatters.  replicas: all-reduces over replicas, beside the next reduce-scatter.
        fetch: shards on their way from the host.  store: gradients on their way to the host.
    """

    are_concurrent: bool
    gather: Lane
    reduce: Lane
    replicas: Lane
    fetch: Lane
    store: Lane

    @classmethod
    def on(cls, device: Device) -> Lanes:
        """Return new lanes for ``device``."""
        return cls(
            device.has_lanes, *(Lane(device, name) for name in ("gather", "reduce", "replicas", "fetch", "store"))
        )

    def current_waits_for_reductions(self) -> None:
        """Let the current stream's next work start after all reductions: one event for all of them, not one each."""
        for lane in (self.reduce, self.replicas):
            if lane.is_started:
                lane.current_waits(lane.mark())

    def host_waits_for_copies(self) -> None:
        """Block until no copy reads or writes the host's memory; at once if there were none."""
        if self.fetch.is_started:
            self.store.wait_event(self.fetch.mark())
        if self.store.is_started:
            note(EVERYBODY)  # gradients have come from all ranks
            self.store.mark().synchronize()

    def current_waits_for_results(self) -> None:
        """Let the current stream's next work start after all that reads results of reductions: they may be freed then."""
        for lane in (self.replicas, self.store):
            if lane.is_started:
                lane.current_waits(lane.mark())

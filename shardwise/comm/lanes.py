"""Streams and the order between them; on CPU there is one order and nothing to do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Lane:
    """Work that may run beside the current stream.

    A lane starts lazily: on CPU it never has a stream, on an accelerator it gets one at first use.

    Attributes:
        is_concurrent: work of this lane can run beside the current stream.
    """

    def __init__(self, device: torch.device, high_priority: bool = True) -> None:
        self._device = device
        self._priority = -1 if high_priority else 0
        self._stream: torch.Stream | None = None
        self.is_concurrent = device.type not in ("cpu", "meta")

    def run(self) -> AbstractContextManager[object]:
        """Return a context in which work goes to this lane."""
        if not self.is_concurrent:
            return nullcontext()
        return self._started()

    def wait_current(self) -> None:
        """Let this lane's next work start after what the current stream has been given so far."""
        if self.is_concurrent:
            self._started().wait_event(self._current().record_event())

    def wait_event(self, event: torch.Event) -> None:
        """Let this lane's next work start after ``event``."""
        if self.is_concurrent:
            self._started().wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that this lane reads ``tensor``, which another stream has allocated."""
        if self.is_concurrent:
            tensor.record_stream(self._started())

    def mark(self) -> torch.Event | None:
        """Return an event at the end of this lane's work so far; None where lanes have no streams."""
        return self._started().record_event() if self.is_concurrent else None

    def current_waits(self, mark: torch.Event | None) -> None:
        """Let the current stream's next work start after ``mark``."""
        if mark is not None:
            self._current().wait_event(mark)

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device.index)

    def _started(self) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream(self._device, priority=self._priority)
        return self._stream

"""A thread that hears signals although the main one waits in a collective, and sees when nothing moves any more."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from shardwise import black_box

_SIGNAL = signal.SIGUSR1
_MOST_PAUSE_S, _LEAST_PAUSE_S = 5.0, 0.05


class Watch:
    """Calls ``signalled`` after SIGUSR1 and ``stalled(seconds)`` once when the black box has heard nothing for ``limit_s()``.

    Python runs handlers of signals on the main thread alone, between two of its lines; one that waits in a collective never
    gets there.  So the signal also wakes this thread, through the file that ``signal.set_wakeup_fd`` names; what was in
    that place before goes on hearing.
    """

    def __init__(
        self, signalled: Callable[[], None], stalled: Callable[[float], None], limit_s: Callable[[], float]
    ) -> None:
        self._signalled, self._stalled, self._limit_s = signalled, stalled, limit_s
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pid = os.getpid()
        self._next_fd = -1
        self._handler: Any = None
        self._hears_signals = self._is_over = False
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="shardwise-watch", daemon=True)

    def open(self) -> None:
        """Begin; signals are heard if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.getsignal(_SIGNAL)
            signal.signal(_SIGNAL, self._handle)
            self._next_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._hears_signals = True
        self._thread.start()

    def close(self) -> None:
        """End the thread, and put back what was there."""
        if os.getpid() != self._pid:
            return
        if self._hears_signals and threading.current_thread() is threading.main_thread():
            self._give_back()
        self._is_over = True
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            os.close(self._read)
            os.close(self._write)

    def _give_back(self) -> None:
        found = signal.set_wakeup_fd(self._next_fd, warn_on_full_buffer=False)
        if found != self._write:  # somebody came after us: theirs stays
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)
        if signal.getsignal(_SIGNAL) == self._handle:
            signal.signal(_SIGNAL, self._handler if self._handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if callable(self._handler):
            self._handler(number, frame)

    def _run(self) -> None:
        reported = 0.0
        ears = select.poll()  # select.select takes no descriptor above 1,023, which jobs with many files have
        ears.register(self._read, select.POLLIN)
        while not self._is_over:
            limit_s = self._limit_s()
            if ears.poll(1000 * min(max(limit_s / 4, _LEAST_PAUSE_S), _MOST_PAUSE_S)):
                self._hear()
            last = max(black_box.last_time(), self._began)
            idle_s = time.monotonic() - last
            if idle_s >= limit_s and last != reported and not self._is_over:
                reported = last
                self._stalled(idle_s)

    def _hear(self) -> None:
        try:
            numbers = os.read(self._read, 4096)
        except OSError:
            return
        if self._next_fd != -1:
            with contextlib.suppress(OSError):
                os.write(self._next_fd, numbers.replace(b"\0", b""))
        if bytes([_SIGNAL]) in numbers:
            self._signalled()

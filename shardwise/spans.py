"""What takes how long: whoever launches or waits says when it begins and ends, if somebody listens.

While nobody does, a call site costs one look at an empty list: ``if listeners: begin(...)``.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol


class SpanListener(Protocol):
    """Hears of every span of every thread; must not change anything."""

    def begin(self, track: str, what: str, subject: str) -> None:
        """``what`` begins on this thread, for ``subject`` (a unit, a message); ``track``: of which sequence of events."""
        ...

    def end(self, what: str, subject: str, num_bytes: int) -> None:
        """The last ``what`` of ``subject`` that has begun on this thread ends; spans inside of it that raised end too."""
        ...


listeners: list[SpanListener] = []  # changed by listening(), and by the profiler's records


def begin(track: str, what: str, subject: str) -> None:
    """Tell all listeners that ``what`` begins."""
    for listener in list(listeners):
        listener.begin(track, what, subject)


def end(what: str, subject: str, num_bytes: int = 0) -> None:
    """Tell all listeners that ``what`` has ended."""
    for listener in list(listeners):
        listener.end(what, subject, num_bytes)


@contextmanager
def span(track: str, what: str, subject: str, num_bytes: int = 0) -> Generator[None, None, None]:
    """Say when the body begins and ends; not for what is crossed at every call of a step."""
    if listeners:
        begin(track, what, subject)
    try:
        yield
    finally:
        if listeners:
            end(what, subject, num_bytes)


@contextmanager
def listening(listener: SpanListener) -> Generator[None, None, None]:
    """Let ``listener`` hear of spans; inside of another, both do."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)

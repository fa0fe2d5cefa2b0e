"""Wait by polling for what other threads and processes do."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
LOOK_S = 0.5  # between two checks whether the awaited event can still happen
STORE_PAUSES_S = 1e-4, 2e-2  # first and longest pause between two store requests
MEMORY_PAUSES_S = 20e-6, 1e-3  # between two reads of shared memory
_GROWTH = 1.5
_YIELDS = 200


def comes_soon(condition: Callable[[], object]) -> bool:
    """Return True once ``condition()`` holds; False if it does not while other threads get the core a few times."""
    return any(condition() or os.sched_yield() for _ in range(_YIELDS))


def wait_until(
    condition: Callable[[], _T],
    limit_s: float = math.inf,
    alarm: Callable[[], object] | None = None,
    is_hopeless: Callable[[], object] | None = None,
    pauses_s: tuple[float, float] = STORE_PAUSES_S,
) -> _T:
    """Return the result of ``condition()`` once it is true; else its last result, when the wait is over.

    The wait is over after ``limit_s`` seconds, or once ``is_hopeless()``, which costs more than a condition and is
    called every ``LOOK_S``.  In both cases the condition is checked once more.  ``alarm()`` may raise; it is called
    before each pause.
    """
    start = looked = time.monotonic()
    pause_s, longest_s = pauses_s
    while not (found := condition()):
        if alarm is not None:
            alarm()
        now = time.monotonic()
        is_over = now - start >= limit_s
        if is_hopeless is not None and not is_over and now - looked >= LOOK_S:
            looked = now
            is_over = is_hopeless()
        if is_over:
            return condition()
        time.sleep(min(pause_s, max(start + limit_s - now, 0.0)))
        pause_s = min(_GROWTH * pause_s, longest_s)
    return found

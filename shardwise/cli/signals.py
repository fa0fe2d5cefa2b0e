"""SIGTERM and Ctrl-C while a run trains: the first asks it to save and leave, the second ends it at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(second_ends: bool) -> Generator[Callable[[], int], None, None]:
    """Note the first signal; give a function that returns its number, 0 before.

    Args:
        second_ends: leave the second one to the system: it ends this process also where Python does not run, in a
            collective that waits.  False where a launcher sees to it, and one Ctrl-C may come by two ways.
    """
    noted: list[int] = []

    def note(number: int, _frame: object) -> None:
        noted.append(number)
        for each in SIGNALS if second_ends else ():
            signal.signal(each, signal.SIG_DFL)
        if second_ends and sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # whoever is ended by the system cannot give the cursor back
            sys.stdout.flush()

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield lambda: noted[0] if noted else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

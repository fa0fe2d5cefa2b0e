"""Faults that are planted in the ranks, and nowhere else, to see that the fuzzer finds them."""

from __future__ import annotations

from collections.abc import Callable

FAULTS: dict[str, Callable[[], None]] = {}


def plant(name: str) -> None:
    """Plant the fault called ``name`` in this process, for good."""
    FAULTS[name]()

"""Faults on purpose: one rank is killed, stopped, made late, or made wrong at a named place.

Example:
    >>> from shardwise.testing import faults
    >>> with faults.raise_at("reduction", rank=1, step=3, error=MemoryError):  # doctest: +SKIP
    ...     train()
"""

from shardwise.testing.faults.fault import KINDS, PLACES, Fault
from shardwise.testing.faults.inject import (
    corrupt_at,
    delay_at,
    drop_at,
    inject,
    interrupt_at,
    kill_at,
    raise_at,
    reach,
    stop_at,
    terminate_at,
)

__all__ = [
    "KINDS",
    "PLACES",
    "Fault",
    "corrupt_at",
    "delay_at",
    "drop_at",
    "inject",
    "interrupt_at",
    "kill_at",
    "raise_at",
    "reach",
    "stop_at",
    "terminate_at",
]

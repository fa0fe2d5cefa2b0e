"""Transfers as records of torch's profiler, whichever way they go: its own records know torch's collectives alone."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from shardwise import torch_private
from shardwise.spans import listeners

_NAMES = {
    "unshard": "all_gather",
    "wait": "wait_all_gather",
    "reduce": "reduce_scatter",
    "wait for gradients": "wait_reduce_scatter",
    "all-gather": "all_gather",
    "reduction": "reduce_scatter",
    "all-reduce": "all_reduce",
    "exchange": "exchange",
}


@dataclass(frozen=True, slots=True)
class _OpenRecord:
    span: tuple[str, str]
    record: torch.profiler.record_function


class _Records:
    """Hears of spans while a profiler is on: each that moves bytes is a ``record_function`` of its thread."""

    def __init__(self) -> None:
        self._open = threading.local()

    def begin(self, track: str, what: str, subject: str) -> None:
        if not torch_private.is_profiling():
            listeners.remove(self)  # nobody looks any more: transfers cost nothing again
            return
        if what in _NAMES:
            record = torch.profiler.record_function(f"shardwise::{_NAMES[what]} {subject or 'root'}")
            record.__enter__()
            self._stack().append(_OpenRecord((what, subject), record))

    def end(self, what: str, subject: str, num_bytes: int) -> None:
        stack = self._stack()
        if (what, subject) not in [each.span for each in stack]:
            return  # it had begun before the profiler
        while stack:
            last = stack.pop()
            last.record.__exit__(None, None, None)
            if last.span == (what, subject):
                return

    def _stack(self) -> list[_OpenRecord]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        return self._open.stack


_records = _Records()


def record_transfers() -> None:
    """Show transfers to the profiler that is on, until it is off."""
    if _records not in listeners:
        listeners.append(_records)

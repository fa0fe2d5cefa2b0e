"""Lines for ``TORCH_LOGS=fsdp`` and ranges for the profiler; nothing of either unless asked for."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from shardwise import torch_private

_logger = logging.getLogger("torch.distributed.fsdp.fully_shard")  # what TORCH_LOGS=fsdp turns on


def note(what: str, unit: str | None = None) -> None:
    """Log that ``what`` happens, to the unit with path ``unit``."""
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("FSDP::%s%s", what, "" if unit is None else f" ({unit})")


def note_range(what: str, unit: str) -> AbstractContextManager[object]:
    """Log that ``what`` begins for ``unit``; return a context that a profiler shows as one range."""
    if _logger.isEnabledFor(logging.DEBUG):
        note(what, unit)
    if torch_private.is_profiling():
        return torch.profiler.record_function(f"FSDP::{what} ({unit})")
    return nullcontext()


def say(what: str) -> None:
    """Log ``what`` for people: a choice that was made for them."""
    _logger.info("%s", what)

"""Lines for ``TORCH_LOGS=fsdp``; none unless asked for."""

from __future__ import annotations

import logging

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")  # what TORCH_LOGS=fsdp turns on


def note(what: str, unit: str | None = None) -> None:
    """Log that ``what`` happens, to the unit with path ``unit``."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("FSDP::%s%s", what, "" if unit is None else f" ({unit})")


def say(what: str) -> None:
    """Log ``what`` for people: a choice that was made for them."""
    logger.info("%s", what)

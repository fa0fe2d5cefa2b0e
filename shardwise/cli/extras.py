"""Packages that only some commands need."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from shardwise.errors import ConfigError


def check_extras(names: Sequence[str], command: str = "train") -> None:
    """Refuse to start without the packages that only ``command`` needs.  Raises: ConfigError."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"shardwise {command} needs {', '.join(missing)}, which is not installed here. "
            f"Install with: pip install 'shardwise[train]'"
        )

"""The version of this package, from its metadata: only ``pyproject.toml`` has it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0+unknown"  # of a copy of the source that is not installed


def find_version(name: str = "shardwise") -> str:
    """Return the version of the installed package ``name``, :data:`UNKNOWN` if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return UNKNOWN


__version__: str = find_version()

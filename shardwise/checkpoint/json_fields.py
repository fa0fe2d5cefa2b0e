"""Reading JSON that nobody vouches for: every field is asked for by type, and an error names the key."""

from __future__ import annotations

import json
from math import prod
from typing import Any, cast

from shardwise.errors import DamagedCheckpointError

MOST_SIZE = 2**48  # of a tensor's dim, and bytes of a file
_MOST_DIMS = 64


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in ``data``.  Raises: DamagedCheckpointError if that is none, or names a key twice."""
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{what}: not the JSON that was written ({str(error)[:120]})") from None
    if not isinstance(found, dict):
        raise DamagedCheckpointError(f"{what}: expected a JSON object, found {type(found).__name__}")
    return cast(dict[str, Any], found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def as_text(value: object, key: str) -> str:
    """Return ``value`` if it is a string.  Raises: DamagedCheckpointError naming ``key``; so do all below."""
    if not isinstance(value, str):
        raise wrong(key, "a string", value)
    return value


def as_number(value: object, key: str, most: int = MOST_SIZE) -> int:
    """Return ``value`` if it is a whole number from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise wrong(key, f"a whole number from 0 to {most}", value)
    return value


def as_list(value: object, key: str, length: int | None = None) -> list[Any]:
    """Return ``value`` if it is a list, of ``length`` if that is given."""
    if not isinstance(value, list) or (length is not None and len(cast(list[Any], value)) != length):
        raise wrong(key, "a list" + (f" of {length}" if length is not None else ""), value)
    return cast(list[Any], value)


def as_table(value: object, key: str) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object."""
    if not isinstance(value, dict):
        raise wrong(key, "an object", value)
    return cast(dict[str, Any], value)


def as_sizes(value: object, key: str) -> tuple[int, ...]:
    """Return ``value`` if it is the shape of a tensor."""
    found = as_list(value, key)
    if len(found) > _MOST_DIMS:
        raise wrong(key, f"up to {_MOST_DIMS} dims", value)
    sizes = tuple(as_number(size, f"{key}[{dim}]") for dim, size in enumerate(found))
    if prod(max(size, 1) for size in sizes) > MOST_SIZE:  # of an empty tensor, too: torch counts strides
        raise wrong(key, f"dims whose product is at most {MOST_SIZE}", value)
    return sizes


def wrong(key: str, expected: str, found: object) -> DamagedCheckpointError:
    """Return the error for a value of another type."""
    return DamagedCheckpointError(f"{key}: expected {expected}, found {str(found)[:60]!r}")

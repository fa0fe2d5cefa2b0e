"""State that is no tensor, as JSON: exactly the types that JSON and a few marks can carry, never a pickle."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from shardwise.checkpoint.dtypes import bytes_of, dtype_name, dtype_of
from shardwise.checkpoint.names import join
from shardwise.errors import CheckpointError, ConfigError

_MARK = "$"
_MOST_DEEP = 64
_MOST_BITS = 4096  # of a whole number: Python refuses to read numbers of thousands of digits
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
SMALL_NUMEL = 16  # a tensor among the options of a param group is a number or two

Take = Callable[[str, torch.Tensor], None]
Give = Callable[[str], torch.Tensor]


def encode(value: Any, name: str, take: Take | None = None, depth: int = 0) -> Any:
    """Return ``value`` as JSON; ``name`` is its place, for errors and for the tensors within.

    ``take``: is given each tensor with its name.  Without it, tensors of a few elements are written as values.
    Raises: ConfigError naming the place of what cannot be carried.
    """
    if depth > _MOST_DEEP:
        raise ConfigError(f"{name}: nested more than {_MOST_DEEP} deep, or within itself; save a flatter state dict")
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value, name, take)
    if isinstance(value, np.generic):
        value = cast(Any, value).item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK: "float", "v": str(float(value))}
    if type(value) is int and value.bit_length() <= _MOST_BITS:
        return value
    if isinstance(value, (bytes, bytearray)):
        return {_MARK: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _mapping(cast(Mapping[Any, Any], value), name, take, depth)
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{name}/{i}", take, depth + 1) for i, item in enumerate(cast(list[Any], value))]
        return items if isinstance(value, list) else {_MARK: "tuple", "v": items}
    raise ConfigError(
        f"{name}: a value of type {type(value).__name__} cannot be saved; state dicts may hold tensors, numbers, strings, "
        "bytes, None, and lists, tuples and dicts of these. Leave it out of the state dict or turn it into one of them"
    )


def _mapping(value: Mapping[Any, Any], name: str, take: Take | None, depth: int) -> Any:
    if all(type(key) is str for key in value) and _MARK not in value and not isinstance(value, Counter):
        return {key: encode(item, join_to(name, key), take, depth + 1) for key, item in value.items()}
    kind = "counter" if isinstance(value, Counter) else "dict"
    pairs = [
        [encode(key, name, None, depth + 1), encode(item, join_to(name, str(key)), take, depth + 1)]
        for key, item in value.items()
    ]
    return {_MARK: kind, "v": pairs}


def _tensor(value: torch.Tensor, name: str, take: Take | None) -> Any:
    if take is not None:
        take(name, value)
        return {_MARK: "tensor", "v": name}
    if type(value) is not torch.Tensor or value.numel() > SMALL_NUMEL:
        raise ConfigError(f"{name}: a {type(value).__name__} of {tuple(value.shape)} where a number was expected")
    data = value.detach().cpu().contiguous()
    return {
        _MARK: "number",
        "dtype": dtype_name(data.dtype, name),
        "shape": list(data.shape),
        "v": base64.b64encode(bytes(bytes_of(data))).decode(),
    }


def join_to(name: str, key: str) -> str:
    """Return ``name`` with one more part."""
    return f"{name}/{join(key)}"


def decode(value: Any, name: str, give: Give | None = None, depth: int = 0) -> Any:
    """Return what :func:`encode` was given; ``give`` returns the tensor of a name.

    Raises: CheckpointError naming the place of what is no encoded value.
    """
    if depth > _MOST_DEEP:
        raise CheckpointError(f"{name[:80]}: nested deeper than any value that is saved")
    if isinstance(value, list):
        return [decode(item, f"{name}/{i}", give, depth + 1) for i, item in enumerate(cast(list[Any], value))]
    if not isinstance(value, dict):
        return value
    fields = cast(dict[str, Any], value)
    if _MARK not in fields:
        return {key: decode(item, join_to(name, key), give, depth + 1) for key, item in fields.items()}
    try:
        return _marked(fields, name, give, depth)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{name}: {str(fields)[:80]} is no value of this format ({error!r})") from error


def groups_of(value: Any, name: str) -> list[dict[str, Any]]:
    """Return the param groups of an optimizer that ``value`` is.  Raises: CheckpointError if it is something else."""
    groups = cast(list[Any], value) if isinstance(value, list) else [value]
    for group in groups:
        fields = cast(dict[str, Any], group) if isinstance(group, dict) else {}
        if not isinstance(fields.get("options"), dict) or not isinstance(fields.get("params"), list):
            raise CheckpointError(f"{name}: expected groups with params and options, found {str(group)[:60]}")
    return groups


def _marked(fields: dict[str, Any], name: str, give: Give | None, depth: int) -> Any:
    kind, inner = fields[_MARK], fields["v"]
    if kind == "float":
        return _FLOATS[inner]
    if kind == "tuple" and isinstance(inner, list):
        return tuple(decode(inner, name, give, depth))
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if kind in ("dict", "counter"):
        found = {
            decode(key, name, None, depth + 1): decode(item, join_to(name, str(key)[:80]), give, depth + 1)
            for key, item in inner
        }
        return Counter(found) if kind == "counter" else found
    if kind == "tensor" and give is not None and isinstance(inner, str):
        return give(inner)
    if kind == "number":
        shape = [int(size) for size in fields["shape"]]
        data = base64.b64decode(inner, validate=True)
        found = torch.frombuffer(bytearray(data), dtype=dtype_of(fields["dtype"], name))
        if found.numel() > SMALL_NUMEL:
            raise ValueError(f"{found.numel()} numbers")
        return found.view(shape)
    raise ValueError(f"kind {kind!r}")

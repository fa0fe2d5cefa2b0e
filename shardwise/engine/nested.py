"""Tensors inside the containers that modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.nn.utils.rnn import PackedSequence


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``: tensors, lists, tuples, named tuples, sets, mappings, dataclasses, nested at will."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in cast("list[Any]", value):
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


_MOST_LOOKED_AT = 1000


def tensors_behind(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that attributes of ``value``, an object of any class, hold, and of what these hold in turn.

    Nothing callable is looked into, nor more than a thousand things.
    """
    todo, seen = [value], set[int]()
    while todo and len(seen) < _MOST_LOOKED_AT:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, Mapping):
            todo += cast("Mapping[Any, Any]", each).values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            todo += cast("list[Any]", each)
        elif not callable(each):
            slots = [name for kind in type(each).__mro__ for name in kind.__dict__.get("__slots__", ())]
            todo += [*getattr(each, "__dict__", {}).values(), *[getattr(each, name, None) for name in slots]]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with every tensor replaced; containers are rebuilt with their own types, the input is not changed."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return value._replace(data=function(value.data))
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, item) for key, item in cast("Mapping[Any, Any]", value).items()}
        return _rebuilt_mapping(cast("Mapping[Any, Any]", value), items)
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in cast("tuple[Any, ...]", value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (list, set, frozenset)):
        return type(value)(map_tensors(function, item) for item in cast("list[Any]", value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, map_tensors(function, getattr(value, field.name)))
        return result
    return value


def _rebuilt_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    result = copy.copy(original)  # keeps a defaultdict's factory and a model output's attributes
    for key, item in items.items():
        cast(Any, result)[key] = item
    return result


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``."""

    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(to_dtype, value)

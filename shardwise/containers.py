"""Tensors in the containers that modules take and return: they are found, cast and moved, and containers stay the caller's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from shardwise.errors import ConfigError
from shardwise.torch_private import version_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_ATOMS = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, torch.device})
_SEQUENCES = (list, tuple, set, frozenset)
_OF_PYTHON = frozenset({dict, *_SEQUENCES})  # classes whose objects have no attributes of their own
_MOST_LOOKED_AT = 1000


def _is_dataclass(value: Any) -> bool:
    return hasattr(type(value), "__dataclass_fields__") and not isinstance(value, nn.Module)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a user's class, except for those that are not set."""
    if type(value) in _OF_PYTHON:
        return {}
    found: dict[str, Any] = {} if _is_own_dict(value) else dict(getattr(value, "__dict__", ()))
    names = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ()) if name[:2] != "__"]
    names += [field.name for field in dataclasses.fields(value)] if _is_dataclass(value) else []
    return found | {name: getattr(value, name) for name in names if name not in found and hasattr(value, name)}


def _is_own_dict(value: Any) -> bool:
    return getattr(value, "__dict__", None) is value  # a dict whose attributes are its items


def tensors_in(value: Any, everywhere: bool = False) -> list[torch.Tensor]:
    """Return the tensors in ``value``: tensors, lists, tuples, named tuples, sets, mappings, dataclasses, in any nesting.

    Args:
        value: any object.
        everywhere: look into the attributes of objects of any class, too, except for callables, until a thousand objects
            have been looked at.
    """
    todo, seen, found = [value], dict[int, Any](), list[torch.Tensor]()
    for each in todo:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif not (type(each) in _ATOMS or id(each) in seen or (everywhere and len(seen) > _MOST_LOOKED_AT)):
            seen[id(each)] = each
            if isinstance(each, Mapping):
                todo += cast("Mapping[Any, Any]", each).values()
            elif isinstance(each, _SEQUENCES):
                todo += cast("list[Any]", each)
            elif _is_dataclass(each) or (everywhere and not callable(each)):
                todo += _attributes(each).values()
    return found


def can_grow(value: Any) -> bool:
    """Return True if a module that gets ``value`` as an argument may put tensors into it."""
    if isinstance(value, torch.Tensor) or type(value) in _ATOMS:
        return False
    return type(value) is not tuple or any(map(can_grow, cast("Args", value)))


def _items(value: Any) -> dict[Any, Any]:
    """Return the items of one of Python's containers by key or index.  Other mappings have theirs in attributes."""
    if isinstance(value, (dict, MappingProxyType)):
        return dict(cast("Mapping[Any, Any]", value))
    return dict(enumerate(cast("list[Any]", value))) if isinstance(value, _SEQUENCES) else {}


def _replace(container: Any, new: Mapping[int, Any]) -> None:
    """Replace items and attributes of ``container`` whose ids are in ``new``; no method of a user's class is called."""
    for key, item in _items(container).items():
        if id(item) in new and isinstance(container, dict):
            dict.__setitem__(cast("dict[Any, Any]", container), key, new[id(item)])
        elif id(item) in new and isinstance(container, list):
            list.__setitem__(cast("list[Any]", container), key, new[id(item)])
        elif id(item) in new and isinstance(container, set):
            set.remove(cast("set[Any]", container), item)
            set.add(cast("set[Any]", container), new[id(item)])
    for name, item in _attributes(container).items():
        if id(item) in new:
            object.__setattr__(container, name, new[id(item)])


def _copied(value: Any, new: Mapping[int, Any]) -> Any:
    """Return a copy of ``value`` in which items and attributes whose ids are in ``new`` are replaced.

    Raises: ConfigError if its class does not allow copies.
    """
    kind: Any = type(value)
    items = {key: new.get(id(item), item) for key, item in _items(value).items()}
    if isinstance(value, PackedSequence):
        items[1] = value.batch_sizes  # they stay on the CPU
    try:
        if isinstance(value, (tuple, frozenset)):
            base: Any = tuple if isinstance(value, tuple) else frozenset
            result = kind(items.values()) if hasattr(kind, "n_fields") else base.__new__(kind, items.values())
            for name, item in _attributes(value).items():
                object.__setattr__(result, name, item)
        else:
            result: Any = MappingProxyType(items) if kind is MappingProxyType else copy.copy(value)
        if result is value:
            raise ConfigError("copy.copy() returns the object itself")
        if _is_own_dict(value):
            object.__setattr__(result, "__dict__", result)
        _replace(result, new)
    except Exception as error:
        raise ConfigError(
            f"a {kind.__qualname__} among a module's outputs holds tensors that output_dtype casts, and cannot be copied: "
            f"{type(error).__name__}: {error}. Give the class a __copy__, or leave output_dtype out"
        ) from error
    return result


def _write(own: torch.Tensor, replacement: torch.Tensor) -> None:
    """Write to the caller's tensor what a module has written in place to the one that replaced it."""
    builds_graph = replacement.requires_grad and torch.is_grad_enabled()
    with torch.set_grad_enabled(builds_graph):
        written = replacement.to(own.dtype)
        if not builds_graph:  # elements that the module has not written keep their precision
            written = torch.where(replacement == own.to(replacement.dtype), own, written)
        own.copy_(written)


class Conversion:
    """The arguments or outputs of one forward, with floating-point tensors cast to ``dtype`` and all moved to ``device``.

    The containers of arguments hold these tensors while the module runs, so that what the module puts in or takes out is there;
    :meth:`take_back` gives the caller's tensors back, with what the module has written into them.  Tuples, which cannot be
    changed, and containers of outputs (``copies``), which the module may keep, are copied if they hold such a tensor.  Lists,
    tuples, sets, dicts, dataclasses and mappings are containers, subclasses too.
    """

    __slots__ = ("_cast", "_changed", "_copies", "_device", "_done", "_dtype", "_new")

    def __init__(
        self, dtype: torch.dtype | None = None, device: torch.device | None = None, copies: bool = False
    ) -> None:
        self._dtype, self._device, self._copies = dtype, device, copies
        self._done: dict[int, tuple[Any, Any]] = {}  # id -> a value that was seen, and what stands for it
        self._new: dict[int, Any] = {}  # id -> what stands for it
        self._changed: list[Any] = []  # the caller's containers
        self._cast: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # of containers: own, replacement, its version

    def arguments(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments for the module; those that are tensors are replaced as by ``tensor.to``."""
        return tuple([self(each) for each in args]), kwargs and {name: self(each) for name, each in kwargs.items()}

    def __call__(self, value: Any) -> Any:
        """Return ``value``, or what stands for it."""
        if isinstance(value, torch.Tensor):
            if self._device is None and (self._dtype == value.dtype or not value.is_floating_point()):
                return value
        elif type(value) in _ATOMS:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value, value  # a container may contain itself
            convert = self._tensor if isinstance(value, torch.Tensor) else self._container
            self._done[id(value)] = value, convert(value)
            self._new[id(value)] = self._done[id(value)][1]
        return self._done[id(value)][1]

    def _inside(self, value: Any) -> bool:
        """Convert an item of a container; return True if something else stands for it."""
        # Tensors that are made in inference mode do not count writes.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            result = self(value)
        if result is value or not isinstance(value, torch.Tensor):
            return result is not value
        if result.dtype != value.dtype and result.device == value.device and not result.is_inference():
            self._cast.append((value, result, version_of(result)))
        return True

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device is not None:
            tensor = tensor.to(self._device, non_blocking=True)
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    def _container(self, value: Any) -> Any:
        if not (isinstance(value, (*_SEQUENCES, Mapping)) or _is_dataclass(value)):
            return value
        inner = [*_items(value).values(), *_attributes(value).values()]
        if not sum(map(self._inside, inner)):
            return value
        if self._copies or isinstance(value, (tuple, frozenset, MappingProxyType)):
            return _copied(value, self._new)
        _replace(value, self._new)
        self._changed.append(value)
        return value

    def take_back(self) -> None:
        """Put the caller's tensors back into the caller's containers, with what the module has written in place."""
        for own, replacement, version in self._cast:
            if version_of(replacement) != version and not (own.is_leaf and own.requires_grad):
                _write(own, replacement)
        back = {id(stands): own for own, stands in self._done.values()}
        for each in self._changed:
            _replace(each, back)

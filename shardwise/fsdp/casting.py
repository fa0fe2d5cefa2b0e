"""Tensors in the containers that modules take and return: they are found, cast and moved, and containers stay the caller's."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from shardwise.errors import ConfigError

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


def _changes(now: dict[Any, Any], before: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return [(key, item) for key, item in now.items() if key not in before or before[key] is not item]


@dataclasses.dataclass(slots=True)
class _Copy:
    """A container in which tensors were replaced.

    Attributes:
        original: the caller's container.
        copied: what the module gets instead.
        items, attributes: those of ``copied`` when the module got it.
        own: the caller's items and attributes by the ids of those that replace them.
    """

    original: Any
    copied: Any
    items: dict[Any, Any]
    attributes: dict[str, Any]
    own: dict[int, Any]

    def carry_back(self, back: Callable[[Any], Any]) -> None:
        """Change ``original`` as the module has changed ``copied``; no method of a user's class is called.

        Args:
            back: returns a value with the caller's containers in place of their copies.
        """

        def own(value: Any) -> Any:
            return self.own[id(value)] if id(value) in self.own else back(value)

        original, now, before = self.original, _items(self.copied), self.items
        if isinstance(original, dict):
            kind: Any = OrderedDict if isinstance(original, OrderedDict) else dict
            for key in before.keys() - now.keys():
                kind.pop(original, key, None)
            for key, item in _changes(now, before):
                kind.__setitem__(original, key, own(item))
        elif isinstance(original, list):
            start = min([index for index, _ in _changes(now, before)], default=len(now))
            list.__setitem__(original, slice(start, len(before)), [own(now[index]) for index in range(start, len(now))])
        elif isinstance(original, set):
            set.difference_update(original, map(own, {*before.values()}.difference(now.values())))
            set.update(original, map(own, {*now.values()}.difference(before.values())))
        attributes = _attributes(self.copied)
        for name in self.attributes.keys() - attributes.keys():
            object.__delattr__(original, name)
        for name, item in _changes(attributes, self.attributes):
            object.__setattr__(original, name, own(item))


def _copied(value: Any, items: dict[Any, Any], attributes: dict[str, Any]) -> Any:
    """Return a copy of ``value`` with other items and attributes.

    Raises: ConfigError if its class does not allow copies.
    """
    kind: Any = type(value)
    try:
        if isinstance(value, (tuple, frozenset)):
            base: Any = tuple if isinstance(value, tuple) else frozenset
            result = kind(items.values()) if hasattr(kind, "n_fields") else base.__new__(kind, items.values())
            attributes = _attributes(value) | attributes
        else:
            result: Any = MappingProxyType(items) if kind is MappingProxyType else copy.copy(value)
        if result is value:
            raise ConfigError("copy.copy() returns the object itself")
        if isinstance(result, dict):
            for key, item in items.items():
                dict.__setitem__(cast("dict[Any, Any]", result), key, item)
        elif isinstance(result, list):
            list.__setitem__(cast("list[Any]", result), slice(None), items.values())
        elif isinstance(result, set):
            set.clear(cast("set[Any]", result))
            set.update(cast("set[Any]", result), items.values())
        for name, item in attributes.items():
            object.__setattr__(result, name, item)
        if _is_own_dict(value):
            object.__setattr__(result, "__dict__", result)
    except Exception as error:
        raise ConfigError(
            f"a {kind.__qualname__} among a module's arguments or outputs holds tensors that a precision policy casts or that "
            f"move to the device, and cannot be copied: {type(error).__name__}: {error}. Give the class a __copy__, pass its "
            "tensors themselves, or set cast_forward_inputs=False in mp_policy and cast them where they are used"
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

    A container in which no tensor has to be replaced stays the same object.  Otherwise the module gets a copy of it, the
    caller's tensors stay in the caller's container, and :meth:`take_back` carries over what the module has put in, taken out,
    or written into a cast tensor of the container.  Lists, tuples, sets, dicts, dataclasses and mappings are containers,
    subclasses too.  Raises: ConfigError for a container that :func:`copy.copy` does not copy.
    """

    __slots__ = ("_cast", "_copies", "_device", "_done", "_dtype")

    def __init__(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        self._dtype, self._device = dtype, device
        self._done: dict[int, tuple[Any, Any]] = {}  # id -> a value that was seen, and what stands for it
        self._copies: list[_Copy] = []
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
        return self._done[id(value)][1]

    def _inside(self, value: Any) -> Any:
        # Tensors that are made in inference mode do not count writes.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            result = self(value)
        if result is value or not isinstance(value, torch.Tensor):
            return result
        if result.dtype != value.dtype and result.device == value.device and not result.is_inference():
            self._cast.append((value, result, result._version))
        return result

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device is not None:
            tensor = tensor.to(self._device, non_blocking=True)
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    def _container(self, value: Any) -> Any:
        if not (isinstance(value, (*_SEQUENCES, Mapping)) or _is_dataclass(value)):
            return value
        items, attributes = _items(value), _attributes(value)
        new = {key: self._inside(item) for key, item in items.items()}
        if isinstance(value, PackedSequence):
            new[1] = items[1]  # batch sizes stay on the CPU
        new_attributes = {name: self._inside(item) for name, item in attributes.items()}
        pairs = zip((*new.values(), *new_attributes.values()), (*items.values(), *attributes.values()), strict=True)
        own = {id(item): old for item, old in pairs if item is not old}
        if not own:
            return value
        result = _copied(value, new, dict(_changes(new_attributes, attributes)))
        self._copies.append(_Copy(value, result, _items(result), _attributes(result), own))
        return result

    def take_back(self, output: Any) -> Any:
        """Carry the module's changes of containers over to the caller's; return ``output`` with these instead of copies."""
        for own, replacement, version in self._cast:
            if replacement._version != version and not (own.is_leaf and own.requires_grad):
                _write(own, replacement)
        if not self._copies:
            return output
        back = Conversion()
        back._done = {id(each.copied): (each.copied, each.original) for each in self._copies}
        for each in self._copies:
            each.carry_back(back)
        return back(output)

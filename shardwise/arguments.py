"""Checks of arguments that several APIs share: names of keywords, ``ignored_params``, parameters over the same memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.errors import ArgumentTypeError, ConfigError, did_you_mean

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def explains_arguments(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Return ``function`` with a check that raises ArgumentTypeError for unknown keywords and suggests a similar name."""
    known, name_of_call = [*inspect.signature(function).parameters], function.__qualname__.removesuffix(".__init__")
    known = known[known[0] == "self" :]

    @functools.wraps(function)
    def checked(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                raise unknown_argument(name_of_call, name, known)
        return function(*args, **kwargs)

    return checked


def unknown_argument(call: str, name: str, known: Sequence[str]) -> ArgumentTypeError:
    """Return the error of ``call``, which takes the arguments ``known``, for ``name``."""
    return ArgumentTypeError(
        f"{call}() has no argument {name!r}.{did_you_mean(name, known)} It takes {', '.join(known)}"
    )


def explains_fields(kind: type[_Result]) -> type[_Result]:
    """Return the dataclass ``kind``, whose constructor has the check of :func:`explains_arguments`."""
    kind.__init__ = explains_arguments(kind.__init__)
    return kind


def ids_of_ignored(params: Iterable[object] | None, api: str) -> frozenset[int]:
    """Return the ids of the parameters in ``ignored_params``.

    Raises: ConfigError for anything else, such as names.
    """
    found = list(params or ())
    for each in found:
        if not isinstance(each, torch.Tensor):
            remedy = f"{{model.get_parameter({each!r})}}" if isinstance(each, str) else "a set of parameters"
            raise ConfigError(
                f"{api}: ignored_params holds {each!r}, expected the parameters themselves: ignored_params={remedy}"
            )
    return frozenset(map(id, found))


def check_whole(name: str, value: object, least: int, hint: str = "") -> None:
    """Raise ArgumentTypeError unless ``value`` is an int, ConfigError with ``hint`` if it is below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}{hint}")


def check_kind(name: str, value: object, kind: type, expected: str) -> None:
    """Raise ArgumentTypeError, which says what to write, unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name} is {value!r}; expected {expected}")


# ---- Tensors over the same memory (``nn.Parameter(embedding.weight)``, or an assignment to ``.data``).  In one process they
# change together; copies would become different.


class Extent:
    """The range of bytes of its storage that a tensor covers, gaps included; it keeps neither of them alive.

    Attributes:
        place: the storage, and the first byte in it.
        is_trained: the tensor requires a gradient.
    """

    def __init__(self, tensor: torch.Tensor, is_trained: bool) -> None:
        size = tensor.element_size()
        self._storage = StorageWeakRef(tensor.untyped_storage())  # while it lives, no other storage gets this identity
        self._form = tuple(tensor.shape), tensor.stride(), size
        self.place: tuple[int, int] = self._storage.cdata, int(tensor.storage_offset()) * size
        self.is_trained = is_trained

    @functools.cached_property
    def _end(self) -> int:
        shape, strides, size = self._form
        return self.place[1] + size + size * sum((n - 1) * step for n, step in zip(shape, strides, strict=True))

    @classmethod
    def of(cls, tensor: torch.Tensor, is_trained: bool) -> Extent | None:
        """Return the memory of ``tensor``; None if it has none (meta), or is a tensor subclass."""
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        return cls(tensor, is_trained) if is_plain and tensor.numel() and not tensor.is_meta else None

    def reaches(self, later: Extent) -> bool:
        """Return True if the range of ``later``, which begins no earlier, begins in the range of this one."""
        return self.place[0] == later.place[0] and later.place[1] < self._end

    def is_same_view(self, other: Extent) -> bool:
        """Return True if both have the same storage, offset, shape and strides."""
        return (self.place, self._form) == (other.place, other._form)


def find_shared(tensors: Sequence[Extent], num_copied: int) -> tuple[int, int] | None:
    """Return the indices of two tensors whose ranges of memory overlap, the lower first; None if there are none.

    One of them is among the first ``num_copied`` and one is trained: others change together, or not at all.
    """
    if len({each.place[0] for each in tensors}) == len(tensors):  # each has a storage of its own, as usual
        return None
    near: list[int] = []
    for index in sorted(range(len(tensors)), key=lambda each: tensors[each].place):
        memory = tensors[index]
        near = [each for each in near if tensors[each].reaches(memory)]
        for each in near:
            is_trained = memory.is_trained or tensors[each].is_trained
            if min(each, index) < num_copied and is_trained:
                return min(each, index), max(each, index)
        near.append(index)
    return None

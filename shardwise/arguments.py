"""Checks of arguments that several APIs share: names of keywords, and ``ignored_params``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch

from shardwise.errors import ArgumentTypeError, ConfigError, did_you_mean

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def explains_arguments(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Return ``function`` with a check that raises ArgumentTypeError for unknown keywords and suggests a similar name."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                raise ArgumentTypeError(
                    f"{function.__name__}() has no argument {name!r}.{did_you_mean(name, known)} It takes {', '.join(known)}"
                )
        return function(*args, **kwargs)

    return checked


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

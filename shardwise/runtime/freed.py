"""What a full parameter is while nothing computes with it.

While its memory is lent to others, reading it is an error that names it, not a crash.  While it stays registered between
calls, ``.data`` is watched: torch does not count what is written through that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise import torch_private
from shardwise.errors import StateError


class FreedParameter(nn.Parameter):
    """The class of a full parameter between reshard and the next unshard.

    Autograd may keep such a tensor for backward, which finds it full again; anyone else who has kept it must not use it.
    """

    fqn: str

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let attributes be read and set, refuse everything that may touch memory."""
        if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
            with torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        names = sorted({tensor.fqn for tensor in _freed_in(args)})
        raise StateError(
            f"the full form of {names} was given back after forward or backward and must not be used any more: read the "
            "parameter from its module inside forward, or call unshard() on the module first"
        )


class KeptParameter(nn.Parameter):
    """The class of a full parameter that is registered while no forward or backward runs."""

    is_touched = False

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tensor's values; whoever asks may write to them."""
        self.is_touched = True
        return torch_private.data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.is_touched = True
        torch_private.set_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


def _freed_in(args: Any) -> list[FreedParameter]:
    found: list[FreedParameter] = []
    for arg in args:
        if type(arg) is FreedParameter:
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += _freed_in(arg)
    return found


def mark_freed(parameter: nn.Parameter | None, fqn: str) -> None:
    """Refuse the use of ``parameter`` until :func:`mark_full`."""
    if parameter is not None and type(parameter) in (nn.Parameter, KeptParameter):
        parameter.__class__ = FreedParameter
        parameter.fqn = fqn  # pyright: ignore[reportAttributeAccessIssue]  of FreedParameter


def mark_kept(parameter: nn.Parameter | None) -> None:
    """Watch ``parameter`` until :func:`mark_full` or :func:`mark_freed`."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = KeptParameter
        parameter.is_touched = False  # pyright: ignore[reportAttributeAccessIssue]  of KeptParameter


def is_touched(parameter: nn.Parameter) -> bool:
    """Return True if somebody may have written to ``parameter`` through ``.data`` since :func:`mark_kept`."""
    return type(parameter) is KeptParameter and parameter.is_touched


def mark_full(parameter: nn.Parameter) -> None:
    """Make ``parameter`` an ordinary one again."""
    if type(parameter) is not nn.Parameter and type(parameter) in (FreedParameter, KeptParameter):
        parameter.__class__ = nn.Parameter

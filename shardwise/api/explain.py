"""Say what is wrong when a sharded module is used in a way that leaves its parameters sharded."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from shardwise.errors import StateError
from shardwise.runtime.param import UnitParam

_MIXED = "mixed torch.Tensor and DTensor"  # in DTensor's message


def explained_methods(original: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of ``original`` (not ``forward``, none of ``nn.Module``'s), made to explain DTensor's complaint.

    A method that computes with sharded parameters fails deep in DTensor's dispatch; the reason is the method that was called.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for cls in reversed(original.__mro__[: original.__mro__.index(nn.Module)] if nn.Module in original.__mro__ else ()):
        for name, value in vars(cls).items():
            is_method = callable(value) and hasattr(value, "__code__") and not name.startswith("__")
            if is_method and name != "forward" and not hasattr(nn.Module, name):
                methods[name] = _explained(value)
    return methods


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error) or isinstance(error, StateError):
                raise
            names = [name for name, param in self.named_parameters() if hasattr(param, "placements")]
            raise StateError(
                f"{type(self).__name__}.{function.__name__}() computed with parameters that are sharded outside of forward: "
                f"{names[:4]}{'...' if len(names) > 4 else ''}. Call register_fsdp_forward_method(module, "
                f"'{function.__name__}') once, or unshard() on the modules before it. ({error})"
            ) from error

    return method


def check_optimizers(params: Iterable[UnitParam]) -> None:
    """Raise StateError if an optimizer still holds parameters from before they were sharded: it would train nothing."""
    alive = {id(original): param for param in params if (original := param.original()) is not None}
    if not alive or not _held_by_optimizer(alive):
        return
    gc.collect()  # an optimizer that nobody can reach any more is no mistake
    alive = {key: param for key, param in alive.items() if param.original() is not None}
    held = _held_by_optimizer(alive)
    if held:
        raise StateError(
            f"an optimizer was built before fully_shard and holds the unsharded {held[:4]}{'...' if len(held) > 4 else ''}; "
            "its steps would not reach the model. Build the optimizer after fully_shard."
        )


def _held_by_optimizer(alive: dict[int, UnitParam]) -> list[str]:
    originals = [original for param in alive.values() if (original := param.original()) is not None]
    if not originals:
        return []
    held: list[str] = []
    for holder in gc.get_referrers(*originals):
        if type(holder) is not list or holder is originals:
            continue
        is_group = any(
            type(owner) is dict and owner.get("params") is holder and len(owner) > 1
            for owner in gc.get_referrers(holder)
        )
        if is_group:
            held += [alive[id(each)].fqn for each in holder if id(each) in alive]
    return held

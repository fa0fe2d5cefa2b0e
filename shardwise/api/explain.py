"""Say what is wrong when a sharded module is used in a way that leaves its parameters sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.errors import StateError

_MIXED = "mixed torch.Tensor and DTensor"  # in DTensor's message


# Attributes of torch's wrappers (DDP, FSDP1) that a sharded module does not have, and what to write instead.
OF_WRAPPERS = {
    "module": "a sharded module is the model itself: leave out .module",
    "no_sync": "to accumulate gradients, call model.set_requires_gradient_sync(False) before the first backwards and "
    "set_requires_gradient_sync(True) before the last, or run the first ones in with shardwise.policy(model, sync=False):",
    "summon_full_params": "call model.unshard() and model.reshard(), or read param.full_tensor() of one parameter",
    "clip_grad_norm_": "write torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
}


def explained_load(error: RuntimeError) -> RuntimeError:
    """Return ``error`` of ``load_state_dict``, or a StateError with advice if plain tensors were to be copied into shards."""
    if _MIXED not in str(error):
        return error
    return StateError(
        "load_state_dict was given plain tensors for parameters that are sharded. Call set_model_state_dict(model, "
        "state_dict, options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict, or "
        f"shardwise.checkpoint.load, which reads files straight into shards. ({str(error)[:400]})"
    )


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

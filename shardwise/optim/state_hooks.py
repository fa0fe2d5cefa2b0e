"""The hooks that users register on an optimizer for its state dicts, called where a door makes or loads these itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from shardwise.torch_private import state_dict_hooks


def before_state_dict(optimizer: Optimizer) -> None:
    """Call the hooks that come before a state dict is taken."""
    for hook in state_dict_hooks(optimizer, "state_dict_pre"):
        hook(optimizer)


def after_state_dict(optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Return ``found``, or what a hook has returned in its place."""
    for hook in state_dict_hooks(optimizer, "state_dict_post"):
        found = hook(optimizer, found) or found
    return found


def before_load(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is to be loaded: a shallow copy of ``state_dict``, or what a hook has returned in its place."""
    loaded: dict[str, Any] = dict(state_dict)
    for hook in state_dict_hooks(optimizer, "load_state_dict_pre"):
        loaded = hook(optimizer, loaded) or loaded
    return loaded


def after_load(optimizer: Optimizer) -> None:
    """Call the hooks that follow a load."""
    for hook in state_dict_hooks(optimizer, "load_state_dict_post"):
        hook(optimizer)

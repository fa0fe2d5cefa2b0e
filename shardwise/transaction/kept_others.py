"""What else users want back: a gradient scaler, a schedule, anything with a state dict, random numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from shardwise.errors import ConfigError

Undo = Callable[[], None]


def check_others(others: Sequence[Any]) -> None:
    """Raises: ConfigError for an object that cannot be kept."""
    for each in others:
        if not is_rng(each) and not (
            callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))
        ):
            raise ConfigError(
                "also= takes objects with state_dict() and load_state_dict(): a GradScaler, a schedule, a data loader; and "
                f"'rng' for random numbers; found {each!r}"
            )


def is_rng(each: object) -> bool:
    """Return True for the word that stands for random numbers."""
    return isinstance(each, str) and each == "rng"


def keep_others(others: Sequence[Any]) -> list[Undo]:
    """Remember ``others``, all generators of random numbers for "rng"; return what puts them back."""
    return [_keep_random_numbers() if is_rng(each) else _keep(each) for each in others]


def _keep(each: Any) -> Undo:
    if isinstance(each, torch.amp.GradScaler):
        # Its state dict leaves out which optimizers it has unscaled in the step that is undone.
        was = copy.deepcopy(vars(each))
        return lambda: vars(each).update(was)
    state = copy.deepcopy(each.state_dict())
    return lambda: each.load_state_dict(state)


def _keep_random_numbers() -> Undo:
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    device: Any = torch.get_device_module() if torch.accelerator.is_available() else None
    of_device: torch.Tensor | None = None if device is None else device.get_rng_state()

    def put_back() -> None:
        torch.random.set_rng_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        if device is not None and of_device is not None:
            device.set_rng_state(of_device)

    return put_back

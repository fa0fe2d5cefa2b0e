"""What every way to run an optimizer can do, and the forms in which parameters and state reach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from shardwise.optim.pieces import ParamSlice

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
Closure = Callable[[], Any]
Params = Sequence[Sequence[ParamSlice]]  # the pieces of each parameter of a group
Values = Mapping[str, Mapping[str, Any]]  # parameter name -> state key -> PerPiece, or one value for the parameter


class Stepper(Protocol):
    """Runs the inner ``optimizer``; state goes in and out by parameter name."""

    optimizer: Optimizer
    is_elementwise: bool

    def step(self, closure: Closure | None = None) -> Any:
        """Update all parameters; return the loss of ``closure``."""
        ...

    def mark(self) -> Callable[[], None]:
        """Return what brings back, after a step that is undone, what is neither the optimizer's state nor its groups."""
        ...

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group."""
        ...

    def states(self, blank: bool = False) -> Values:
        """Return the state of all parameters, or what it will look like; may be collective."""
        ...

    def local_states(self) -> Values:
        """Return the state that this rank holds; never collective."""
        ...

    def load(self, values: Values, options: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state and options; may be collective.  ``values`` may be kept: nobody else holds them."""
        ...


def loss_of(closure: Closure | None) -> Any:
    """Run ``closure``, where gradients are recorded again, and return its loss; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()

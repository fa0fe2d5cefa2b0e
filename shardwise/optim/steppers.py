"""The three ways to run an optimizer: on pieces, on whole matrices, or as it is where nothing is sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from shardwise.optim.pieces import Piece

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
Closure = Callable[[], Any]
Params = Sequence[Sequence[Piece]]  # the pieces of each parameter of a group
Values = Mapping[str, Mapping[str, list[Any]]]  # parameter name -> state key -> value of each piece

# Unfused updates pass over memory about ten times: joined further, they would leave the caches.
CACHED_NUMEL = 1 << 16
UNLIMITED_NUMEL = 1 << 62


class Stepper(Protocol):
    """Runs the inner ``optimizer``; all state goes in and out by parameter name and piece."""

    @property
    def optimizer(self) -> Optimizer: ...

    def step(self, closure: Closure | None) -> Any: ...

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None: ...

    def states(self, blank: bool = False) -> Values: ...

    def local_states(self) -> Values: ...

    def load(self, values: Values, options: Sequence[Mapping[str, Any]]) -> None: ...

"""The ways to run an optimizer: on pieces, with sums over ranks or none, on whole matrices, or as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.optim.elementwise import ElementwiseStep
from shardwise.optim.forms import load_indexed
from shardwise.optim.pieces import is_sharded_tensor, local_of, state_of_piece
from shardwise.optim.protocol import Closure, MakeOptimizer, Params, Stepper, Values
from shardwise.optim.registry import UpdateRule, is_known, update_rule
from shardwise.optim.summed import SummedStep
from shardwise.optim.trial import states_after_zeros, takes_sums, why_not_cut
from shardwise.optim.whole_matrix import WholeMatrixStep


def make_stepper(
    make: MakeOptimizer,
    optimizer_class: type[Optimizer],
    groups: Sequence[tuple[Params, Mapping[str, Any]]],
    declared: UpdateRule | None,
    is_flat: bool,
) -> Stepper:
    """Return the way to run ``optimizer_class`` over ``groups``.

    Raises: ConfigError if none is right.
    """
    pieces = [piece for params, _ in groups for param in params for piece in param]
    is_plain = not any(isinstance(p.param, DTensor) or is_sharded_tensor(p.param) for p in pieces)
    has_sums, device = False, local_of(pieces[0]).device
    try:
        rule = update_rule(optimizer_class, declared)
        if rule == "elementwise" and not is_known(optimizer_class):
            _check_cut(make, optimizer_class, groups[0][1], device)
            has_sums = takes_sums(make, groups[0][1], device)
    except ConfigError:
        if not is_plain:
            raise
        return PlainStep(make, groups)
    if has_sums:
        return PlainStep(make, groups) if is_plain else SummedStep(make, groups)
    if rule == "elementwise":
        return ElementwiseStep(make, groups, is_flat, is_known(optimizer_class))
    return PlainStep(make, groups) if is_plain else WholeMatrixStep(make, optimizer_class, groups)


def _check_cut(
    make: MakeOptimizer, optimizer_class: type[Optimizer], options: Mapping[str, Any], device: torch.device
) -> None:
    name = optimizer_class.__name__
    advice = (
        "update='whole_matrix' gathers each parameter to one rank for the step, which is right for any such optimizer"
    )
    try:
        reason = why_not_cut(make, options, device)
    except Exception as error:
        raise ConfigError(
            f"{name} is declared 'elementwise' but cannot step on parts of tensors ({error}); {advice}"
        ) from error
    if reason is not None:
        raise ConfigError(
            f"{name} is declared 'elementwise' but {reason}: over shards it would train something else; {advice}"
        )


class PlainStep:
    """Runs an optimizer of any kind on plain tensors, as it is."""

    is_elementwise = False

    def __init__(self, make: MakeOptimizer, groups: Sequence[tuple[Params, Mapping[str, Any]]]) -> None:
        self._make = make
        self._params = [piece for params, _ in groups for (piece,) in params]
        self.optimizer = make(
            [{**options, "params": [piece.param for (piece,) in params]} for params, options in groups]
        )

    def step(self, closure: Closure | None = None) -> Any:
        """Step the optimizer itself, which may call ``closure`` many times."""
        with torch.enable_grad():
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def mark(self) -> Callable[[], None]:
        """Return nothing to do: all is in the optimizer."""
        return lambda: None

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group of plain tensors.  Raises: ConfigError for sharded ones."""
        pieces = [piece for param in params for piece in param]
        sharded = [p.name for p in pieces if isinstance(p.param, DTensor) or is_sharded_tensor(p.param)]
        if sharded:
            raise ConfigError(
                f"{type(self.optimizer).__name__} was set up for plain tensors and {sharded} are sharded; put them into "
                "a ShardedOptimizer of their own"
            )
        self.optimizer.add_param_group({**options, "params": [piece.param for piece in pieces]})
        self._params += pieces

    def states(self, blank: bool = False) -> Values:
        """Return the live state, or the state after a step on zeros."""
        if blank:
            states = states_after_zeros(self._make, self.optimizer.param_groups, closure=lambda: 0.0)
        else:
            states = [dict(self.optimizer.state.get(piece.param, {})) for piece in self._params]
        return {piece.name: state for piece, state in zip(self._params, states, strict=True) if state}

    def local_states(self) -> Values:
        """Return the live state."""
        return self.states()

    def load(self, values: Values, options: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state and options."""
        states = [state_of_piece(values[p.name], 0) if p.name in values else None for p in self._params]
        load_indexed(self.optimizer, states, options)

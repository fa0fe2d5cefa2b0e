"""The three ways to run an optimizer: on pieces, on whole matrices, or as it is where nothing is sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.optim.elementwise import ElementwiseStep
from shardwise.optim.pieces import PerPiece, Piece, copied, is_sharded_tensor, local_of
from shardwise.optim.registry import UpdateRule, is_known, step_cost, update_rule
from shardwise.optim.trial import why_not_cut
from shardwise.optim.whole_matrix import WholeMatrixStep

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
Closure = Callable[[], Any]
Params = Sequence[Sequence[Piece]]  # the pieces of each parameter of a group
Values = Mapping[str, Mapping[str, Any]]  # parameter name -> state key -> PerPiece, or one value for the parameter


class Stepper(Protocol):
    """Runs the inner ``optimizer``; state goes in and out by parameter name."""

    optimizer: Optimizer
    is_elementwise: bool

    def step(self, closure: Closure | None) -> Any:
        """Update all parameters; return the loss of ``closure``."""
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
        """Replace all state and options; may be collective."""
        ...


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
    try:
        rule = update_rule(optimizer_class, declared)
        if rule == "elementwise" and not is_known(optimizer_class):
            _check_cut(make, optimizer_class, groups[0][1], local_of(pieces[0]).device)
    except ConfigError:
        if not is_plain:
            raise
        return PlainStepper(make, groups)
    if rule == "elementwise":
        return PieceStepper(make, groups, is_flat, is_known(optimizer_class))
    return PlainStepper(make, groups) if is_plain else MatrixStepper(make, optimizer_class, groups)


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


class PlainStepper:
    """Runs an optimizer of any kind on plain tensors, as it is."""

    def __init__(self, make: MakeOptimizer, groups: Sequence[tuple[Params, Mapping[str, Any]]]) -> None:
        self._make = make
        self.is_elementwise = False
        self._params = [piece for params, _ in groups for (piece,) in params]
        self.optimizer = make(
            [{**options, "params": [piece.param for (piece,) in params]} for params, options in groups]
        )

    def step(self, closure: Closure | None) -> Any:
        """Step the optimizer itself, which may call ``closure`` many times."""
        with torch.enable_grad():
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)

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
        """Return the live state, or the state after a step on copies."""
        optimizer, tensors = self._trial() if blank else (self.optimizer, [p.param for p in self._params])
        found: dict[str, dict[str, Any]] = {}
        for piece, tensor in zip(self._params, tensors, strict=True):
            state = optimizer.state.get(tensor)
            if state:
                found[piece.name] = _named(state, tensor.shape)
        return found

    def local_states(self) -> Values:
        """Return the live state."""
        return self.states()

    def load(self, values: Values, options: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state and options."""
        number = {id(piece.param): index for index, piece in enumerate(self._params)}
        state = {i: _taken(values[p.name], 0) for i, p in enumerate(self._params) if p.name in values}
        groups = [
            {**option, "params": [number[id(param)] for param in group["params"]]}
            for option, group in zip(options, self.optimizer.param_groups, strict=True)
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _trial(self) -> tuple[Optimizer, list[torch.Tensor]]:
        copies = {id(piece.param): torch.zeros_like(piece.param) for piece in self._params}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [copies[id(p)] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        for copy in copies.values():
            copy.requires_grad_(False)
            copy.grad = torch.zeros_like(copy)
        trial = self._make(groups)
        trial.step(lambda: 0.0)
        return trial, list(copies.values())


class PieceStepper:
    """Runs an element-wise optimizer on local pieces."""

    def __init__(
        self, make: MakeOptimizer, groups: Sequence[tuple[Params, Mapping[str, Any]]], is_flat: bool, is_known: bool
    ) -> None:
        self.is_elementwise = True
        flattened = [([piece for param in params for piece in param], options) for params, options in groups]
        self._params = [list(param) for params, _ in groups for param in params]
        self._inner = ElementwiseStep(make, flattened, is_flat, is_known)
        self.optimizer = self._inner.optimizer
        if any(group.get("differentiable") for group in self.optimizer.param_groups):
            raise ConfigError("differentiable=True needs the parameters themselves; it cannot be used with shards")

    @property
    def num_updates(self) -> int:
        """Number of tensors that the optimizer sees."""
        return self._inner.num_runs

    def step(self, closure: Closure | None) -> Any:
        """Run ``closure``, then update all pieces."""
        loss = _run(closure)
        self._inner.step()
        return loss

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group."""
        self._inner.add_group([piece for param in params for piece in param], options)
        self._params += [list(param) for param in params]

    def states(self, blank: bool = False) -> Values:
        """Return the state by name."""
        by_piece = self._inner.blank_states() if blank else self._inner.states()
        found: dict[str, dict[str, Any]] = {}
        for pieces in self._params:
            states = [by_piece[piece] for piece in pieces if piece in by_piece]
            if len(states) == len(pieces):
                found[pieces[0].name] = _joined(states, pieces)
        return found

    def local_states(self) -> Values:
        """Return the state by name."""
        return self.states()

    def load(self, values: Values, options: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state and options."""
        state = {
            piece: _taken(values[piece.name], index)
            for pieces in self._params
            if pieces[0].name in values
            for index, piece in enumerate(pieces)
        }
        self._inner.load(state, options)


class MatrixStepper:
    """Runs a whole-matrix optimizer on the owners of matrices."""

    def __init__(
        self,
        make: MakeOptimizer,
        optimizer_class: type[Optimizer],
        groups: Sequence[tuple[Params, Mapping[str, Any]]],
    ) -> None:
        self._make = make
        self.is_elementwise = False
        self._check(groups)
        device = local_of(groups[0][0][0][0]).device
        self._inner = WholeMatrixStep(make, lambda shape: step_cost(optimizer_class, shape), groups, device)
        self.optimizer = self._inner.optimizer

    def _check(self, groups: Sequence[tuple[Params, Mapping[str, Any]]]) -> None:
        # An owner sees only its own matrices: what the class refuses must be refused on every rank.
        self._make(
            [
                {
                    **options,
                    "params": [
                        torch.empty(tuple(p[0].param.shape), dtype=p[0].param.dtype, device="meta") for p in params
                    ],
                }
                for params, options in groups
            ]
        )

    @property
    def owners(self) -> Mapping[str, int]:
        """The global rank that updates each sharded parameter."""
        return self._inner.owners()

    def step(self, closure: Closure | None) -> Any:
        """Run ``closure``, then update all matrices.  Collective."""
        loss = _run(closure)
        self._inner.step()
        return loss

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group.  Collective."""
        self._check([(params, options)])
        self._inner.add_group(params, options)

    def states(self, blank: bool = False) -> Values:
        """Return the state by name, sent from the owners.  Collective."""
        return self._inner.states(blank)

    def local_states(self) -> Values:
        """Return the state that this rank holds: of the matrices that it owns, and whole."""
        return self._inner.local_states()

    def load(self, values: Values, options: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state and options.  Collective."""
        self._inner.load(values, options)


def _run(closure: Closure | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _is_per_element(value: object, shape: torch.Size | tuple[int, ...]) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == tuple(shape)


def _named(state: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
    return {key: PerPiece([value]) if _is_per_element(value, shape) else value for key, value in state.items()}


def _joined(states: Sequence[Mapping[str, Any]], pieces: Sequence[Piece]) -> dict[str, Any]:
    shape = local_of(pieces[0]).shape
    return {
        key: PerPiece(state[key] for state in states) if _is_per_element(value, shape) else value
        for key, value in states[0].items()
    }


def _taken(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the state of piece ``index``; what all pieces share is copied, since each optimizer tensor counts alone."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found[key] = value[index] if isinstance(value, PerPiece) else copied(value)
    return found

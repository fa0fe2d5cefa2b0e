"""An optimizer as it was before its step: parameters, state that was there, options.  Copied when its step begins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer

from shardwise.transaction.kept_tensors import Copies, holders_of

Undo = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Optimized:
    """An optimizer that users step, as a transaction sees it.

    Attributes:
        outer: what users hold.  inner: what keeps the state; the same for a plain optimizer.
        mark: remembers what neither is a tensor nor an option, and returns what puts it back.
        renew: what follows on every rank when a step is undone, whether this rank has come to it or not.
    """

    outer: Optimizer
    inner: Optimizer
    mark: Callable[[], Undo]
    renew: Callable[[], None]


class KeptOptimizer:
    """Keeps one optimizer: options when a transaction begins, parameters and state when its first step in it does."""

    def __init__(self, optimized: Optimized) -> None:
        self.optimized = optimized
        self._params, self._values = Copies(), Copies()
        self._options: list[_Options] = []
        self._state: list[_State] | None = None  # None: it has not stepped
        self._undo_mark: Undo | None = None

    def begin(self) -> None:
        """Remember the options."""
        found = self.optimized
        optimizers = [found.outer] if found.inner is found.outer else [found.outer, found.inner]
        self._options = [_options_of(group) for each in optimizers for group in each.param_groups]
        self._state = self._undo_mark = None

    def before_step(self) -> int:
        """Copy parameters and state, unless that was done in this transaction; return the bytes."""
        if self._state is not None:
            return 0
        found = self.optimized
        params = [
            holder for group in found.outer.param_groups for param in group["params"] for holder in holders_of(param)
        ]
        num_bytes = self._params.take(params)
        self._state = [_state_of(key, entry) for key, entry in found.inner.state.items()]
        self._undo_mark = found.mark()
        return num_bytes + self._values.take([value for each in self._state for value in each.tensors()])

    def let_go(self) -> None:
        """Hold nothing of the optimizer's any longer."""
        self._params.let_go()
        self._values.let_go()
        self._options = []
        self._state = self._undo_mark = None

    def put_back(self) -> None:
        """Undo its step, if it has begun one, and the options."""
        state = self.optimized.inner.state
        if self._state is not None:
            self._params.put_back()
            self._values.put_back()
            state.clear()
            for was in self._state:
                was.entry.clear()
                was.entry.update(was.values)
                state[was.key] = was.entry
        if self._undo_mark is not None:
            self._undo_mark()
        for options in self._options:
            options.put_back()
        self._state = self._undo_mark = None
        self.optimized.renew()


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """The state of one tensor: ``entry`` is the optimizer's dict, ``values`` what was in it (others than tensors as copies)."""

    key: torch.Tensor
    entry: dict[str, Any]
    values: dict[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        return [value for value in self.values.values() if isinstance(value, torch.Tensor)]


def _state_of(key: torch.Tensor, entry: dict[str, Any]) -> _State:
    return _State(key, entry, {name: _kept(value) for name, value in entry.items()})


def _kept(value: Any) -> Any:
    return value if isinstance(value, (torch.Tensor, int, float, str, bool, type(None))) else copy.deepcopy(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """A param group: the dict, its options, the list of parameters and what was in it."""

    group: dict[str, Any]
    options: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    params: list[Any]

    def put_back(self) -> None:
        for name in [name for name in self.group if name != "params" and name not in self.options]:
            del self.group[name]
        self.group.update(self.options)
        for name, was in self.tensors.items():
            self.group[name].detach().copy_(was)
        cast(list[Any], self.group["params"])[:] = self.params


def _options_of(group: dict[str, Any]) -> _Options:
    options = {name: value for name, value in group.items() if name != "params"}
    tensors = {name: value.detach().clone() for name, value in options.items() if isinstance(value, torch.Tensor)}
    return _Options(group, options, tensors, list(group["params"]))


def watch(optimizer: Optimizer, before: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Let ``before`` be called when ``optimizer`` is about to step; return what ends that."""
    return optimizer.register_step_pre_hook(lambda each, *_: before(each)).remove


def optimized_as_it_is(optimizer: Optimizer) -> Optimized:
    """Return how a transaction sees an optimizer of ``torch.optim``."""
    return Optimized(optimizer, optimizer, lambda: _nothing, _nothing)


def _nothing() -> None:
    return None


def distinct(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return each once."""
    return list({id(each): each for each in optimizers}.values())

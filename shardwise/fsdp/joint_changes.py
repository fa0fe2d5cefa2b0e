"""Optimizer steps and clipping in a ``Join``: a rank that has left its body makes the changes of the others on its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.consistency.process_groups import gather_objects
from shardwise.errors import ConfigError, StateError
from shardwise.formatting import format_ranks
from shardwise.fsdp.clip import Limit, part_of
from shardwise.fsdp.param import ShardedParam

_ONE_STEP = "put Join around the forwards and backwards of one step, and clip and step after it"


@dataclass(frozen=True, slots=True)
class JointChange:
    """A change of gradients or parameters, which all ranks make.

    Attributes:
        params: the parameters.
        optimizer: the optimizer that steps on them, or None: ``clip(params, *args, **kwargs)`` is called.
        has_closure: the step has a closure.
    """

    params: Sequence[torch.Tensor]
    optimizer: Optimizer | None = None
    has_closure: bool = False
    clip: Callable[..., object] | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class _Message:
    """A change for other ranks: numbers of parameters and of the optimizer, its options, and why the change is refused."""

    places: Sequence[int]
    number: int
    options: Sequence[Mapping[str, Any]]
    change: JointChange
    why: str


class JointChanges:
    """The changes of gradients and parameters in a ``Join`` with optimizers, which ranks that have left make, too.

    Args:
        params: all parameters, in an order that is the same on all ranks.  group: a gloo group of the ranks.
        device: of norms.

    Attributes:
        repeats: this rank, which has left, repeats a change of the others.
    """

    def __init__(self, params: Sequence[ShardedParam], group: dist.ProcessGroup, device: torch.device) -> None:
        self._params, self._group, self._device = params, group, device
        self._optimizers: Sequence[Optimizer] = ()
        # The norm of this rank's gradients after the last backward; None once they may have been changed.
        self._norm: torch.Tensor | None = None
        self._last = torch.zeros((), device=device)  # the same, kept
        self.repeats = False

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """Step ``optimizers`` from now on; collective.  Raises: ConfigError on all ranks if one that left could not do it."""
        known = {id(param.sharded) for param in self._params}
        what: list[str] = []
        for optimizer in optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            num_others = len([param for param in params if id(param) not in known])
            others = f" with {num_others} parameters that the model has not sharded" * (num_others > 0)
            what.append(f"{type(optimizer).__name__}{others}")
        said = gather_objects(what, self._group)
        if wrong := [each for names in said for each in names if " " in each]:
            raise ConfigError(
                f"Join was given {wrong[0]}, so a rank that leaves could not step with the others; {_ONE_STEP}"
            )
        if any(each != what for each in said):
            raise ConfigError(
                f"ranks differ in the optimizer of Join([model], optimizer=...): {said}; give the same on all"
            )
        self._optimizers, self._norm, self._last = optimizers, None, self._norm_now()

    def end(self) -> None:
        """Step no optimizers any more."""
        self._optimizers, self._norm = (), None

    def note_gradients(self, have_hooks: bool) -> None:
        """Note the gradients after a backward; ``have_hooks``: hooks of users come next and may change them."""
        if self._optimizers:
            self._last = self._norm_now()
            self._norm = None if have_hooks else self._last

    def _norm_now(self) -> torch.Tensor:
        gradients = [gradient for param in self._params if (gradient := param.sharded.grad) is not None]
        return Limit(0.0).power([part_of(each).local for each in gradients], self._device).nan_to_num()

    def clear(self, is_active: bool, is_next: bool) -> None:
        """Clear gradients on ranks that have left, as those have that begin a backward, or leave last (``is_next``)."""
        if not self._optimizers:
            return
        params, now = [param.sharded for param in self._params], bool(self._norm_now())
        # A rank whose gradients were zeros before, such as one with empty shards, cannot tell whether they were cleared.
        mine = [param.grad is not None for param in params], now, now or bool(self._last)
        every = [
            each for each in gather_objects((is_next, *mine) if is_active else None, self._group) if each is not None
        ]
        known = [each for each in every if each[0] and each[3]] or [each for each in every if each[3]]
        are_kept = any(is_kept for _, _, is_kept, _ in known)
        for place, param in enumerate(params if not is_active else ()):
            if not any(has[place] for is_next, has, _, _ in every if is_next):
                param.grad = None
            elif param.grad is not None and not are_kept:
                part_of(param.grad).local.zero_()

    def make(self, change: JointChange | None, left: Sequence[int]) -> None:
        """Tell ranks ``left``, which have left, what to change; None: this rank is one of them, and does it.

        Raises: StateError on all ranks if these cannot do it.
        """
        mine = None if change is None else self._message(change)
        said: list[_Message] = [each for each in gather_objects(mine, self._group) if each is not None]
        first = said[0]
        why = next((each.why for each in said if each.why), "")
        if any((each.number, each.places) != (first.number, first.places) for each in said):
            why = "the ranks that are still in it differ in what they clip or step"
        if why:
            raise StateError(
                f"gradients are clipped or an optimizer steps inside of a Join that {format_ranks(left)} has left: {why}"
            )
        self._norm = None
        if change is not None:
            return
        self.repeats = True
        try:
            if first.change.clip is not None:
                params = [self._params[place].sharded for place in first.places]
                first.change.clip(params, *first.change.args, **first.change.kwargs)
            else:
                _step(self._optimizers[first.number], first.options)
        finally:
            self.repeats = False

    def _message(self, change: JointChange) -> _Message:
        optimizer, number = change.optimizer, -1
        places: list[int] = []
        options: list[dict[str, Any]] = []
        if optimizer is not None:
            number = next((at for at, each in enumerate(self._optimizers) if each is optimizer), -1)
            options = [
                {name: _on_host(group[name]) for name in group if name != "params"} for group in optimizer.param_groups
            ]
        else:
            by_id = {id(param.sharded): place for place, param in enumerate(self._params)}
            places = [by_id.get(id(param), -1) for param in change.params]
        why = ""
        if not self._optimizers:
            why = f"its shards would stay as they are. Write Join([model], optimizer=optimizer), or {_ONE_STEP}"
        elif optimizer is not None and number < 0:
            why = f"this {type(optimizer).__name__} is not the optimizer of Join([model], optimizer=...)"
        elif change.has_closure:
            why = "step has a closure, which that rank cannot call"
        elif -1 in places:
            why = "parameters that are not sharded are clipped, too"
        elif self._have_changed() or getattr(optimizer, "grad_scale", None) is not None:
            why = (
                "other code than clip_grad_norm_ has changed gradients after backward (GradScaler, clip_grad_value_, yours), "
                f"which that rank cannot repeat. Remove it, or {_ONE_STEP}"
            )
        return _Message(
            places, number, options, JointChange((), None, False, change.clip, change.args, change.kwargs), why
        )

    def _have_changed(self) -> bool:
        return self._norm is not None and not self._norm.equal(self._norm_now())


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def _step(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Step with these options of the groups."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, value in values.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
    optimizer.step()

"""Optimizer steps and clipping in a ``Join``: a rank that has left its body makes the changes of the others on its shards."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.consistency.process_groups import gather_objects
from shardwise.errors import ConfigError, StateError
from shardwise.formatting import format_ranks
from shardwise.fsdp.clip import part_of
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.waiting_gradients import WaitingGradient

# What has become of a gradient since the last backward or clip; "none": there was none before; "unknown": it was zeros, and is.
_Seen = Literal["none", "cleared", "zeroed", "kept", "unknown", "changed"]
_ONE_STEP = "put Join around the forwards and backwards of one step, and clip and step after it"
_CHANGED = (
    "other code than clip_grad_norm_ has changed gradients after backward (GradScaler, clip_grad_value_, yours), which a rank "
    f"that has left cannot repeat. Remove it, or {_ONE_STEP}"
)


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
    """A change for other ranks: numbers of parameters and of the optimizer, its options, and why the change is refused.

    ``seen``: what has become of gradients.
    """

    places: Sequence[int]
    number: int
    options: Sequence[Mapping[str, Any]]
    change: JointChange
    why: str
    seen: list[_Seen]


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
        self._sizes: list[list[int]] = []
        self._before: torch.Tensor | None = None  # what :meth:`note_gradients` has noted; None: nothing
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
        self._optimizers, self._sizes = optimizers, [_sizes(each) for each in optimizers]
        self.note_gradients()

    def end(self) -> None:
        """Step no optimizers any more."""
        self._optimizers = ()

    def note_gradients(self, have_hooks: bool = False) -> None:
        """Note the gradients after a backward or a clip; ``have_hooks``: hooks of users come next and may change them."""
        if self._optimizers:
            self._before = None if have_hooks else self._gradients_now()

    def _gradients_now(self) -> torch.Tensor:
        """Return the norm of each gradient, and the sum of one: it shows changes of signs.  -1: none, -2: gradients wait."""
        shown = [param.sharded.grad for param in self._params]
        waits = [isinstance(gradient, WaitingGradient) for gradient in shown]
        gradients = [None if is_waiting else gradient for gradient, is_waiting in zip(shown, waits, strict=True)]
        parts = [None if gradient is None else part_of(gradient).local for gradient in gradients]
        values = [part.abs() if part.is_complex() else part for part in parts if part is not None and part.numel()]
        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        norms = iter(torch_private.norms_of(values, 2.0, dtype) if values else ())
        none, waiting, zero = torch.tensor([-1.0, -2.0, 0.0], dtype=dtype, device=self._device)
        found = [
            (waiting if is_waiting else none) if part is None else next(norms).to(none) if part.numel() else zero
            for part, is_waiting in zip(parts, waits, strict=True)
        ]
        return torch.stack([*found, values[0].sum().to(none) if values else zero]).nan_to_num()

    def _seen(self) -> list[_Seen]:
        """Return what has become of each gradient since :meth:`note_gradients`."""
        *now, first = self._gradients_now().tolist()
        *before, first_before = [-1.0] * (len(now) + 1) if self._before is None else self._before.tolist()
        has_turned = first == -first_before != 0
        return [_compared(old, new, has_turned) for old, new in zip(before, now, strict=True)]

    def clear(self, is_active: bool, is_next: bool) -> None:
        """Clear gradients on ranks that have left, as those have that begin a backward, or leave last (``is_next``)."""
        if self._optimizers:
            every = gather_objects((is_next, self._seen()) if is_active else self._has_any(), self._group)
            said = [each for each in every if isinstance(each, tuple)]
            if len(said) < self._group.size():  # else no rank has left
                has_any = any(each for each in every if isinstance(each, bool))
                self._clear_as(
                    [seen for is_next, seen in said if is_next], [seen for _, seen in said], is_active, has_any
                )

    def _has_any(self) -> bool:
        """Return True if a gradient of this rank is not zeros."""
        return bool((self._gradients_now()[:-1] > 0).any())

    def _clear_as(
        self, said: Sequence[list[_Seen]], every: Sequence[list[_Seen]], is_active: bool, has_any: bool
    ) -> None:
        # A rank whose gradients were zeros before, such as one with empty shards, cannot tell whether they were cleared.
        if any("changed" in seen for seen in said):
            raise StateError(f"gradients are used inside of a Join that ranks have left: {_CHANGED}")
        found = {each for seen in every for each in seen}
        if has_any and "unknown" in found and not found & {"kept", "zeroed"}:
            raise StateError(
                "all gradients of the ranks that are still in a Join are zeros or empty, so these cannot tell a rank that has "
                f"left whether they were cleared: call zero_grad(set_to_none=True), or {_ONE_STEP}"
            )
        any_is_kept = any("kept" in seen for seen in said)
        are_cleared = any("zeroed" in seen for seen in said) and not any_is_kept
        are_dropped = any("cleared" in seen for seen in said) and not any_is_kept
        for place, param in enumerate([param.sharded for param in self._params] if not is_active else ()):
            first = {seen[place] for seen in said}
            known = first if first & {"kept", "zeroed"} else {seen[place] for seen in every}
            if isinstance(param.grad, WaitingGradient):  # ranks that used other modules may have none
                if first & {"cleared", "zeroed"} or are_dropped or are_cleared:
                    param.grad = None
            elif first & {"none", "cleared"}:
                param.grad = None
            elif param.grad is not None and "kept" not in known and ("zeroed" in known or are_cleared):
                part_of(param.grad).local.zero_()

    def digest_of(self, change: JointChange | None) -> int | None:
        """Return a digest of the options of a step; None for another change, or without optimizers."""
        if change is None or change.optimizer is None or not self._optimizers:
            return None
        return zlib.crc32(repr(_options(change.optimizer)).encode()) >> 1

    def make(self, change: JointChange | None, left: Sequence[int]) -> None:
        """Tell ranks ``left``, which have left, what to change; None: this rank is one of them, and does it.

        Raises: StateError on all ranks if these cannot do it.
        """
        every = gather_objects(self._has_any() if change is None else self._message(change), self._group)
        said = [each for each in every if isinstance(each, _Message)]
        first = said[0]
        why = next((each.why for each in said if each.why), "")
        if any((each.number, each.places) != (first.number, first.places) for each in said):
            why = "the ranks that are still in it differ in what they clip or step"
        if why:
            raise StateError(
                f"gradients are clipped or an optimizer steps inside of a Join that {format_ranks(left)} has left: {why}"
            )
        seen = [each.seen for each in said]
        self._clear_as(seen, seen, change is not None, any(each for each in every if isinstance(each, bool)))
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
        if optimizer is not None:
            number = next((at for at, each in enumerate(self._optimizers) if each is optimizer), -1)
        else:
            by_id = {id(form): at for at, param in enumerate(self._params) for form in (param.sharded, param.full)}
            places = [by_id.get(id(param), -1) for param in change.params]
        why = ""
        if not self._optimizers:
            why = f"its shards would stay as they are. Write Join([model], optimizer=optimizer), or {_ONE_STEP}"
        elif optimizer is not None and number < 0:
            why = f"this {type(optimizer).__name__} is not the optimizer of Join([model], optimizer=...)"
        elif optimizer is not None and _sizes(optimizer) != self._sizes[number]:
            why = f"this {type(optimizer).__name__} has other parameters than when the Join began"
        elif change.has_closure:
            why = "step has a closure, which that rank cannot call"
        elif -1 in places:
            why = "parameters that are not sharded are clipped, too"
        elif getattr(optimizer, "grad_scale", None) is not None:
            why = _CHANGED
        told = JointChange((), None, False, change.clip, change.args, change.kwargs)
        return _Message(places, number, _options(optimizer), told, why, self._seen() if self._optimizers else [])


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _compared(before: float, now: float, has_turned: bool) -> _Seen:
    """Compare the norm of a gradient, -1: none, -2: it waits, with that before; ``has_turned``: the sign of one of them."""
    if now < 0:
        return "kept" if now < -1 else "none" if before == -1 else "cleared"
    if before < 0:
        return "kept" if now else "zeroed"
    if before == now:
        return "unknown" if not now else "changed" if has_turned else "kept"
    return "changed" if now else "zeroed"


def _options(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Return the options of each group; objects of other kinds are those of the rank itself."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [
        {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params" and isinstance(value, torch.Tensor | int | float | str | tuple)
        }
        for group in groups
    ]


@torch.no_grad()
def _step(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Step with these options of the groups."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, value in values.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].copy_(torch.tensor(value, device="cpu"))
            else:
                group[name] = value
    optimizer.step()

"""Copies of an optimizer's parameters, state and options from before its step; taken when the step begins."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.clip import OwnedGradient
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.local_gradients import EarlierGradients, Gradients
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.roots import Attachment, attachment_of
from shardwise.fsdp.unit import Unit
from shardwise.optim.slices import copied
from shardwise.plan.schedule import UnitPolicy

# ---- What a step changes in units besides tensors, saved and restored; engines are recreated after a failed step.
# Ranks that stopped at different places know different things about each other: plans, numbers of exchanges, passes of
# links. All of that belongs to the engine, so after a failure it is created again as at the first forward.


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit before the step: gradients of earlier backwards, which never change in place, and facts on backward."""

    unit: Unit
    held: Gradients
    partial: Gradients
    unsynced: frozenset[ShardedParam]
    policy: UnitPolicy
    counts: bool
    ended_late: bool
    num_replica_sums: tuple[int, ...]


class KeptUnits:
    """The units of ``model`` as they were when :meth:`keep` was called."""

    def __init__(self, model: nn.Module) -> None:
        found = {id(each): each for module in model.modules() if (each := attachment_of(module)) is not None}
        self._attachments = list(found.values())
        self._units: list[_Unit] = []
        self._is_last: dict[int, bool] = {}
        self._marks: list[Callable[[], None]] = []

    def keep(self) -> int:
        """Save their state; return the bytes copied.

        Raises: StateError if gradients of a backward are pending.
        """
        for engine in self._engines():
            if engine.is_in_step or engine.reductions.has_deferred or engine.manual.awaits_completion:
                raise StateError(
                    "a transaction begins between steps, without pending gradients: found a forward or backward that "
                    "has not ended, one with set_is_last_backward(False), or one that waits for finalize_backward(). Begin "
                    "the transaction before it"
                )
            self._is_last[id(engine)] = engine.is_last_backward
        self._units = [_unit_as_it_is(each.unit) for each in self._attachments]
        groups = (group for each in self._attachments for group in each.unit.groups)
        coded = [group.compression for group in groups if group.compression is not None]
        self._marks = [each.mark() for each in coded]
        return sum(each.residual_bytes for each in coded)

    def restore(self) -> None:
        """Reshard every unit, forget the step, and drop the engines.  Does not communicate."""
        for engine in self._engines():
            engine.forget_step()
            engine.is_last_backward = self._is_last.get(id(engine), True)
        for was in self._units:
            was.unit.earlier.put_back(was.held, was.partial)
            was.unit.earlier.unsynced = set(was.unsynced)
            was.unit.policy = was.policy
            was.unit.backward.counts, was.unit.backward.ended_late = was.counts, was.ended_late
            for group, number in zip(was.unit.groups, was.num_replica_sums, strict=True):
                group.num_replica_sums = number
        for restore in self._marks:
            restore()
        for attachment in self._attachments:
            attachment.is_root = None  # the next forward creates the engine

    def show_waiting(self) -> None:
        """Show in ``.grad`` of shards that gradients wait for a later backward; call it when gradients are restored."""
        for was in self._units:
            was.unit.earlier.show()

    @property
    def earlier(self) -> list[EarlierGradients]:
        """The gradients of earlier backwards of all units."""
        return [each.unit.earlier for each in self._attachments]

    def _engines(self) -> list[Engine]:
        found = {id(engine): engine for each in self._attachments if (engine := _engine(each)) is not None}
        return list(found.values())


def _engine(attachment: Attachment) -> Engine | None:
    return engine_of(attachment.unit)


def _unit_as_it_is(unit: Unit) -> _Unit:
    earlier, backward = unit.earlier, unit.backward
    unsynced = frozenset(earlier.unsynced)
    held, partial = dict(earlier.held), dict(earlier.partial)
    sums = tuple(group.num_replica_sums for group in unit.groups)
    return _Unit(unit, held, partial, unsynced, unit.policy, backward.counts, backward.ended_late, sums)


# ---- Copies of tensors, restored in place: every reference to a tensor sees the old values again.


class Copies:
    """Copies of some tensors, in memory that is reused for tensors of the same shapes, as in the next step."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> int:
        """Copy ``tensors``, replacing the last copies; return the bytes.  Of a DTensor, copy the local tensor."""
        found = torch_private.locals_of(tensors)
        with torch.no_grad():
            if _are_alike(found, self._copies) and _are_plain(found):
                torch_private.copy_all(self._copies, found)
            else:
                self._copies = [copied(tensor.detach()) for tensor in found]
        self._tensors = found
        return sum(tensor.numel() * tensor.element_size() for tensor in found)

    def restore(self) -> None:
        """Write the copies back to their tensors."""
        with torch.no_grad():
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.detach().copy_(copy)

    def release(self) -> None:
        """Drop the references to the tensors; keep the memory of the copies."""
        self._tensors = []


def _are_alike(found: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(copies) and all(
        tensor.shape == copy.shape and tensor.dtype is copy.dtype and tensor.device == copy.device
        for tensor, copy in zip(found, copies, strict=True)
    )


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return all(type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided for tensor in tensors)


def holders_of(param: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's tensors that have ``param`` and its gradient: itself, or the shards of a ShardedTensor."""
    return [shard.tensor for shard in param.local_shards()] if isinstance(param, ShardedTensor) else [param]


@dataclass(frozen=True, slots=True, eq=False)
class _Gradient:
    """``.grad`` of ``holder`` before the step: the object and its contents."""

    holder: torch.Tensor
    gradient: torch.Tensor
    local: torch.Tensor
    fresh: torch.Tensor | None


class KeptGradients:
    """The gradients of parameters at the begin of a step: accumulated from earlier microbatches, if any."""

    def __init__(self) -> None:
        self._holders: list[torch.Tensor] = []
        self._found: list[_Gradient] = []
        self._copies = Copies()

    def keep(self, holders: Sequence[torch.Tensor]) -> int:
        """Copy the gradients of ``holders``; return the bytes: 0 if all are None."""
        self._holders = list(holders)
        self._found = [_as_it_is(each, each.grad) for each in holders if each.grad is not None]
        return self._copies.take([part for each in self._found for part in _parts(each)]) if self._found else 0

    def release(self) -> None:
        """Drop the references to gradients."""
        self._holders, self._found = [], []
        self._copies.release()

    def restore(self) -> None:
        """Restore every gradient."""
        kept = {id(each.holder): each for each in self._found}
        for holder in self._holders:
            was = kept.get(id(holder))
            if was is None:
                if holder.grad is not None:
                    holder.grad = None
                continue
            if isinstance(was.gradient, OwnedGradient):
                was.gradient.fresh = was.fresh
            elif torch_private.local_of(was.gradient) is not was.local:
                torch_private.set_local(was.gradient, was.local)
            if holder.grad is not was.gradient:
                holder.grad = was.gradient
        if self._found:
            self._copies.restore()


def _as_it_is(holder: torch.Tensor, gradient: Any) -> _Gradient:
    fresh = gradient.fresh if isinstance(gradient, OwnedGradient) else None
    return _Gradient(holder, gradient, torch_private.local_of(gradient), fresh)


def _parts(was: _Gradient) -> list[torch.Tensor]:
    return list(was.gradient.parts) if isinstance(was.gradient, OwnedGradient) else [was.local]


class KeptBuffers:
    """The buffers of ``model``: running statistics, which a forward changes."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [torch_private.buffers_of(module) for module in model.modules()]
        self._found: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
        self._copies = Copies()

    def keep(self) -> int:
        """Copy them; return the bytes."""
        self._found = [(place, name, buffer) for place in self._places for name, buffer in place.items()]
        buffers = {id(buffer): buffer for _, _, buffer in self._found if buffer is not None}
        return self._copies.take(list(buffers.values())) if buffers else 0

    def restore(self) -> None:
        """Restore every buffer."""
        for place, name, buffer in self._found:
            place[name] = buffer
        if any(buffer is not None for _, _, buffer in self._found):
            self._copies.restore()


# ---- Other state that users want restored: a gradient scaler, a schedule, anything with a state dict, random numbers.

Undo = Callable[[], None]


def check_others(others: Sequence[Any]) -> None:
    """Check that all objects can be saved and restored.

    Raises: ConfigError if one cannot.
    """
    for each in others:
        if not is_rng(each) and not (
            callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))
        ):
            raise ConfigError(
                "also= takes objects with state_dict() and load_state_dict(): a GradScaler, a schedule, a data loader; and "
                f"'rng' for random numbers; found {each!r}"
            )


def is_rng(each: object) -> bool:
    """True for the string "rng", which stands for random numbers."""
    return isinstance(each, str) and each == "rng"


def keep_others(others: Sequence[Any]) -> list[Undo]:
    """Save ``others``, and for "rng" all random generators; return functions that restore them."""
    return [_keep_random_numbers() if is_rng(each) else _keep(each) for each in others]


def _keep(each: Any) -> Undo:
    if isinstance(each, torch.amp.GradScaler):
        # its state dict lacks which optimizers it has unscaled in the step
        was = copy.deepcopy(vars(each))
        return lambda: vars(each).update(was)
    state = copy.deepcopy(each.state_dict())
    return lambda: each.load_state_dict(state)


def _keep_random_numbers() -> Undo:
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    device: Any = torch.get_device_module() if torch.accelerator.is_available() else None
    of_device: torch.Tensor | None = None if device is None else device.get_rng_state()

    def restore() -> None:
        torch.random.set_rng_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        if device is not None and of_device is not None:
            device.set_rng_state(of_device)

    return restore


@dataclass(frozen=True, slots=True, eq=False)
class Optimized:
    """An optimizer that users step, as a transaction sees it.

    Attributes:
        outer: the optimizer of the user.  inner: the one that has the state; the same for a plain optimizer.
        mark: saves what is neither a tensor nor an option; returns a function that restores it.
        renew: runs on every rank after a step is undone, even if this rank has not reached the step.
    """

    outer: Optimizer
    inner: Optimizer
    mark: Callable[[], Undo]
    renew: Callable[[], None]


class KeptOptimizer:
    """Saves one optimizer: options when a transaction begins, parameters and state when its first step in it begins."""

    def __init__(self, optimized: Optimized) -> None:
        self.optimized = optimized
        self._params, self._values = Copies(), Copies()
        self._options: list[_Options] = []
        self._state: list[_State] | None = None  # None: it has not stepped
        self._undo_mark: Undo | None = None

    def begin(self) -> None:
        """Save the options."""
        found = self.optimized
        optimizers = [found.outer] if found.inner is found.outer else [found.outer, found.inner]
        self._options = [_options_of(group) for each in optimizers for group in each.param_groups]
        self._state = self._undo_mark = None

    def before_step(self) -> int:
        """Copy parameters and state unless this transaction has already; return the bytes."""
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

    def release(self) -> None:
        """Drop all references to the optimizer's tensors."""
        self._params.release()
        self._values.release()
        self._options = []
        self._state = self._undo_mark = None

    def restore(self) -> None:
        """Undo its step, if it has begun one, and restore the options."""
        state = self.optimized.inner.state
        if self._state is not None:
            self._params.restore()
            self._values.restore()
            state.clear()
            for was in self._state:
                was.entry.clear()
                was.entry.update(was.values)
                state[was.key] = was.entry
        if self._undo_mark is not None:
            self._undo_mark()
        for options in self._options:
            options.restore()
        self._state = self._undo_mark = None
        self.optimized.renew()


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """The state of one tensor: ``entry`` is the optimizer's dict, ``values`` its contents (copies of what is not a tensor)."""

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
    """A param group: the dict, its options, its list of parameters and the contents of the list."""

    group: dict[str, Any]
    options: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    params: list[Any]

    def restore(self) -> None:
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
    """Call ``before`` when ``optimizer`` is about to step; return a function that ends this."""
    return optimizer.register_step_pre_hook(lambda each, *_: before(each)).remove


def optimized_as_it_is(optimizer: Optimizer) -> Optimized:
    """Return an optimizer of ``torch.optim`` as a transaction sees it."""
    return Optimized(optimizer, optimizer, lambda: _nothing, _nothing)


def _nothing() -> None:
    return None


def distinct(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return each optimizer once."""
    return list({id(each): each for each in optimizers}.values())

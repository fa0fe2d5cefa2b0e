"""What a step changes, saved and restored: units, gradients, buffers, parameters, optimizer state and options."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.attachment import Attachment, attachment_of
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.unit import Unit
from shardwise.optim.sharded_optimizer import ShardedOptimizer, optimizer_backend
from shardwise.optim.slices import as_they_are, copied
from shardwise.random_state import RandomState
from shardwise.zero.optimizer import ZeroRedundancyOptimizer, zero_backend

Undo = Callable[[], None]


class Saved:
    """The state before a step: copies of tensors, and functions that restore everything else.

    Attributes:
        num_bytes: bytes copied since :meth:`begin`.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._memory: dict[Hashable, list[torch.Tensor]] = {}
        self._undo: list[Undo] = []

    def begin(self) -> None:
        """Forget the state before the last step."""
        self._undo, self.num_bytes = [], 0

    def copy(self, what: Hashable, tensors: Iterable[torch.Tensor]) -> None:
        """Copy ``tensors``; of a DTensor, the local tensor.  They are restored in place: every reference sees the old values.

        ``what`` names the memory of the copies, which is reused for tensors of the same shapes, as in the next step.
        """
        found = torch_private.locals_of(list(tensors))
        if not found:
            return
        copies = self._memory.get(what, [])
        with torch.no_grad():
            if _are_alike(found, copies) and _are_plain(found):
                torch_private.copy_all(copies, found)
            else:
                copies = self._memory[what] = [copied(tensor.detach()) for tensor in found]
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in found)

        def restore() -> None:
            with torch.no_grad():
                for tensor, was in zip(found, copies, strict=True):
                    tensor.detach().copy_(was)

        self._undo.append(restore)

    def then(self, undo: Undo) -> None:
        """Call ``undo`` when the state is restored, after what was saved before."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Restore everything, in the order in which it was saved.  Does not communicate."""
        for undo in self._undo:
            undo()

    def clear(self) -> None:
        """Drop all references to what was saved; keep the memory of the copies."""
        self._undo = []


def _are_alike(found: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(copies) and all(
        tensor.shape == copy.shape and tensor.dtype is copy.dtype and tensor.device == copy.device
        for tensor, copy in zip(found, copies, strict=True)
    )


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return all(type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided for tensor in tensors)


# ---- Units.  Ranks that stopped at different places know different things about each other: plans, numbers of exchanges,
# passes of links. All of that belongs to the engine, so after a failure it is created again as at the first forward.


def attachments_of(model: nn.Module) -> list[Attachment]:
    """Return what ``fully_shard`` has attached to the modules of ``model``."""
    found = {id(each): each for module in model.modules() if (each := attachment_of(module)) is not None}
    return list(found.values())


def save_units(saved: Saved, attachments: Sequence[Attachment]) -> None:
    """Save what a step changes in units besides tensors.  Raises: StateError if gradients of a backward are pending."""
    is_last: dict[int, bool] = {}
    for engine in _engines(attachments):
        if engine.is_in_step or engine.reductions.deferred or engine.manual.awaits_completion:
            raise StateError(
                "a transaction begins between steps, without pending gradients: found a forward or backward that "
                "has not ended, one with set_is_last_backward(False), or one that waits for finalize_backward(). Begin "
                "the transaction before it"
            )
        is_last[id(engine)] = engine.is_last_backward

    def forget_step() -> None:
        for engine in _engines(attachments):
            engine.forget_step()
            engine.is_last_backward = is_last.get(id(engine), True)

    def drop_engines() -> None:
        for attachment in attachments:
            attachment.is_root = None  # the next forward creates the engine

    saved.then(forget_step)
    for attachment in attachments:
        saved.then(_unit_as_it_is(attachment.unit))
        for compression in [group.compression for group in attachment.unit.groups]:
            if compression is not None:
                saved.num_bytes += compression.residual_bytes
                saved.then(compression.mark())
    saved.then(drop_engines)


def _engines(attachments: Sequence[Attachment]) -> list[Engine]:
    found = {id(engine): engine for each in attachments if (engine := engine_of(each.unit)) is not None}
    return list(found.values())


def _unit_as_it_is(unit: Unit) -> Undo:
    earlier = unit.earlier
    # gradients of earlier backwards never change in place
    held, partial, unsynced = dict(earlier.held), dict(earlier.partial), set(earlier.unsynced)
    undos = [
        as_they_are([unit], "policy"),
        as_they_are([unit.backward], "learned", "ended_late"),
        as_they_are(unit.groups, "num_replica_sums"),
    ]

    def restore() -> None:
        unit.earlier.put_back(held, partial)
        unit.earlier.unsynced = unsynced
        for undo in undos:
            undo()

    return restore


# ---- Gradients and buffers.


def holders_of(param: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's tensors that have ``param`` and its gradient: itself, or the shards of a ShardedTensor."""
    return [shard.tensor for shard in param.local_shards()] if isinstance(param, ShardedTensor) else [param]


def save_gradients(saved: Saved, holders: Sequence[torch.Tensor]) -> None:
    """Save the gradients of ``holders``: accumulated from earlier microbatches, if any."""
    found: dict[int, tuple[Any, Any]] = {}  # by id of the holder: the gradient, and what lies in it
    parts: list[torch.Tensor] = []
    for holder in holders:
        gradient = holder.grad
        if gradient is not None:
            found[id(holder)] = gradient, torch_private.local_of(gradient)
            parts.append(found[id(holder)][1])

    def restore() -> None:
        for holder in holders:
            gradient, inside = found.get(id(holder), (None, None))
            if gradient is not None and torch_private.local_of(gradient) is not inside:
                torch_private.set_local(gradient, inside)
            if holder.grad is not gradient:
                holder.grad = gradient

    saved.then(restore)
    saved.copy("gradients", parts)


def save_buffers(saved: Saved, places: Sequence[dict[str, torch.Tensor | None]]) -> None:
    """Save buffers, such as running statistics, which a forward changes; ``places``: of each module, by name."""
    found = [(place, dict(place)) for place in places]

    def restore() -> None:
        for place, was in found:
            place.update(was)

    saved.then(restore)
    buffers = {id(buffer): buffer for _, was in found for buffer in was.values() if buffer is not None}
    saved.copy("buffers", buffers.values())


# ---- Other state that users want restored: a gradient scaler, a schedule, anything with a state dict, random numbers.


def check_others(others: Sequence[Any]) -> None:
    """Check that all objects can be saved and restored.

    Raises: ConfigError if one cannot.
    """
    for each in others:
        is_rng = isinstance(each, str) and each == "rng"
        if not is_rng and not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(
                "also= takes objects with state_dict() and load_state_dict(): a GradScaler, a schedule, a data loader; and "
                f"'rng' for random numbers; found {each!r}"
            )


def keep_others(others: Sequence[Any]) -> list[Undo]:
    """Save ``others``, and for "rng" all random generators; return functions that restore them."""
    return [_keep(RandomState() if isinstance(each, str) else each) for each in others]


def _keep(each: Any) -> Undo:
    if isinstance(each, torch.amp.GradScaler):
        # its state dict lacks which optimizers it has unscaled in the step
        was = copy.deepcopy(vars(each))
        return lambda: vars(each).update(was)
    state = copy.deepcopy(each.state_dict())
    return lambda: each.load_state_dict(state)


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


def save_options(saved: Saved, each: Optimized) -> None:
    """Save the options of an optimizer and its lists of parameters."""
    optimizers = [each.outer] if each.inner is each.outer else [each.outer, each.inner]
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        saved.then(_options_as_they_are(group))
        saved.copy(("options", id(group)), [value for value in group.values() if isinstance(value, torch.Tensor)])
    saved.then(each.renew)


def save_step(saved: Saved, each: Optimized) -> None:
    """Save parameters and state of an optimizer that is about to step."""
    params = [param for group in each.outer.param_groups for param in group["params"]]
    saved.copy(("parameters", id(each)), [holder for param in params for holder in holders_of(param)])
    state = each.inner.state
    found = [(key, entry, {name: _kept(value) for name, value in entry.items()}) for key, entry in state.items()]
    values = [value for _, _, was in found for value in was.values()]
    saved.copy(("state", id(each)), [value for value in values if isinstance(value, torch.Tensor)])

    def restore() -> None:
        state.clear()
        for key, entry, was in found:
            entry.clear()
            entry.update(was)
            state[key] = entry

    saved.then(restore)
    saved.then(each.mark())


def _kept(value: Any) -> Any:
    return value if isinstance(value, (torch.Tensor, int, float, str, bool, type(None))) else copy.deepcopy(value)


def _options_as_they_are(group: dict[str, Any]) -> Undo:
    was, params = dict(group), list(group["params"])

    def restore() -> None:
        for name in [name for name in group if name not in was]:
            del group[name]
        group.update(was)
        cast(list[Any], group["params"])[:] = params

    return restore


def optimized(optimizer: Optimizer) -> Optimized:
    """Return an optimizer as a transaction sees it.  Raises: ConfigError for one that steps inside backward."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        if optimizer.overlap_with_ddp:
            raise ConfigError(
                "an optimizer made with overlap_with_ddp=True steps inside backward, bucket by bucket, so that no "
                "state before its step exists that could be restored; make it without overlap to use transactions"
            )
        backend = zero_backend(optimizer)
        return Optimized(optimizer, optimizer.optim, backend.mark, backend.renew)
    if isinstance(optimizer, ShardedOptimizer):
        backend = optimizer_backend(optimizer)
        return Optimized(optimizer, backend.optimizer, backend.mark, _nothing)
    return Optimized(optimizer, optimizer, lambda: _nothing, _nothing)


def _nothing() -> None:
    return None

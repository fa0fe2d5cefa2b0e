"""Clip gradients on different meshes, or on none, by their total norm; gradients that are averaged to their owners."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate

from shardwise import torch_private
from shardwise.collectives.owned import sum_of
from shardwise.errors import ConfigError, StateError

# ---- ``.grad`` after gradients were averaged to their owners.
# Each rank has the average of its own elements only.  With a plain tensor in ``.grad``, a norm or a test for infinite values
# would use one rank's part and differ between ranks, and code would skip a parameter whose gradient is missing.  So every rank
# has a tensor of the parameter's shape that supports elementwise operations and refuses those that need all ranks.

# pyright: reportIncompatibleMethodOverride=false


class GradientOwner(Protocol):
    """The optimizer that averaged gradients, over whose ranks they are partitioned."""

    def sum_over_ranks(self, value: torch.Tensor, is_max: bool = False) -> torch.Tensor:
        """Return the sum (or maximum) of ``value`` over the ranks, the same bits on each.  Collective."""
        ...

    def report_failure(self, text: str) -> None:
        """Report a failure to ranks that wait for this rank only (in Join)."""
        ...


class OwnedGradient(torch.Tensor):
    """The average of a parameter's gradients over ranks, of which this rank has ``parts``.

    On a rank that owns the whole parameter it is an ordinary tensor: code may read, save, pickle and copy it.  On other ranks
    it has no memory.  In-place operations with numbers (``mul_(0.5)``, ``clamp_(-1, 1)``, ``clip_grad_value_``) change the
    parts of every rank.  ``GradScaler`` may unscale it, and all ranks agree on infinite values.  Norms, sums and the like
    raise StateError on every rank; see :func:`shardwise.clip_grad_norm_`.

    Attributes:
        parts: this rank's elements.
        fresh: the gradient of a later backward, which is not averaged and added yet; None if there is none.
        is_whole: this rank owns the whole parameter.
        is_spent: a step in backward has used the gradient, which may only be read now.
        is_sent: its average is being computed.
        owner_ref: weak reference to the optimizer that averaged it.
    """

    parts: tuple[torch.Tensor, ...]
    fresh: torch.Tensor | None
    is_whole: bool
    is_spent: bool
    is_sent: bool
    owner_ref: Callable[[], GradientOwner | None]

    @property
    def owner(self) -> GradientOwner:
        """The optimizer that averaged it.  Raises: StateError if that was deleted."""
        owner = self.owner_ref()
        if owner is None:
            raise StateError("the optimizer that averaged this gradient is gone; keep it as long as its gradients")
        return owner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in _COMPARISONS:
            args = [_readable(arg) for arg in args]
        if func is torch.Tensor.is_pinned:
            return args[0].is_whole and args[0].parts[0].is_pinned()
        with torch_private.without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        first, others, options = args[0], args[1:], kwargs or {}
        if func is torch_private.unscale_op():
            return _unscale(func, first, *others)
        gradients = list(first) if isinstance(first, list | tuple) else [first]
        if not any(isinstance(other, torch.Tensor | list | tuple) for other in (*others, *options.values())):
            if func in torch_private.copying_ops() and isinstance(first, OwnedGradient):
                return first.changed(lambda part: func(part, **options), options.get("dtype", first.dtype))
            if func in torch_private.elementwise_ops():
                parts = _parts(gradients)
                if isinstance(first, OwnedGradient):
                    for part in parts:
                        func(part, *others, **options)
                elif parts:
                    func(parts, *others, **options)
                return first
        elif torch_private.is_accumulation(func) and isinstance(first, OwnedGradient):
            first.fresh = others[0] if first.fresh is None else first.fresh + others[0]
            return first
        # The error below ends a running backward, and in Join other ranks may wait for messages that it would send.
        if torch_private.graph_task_id() != -1:
            for owner in (each.owner_ref() for each in (*gradients, *others) if isinstance(each, OwnedGradient)):
                if owner is not None:
                    owner.report_failure(
                        f"{func} in backward found gradients that were averaged to their owners before"
                    )
        refuse(str(func))

    def usable_parts(self) -> tuple[torch.Tensor, ...]:
        """Return ``parts``.  Raises: StateError if they are not the whole gradient, or a step has used them."""
        if self.is_spent:
            raise StateError(
                "the step that used these gradients was made in backward (overlap_with_ddp=True), so that they cannot be "
                "clipped or used again; make the optimizer without overlap, or change gradients in the communication hook"
            )
        if self.is_sent:
            raise StateError(
                f"gradients (here of shape {tuple(self.shape)}) are on their way to their owners, where backward has sent them "
                "(overlap_grad_reduce=True); call reduce_gradients() before they are read, clipped or stepped on"
            )
        if self.fresh is not None:
            raise StateError(
                f"a backward ran after gradients (here of shape {tuple(self.shape)}) were averaged to their owners; "
                "call reduce_gradients() again, which adds it, or zero_grad() before the backward"
            )
        return self.parts

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> OwnedGradient:
        """Return a copy of the gradient with ``change`` applied to each part."""
        if self.fresh is not None:
            refuse("a copy")
        found = make_owned(self, [change(part) for part in self.parts], self.is_whole, self.owner_ref, dtype)
        found.is_spent = self.is_spent
        return found

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array on the same memory.  Raises: StateError unless this rank owns all of them."""
        return _readable(self).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as lists.  Raises: StateError unless this rank owns all of them."""
        return _readable(self).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _readable(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedGradient:
        memo[id(self)] = found = self.changed(torch.Tensor.clone, self.dtype)
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        held = "all" if self.is_whole else sum(part.numel() for part in self.parts)
        return f"OwnedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, elements on this rank: {held})"


def make_owned(
    param: torch.Tensor,
    parts: Sequence[torch.Tensor],
    is_whole: bool,
    owner_ref: Callable[[], GradientOwner | None],
    dtype: torch.dtype,
) -> OwnedGradient:
    """Return the averaged gradient of ``param`` with ``parts`` of this rank; if ``is_whole``, one part of its shape."""
    if is_whole:
        found = parts[0].as_subclass(OwnedGradient)
    else:
        found = torch_private.tensor_without_memory(OwnedGradient, param, dtype)
    found.parts, found.is_whole, found.owner_ref = tuple(parts), is_whole, owner_ref
    found.fresh, found.is_spent, found.is_sent = None, False, False
    return found


def refuse(what: str) -> NoReturn:
    """Raise StateError about operation ``what``."""
    raise StateError(
        f"{what}: gradients have been averaged to their owners, so this rank has only a part of them, and the result would "
        "differ between ranks. To clip by the total norm, or to measure it, call optimizer.clip_grad_norm_(max_norm) "
        "of the ZeroRedundancyOptimizer or shardwise.clip_grad_norm_(parameters, max_norm), on every rank; "
        "before a backward that should not accumulate, call zero_grad()"
    )


def _parts(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for gradient in gradients:
        found.extend(gradient.usable_parts() if isinstance(gradient, OwnedGradient) else [gradient])
    return found


def _unscale(
    func: Any, gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Unscale this rank's parts; all ranks agree on whether a value is not finite, so that all or none of them step."""
    parts = _parts(gradients)
    if parts:
        func(parts, found_inf, inverse_scale)
    owners = {id(g.owner): g.owner for g in gradients if isinstance(g, OwnedGradient)}
    for owner in owners.values():
        found_inf.copy_(owner.sum_over_ranks(found_inf.clone(), is_max=True))


def _readable(value: Any) -> Any:
    if not isinstance(value, OwnedGradient):
        return value
    if not value.is_whole or value.fresh is not None or value.is_sent:
        refuse("reading")
    return value.parts[0]


_COMPARISONS = (torch.equal, torch.isclose, torch.allclose, torch.Tensor.equal, torch.Tensor.isclose)


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a gradient.

    Attributes:
        local: the local tensor.
        place: the ranks that have parts of it; None: every rank has the whole gradient.
        num_shards: the number of different parts; further ranks have copies of them.
    """

    local: torch.Tensor
    place: DeviceMesh | dist.ProcessGroup | None = None
    num_shards: int = 1


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit on the total norm of gradients: order ``norm_type``, at most ``max_norm``.

    Raises: ConfigError for a negative limit, or an order that is not positive.
    """

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        if not self.max_norm >= 0:
            raise ConfigError(f"max_norm is {self.max_norm}; expected 0 or more, or math.inf to only measure the norm")
        if self.norm_type <= 0:
            raise ConfigError(f"norm_type is {self.norm_type}; expected a positive number or math.inf")

    @property
    def is_max(self) -> bool:
        """True for the maximum norm, for which parts are combined by maximum instead of sum."""
        return math.isinf(self.norm_type)

    def power(self, tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the ``norm_type``-th power of the norm of all ``tensors``, or their maximum; 0-dim, float64 if possible."""
        wide = torch.float32 if device.type == "mps" else torch.float64
        total = torch.zeros((), device=device, dtype=wide)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
                precise = torch.float64 if values.dtype == torch.float64 else torch.float32
                alike.setdefault((values.device, precise), []).append(values)
        for (_, precise), values in alike.items():
            norms = torch.stack(torch_private.norms_of(values, self.norm_type, precise)).to(device, wide)
            total = self.plus(total, norms.max() if self.is_max else (norms**self.norm_type).sum())
        return total

    def plus(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the power of the norm of the union of two sets of tensors."""
        return torch.maximum(left, right) if self.is_max else left + right

    def hold(self, power: torch.Tensor, tensors: Sequence[torch.Tensor], dtypes: Iterable[torch.dtype]) -> torch.Tensor:
        """Scale ``tensors`` in place to the limit; return their norm before, from its ``power`` over all ranks.

        The norm is float32 unless one of the gradients' ``dtypes`` is wider.  Raises: StateError, with nothing scaled, if
        ``error_if_nonfinite`` and the norm is not finite.
        """
        norm = power if self.is_max else power ** (1.0 / self.norm_type)
        norm = norm if {torch.float64, torch.complex128} & set(dtypes) else norm.float()
        if self.error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise StateError(
                f"The total norm of order {self.norm_type} for gradients from `parameters` is non-finite ({norm.item()}), so "
                "it cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        coefficient = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
        for (device, dtype), scaled in alike.items():
            torch_private.scale_all(scaled, coefficient.to(device, dtype.to_real()))
        return norm


# Called before a clip with parameters, and with the function that is to be called on them, its args and kwargs; and after it.
before_clips: list[Callable[..., object]] = []
after_clips: list[Callable[[], object]] = []


@contextmanager
def clipping(
    params: Sequence[torch.Tensor], clip: Callable[..., object], *args: Any, **kwargs: Any
) -> Generator[None, None, None]:
    """Call what :data:`before_clips` has: gradients of ``params`` may not be complete yet; then what ``after_clips`` has."""
    for before in before_clips:
        before(params, clip, args, kwargs)
    yield
    for after in after_clips:
        after()


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``, and return the norm before.

    It takes DTensors on any meshes, plain parameters (which must have equal gradients on all ranks), and gradients that
    ``ZeroRedundancyOptimizer.reduce_gradients()`` has averaged to their owners.  If the meshes together span all ranks, or
    there is one 1-D mesh, or all gradients have owners, the only communication is one all-reduce of one number.

    Args:
        parameters: parameters whose ``.grad`` counts; those without a gradient are skipped.
        max_norm: the largest total norm after clipping.
        norm_type: p of the p-norm, positive; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise RuntimeError, the gradients unchanged, if the norm is nan or infinite.

    Returns: the total norm, a 0-dim tensor, float32 or wider, equal on all ranks.

    Source: ``torch.nn.utils.clip_grad_norm_``, whose arguments and coefficient it has.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> norm = clip_grad_norm_(layer.parameters(), max_norm=0.5)
        >>> round(float(clip_grad_norm_(layer.parameters(), max_norm=1.0)), 4)
        0.5
    """
    limit = Limit(max_norm, norm_type, error_if_nonfinite)
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with clipping(params, clip_grad_norm_, max_norm, norm_type, error_if_nonfinite):
        gradients = [param.grad for param in params if param.grad is not None]
        parts = [part_of(gradient) for gradient in gradients if not isinstance(gradient, OwnedGradient)]
        return clip_parts(parts, [gradient for gradient in gradients if isinstance(gradient, OwnedGradient)], limit)


def clip_parts(parts: Sequence[Part], owned: Sequence[OwnedGradient], limit: Limit) -> torch.Tensor:
    """Do the same as :func:`clip_grad_norm_` for parts of gradients and for gradients with owners."""
    tensors = [part.local for part in parts] + [part for gradient in owned for part in gradient.usable_parts()]
    if not parts and not owned:
        return torch.tensor(0.0, device=torch.get_default_device())
    power = _power_over_ranks(parts, limit, (parts[0].local if parts else owned[0]).device)
    for owner, gradients in _by_owner(owned):
        mine = limit.power([part for g in gradients for part in g.usable_parts()], power.device)
        power = limit.plus(power, owner.sum_over_ranks(mine, limit.is_max))
    return limit.hold(power, tensors, [gradient.dtype for gradient in (*(part.local for part in parts), *owned)])


def _by_owner(owned: Iterable[OwnedGradient]) -> list[tuple[GradientOwner, list[OwnedGradient]]]:
    found: dict[int, tuple[GradientOwner, list[OwnedGradient]]] = {}
    for gradient in owned:
        found.setdefault(id(gradient.owner), (gradient.owner, []))[1].append(gradient)
    return list(found.values())


def part_of(gradient: torch.Tensor) -> Part:
    """Return this rank's part of a plain gradient or a DTensor.  Raises: ConfigError for partial sums."""
    if not isinstance(gradient, DTensor):
        return Part(gradient.detach())
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise ConfigError(
            f"a gradient has placements {gradient.placements}; its partial sums must be reduced before a norm exists: "
            "redistribute it to Replicate or Shard"
        )
    mesh = gradient.device_mesh
    sizes = [mesh.size(i) for i, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate)]
    return Part(torch_private.local_of(gradient).detach(), mesh, math.prod(sizes))


def _power_over_ranks(parts: Sequence[Part], limit: Limit, device: torch.device) -> torch.Tensor:
    groups = _groups(list(dict.fromkeys(part.place for part in parts if part.place is not None)))
    num_ranks = math.prod(group.size() for group in groups)
    by_share: dict[float, list[torch.Tensor]] = {}
    for part in parts:
        # Scale each copy of a shard by one over the number of copies, so that a sum over all ranks counts each shard once.
        by_share.setdefault(1.0 if limit.is_max else part.num_shards / num_ranks, []).append(part.local)
    total = limit.power([], device)
    for share, tensors in by_share.items():
        total = limit.plus(total, limit.power(tensors, device) * share)
    for group in groups:
        total = sum_of(total, group, limit.is_max)
    return total


def _groups(places: list[DeviceMesh | dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Return the groups whose all-reduces, one after the other, sum over all ranks that have a part."""
    if not places:
        return []
    world = dist.group.WORLD
    ranks = {rank for place in places for rank in _ranks(place)}
    assert world is not None
    if len(ranks) == world.size():
        return [world] if world.size() > 1 else []
    largest = max(places, key=lambda place: len(_ranks(place)))
    if not ranks <= set(_ranks(largest)):
        shapes = [tuple(place.shape) if isinstance(place, DeviceMesh) else (place.size(),) for place in places]
        raise ConfigError(
            f"gradients lie on meshes {shapes} of which none contains the others; clip the parameters of each mesh "
            "separately"
        )
    return _axes(largest)


def _ranks(place: DeviceMesh | dist.ProcessGroup) -> list[int]:
    if isinstance(place, DeviceMesh):
        return place.mesh.flatten().tolist()
    return dist.get_process_group_ranks(place)


def _axes(place: DeviceMesh | dist.ProcessGroup) -> list[dist.ProcessGroup]:
    if not isinstance(place, DeviceMesh):
        return [place] if place.size() > 1 else []
    return [place.get_group(axis) for axis in range(place.ndim) if place.size(axis) > 1]

"""Clip gradients on different meshes, or on none, by their total norm.

``torch.nn.utils.clip_grad_norm_`` adds the norms of DTensors by DTensor's own reductions: one per mesh, and an error for
several. Here each rank adds what it has, divided by the number of ranks that have the same, and one all-reduce adds the rest;
so copies have to be equal, which the same all-reduce checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

from shardwise import torch_private
from shardwise.collectives.owned import sum_of
from shardwise.errors import ConfigError, StateError, UsageError
from shardwise.fsdp.engine import live_engines
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.roots import serve_others
from shardwise.fsdp.unit import Unit


def shards_of(params: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return ``params``, whose gradients are clipped next; those of units that are unsharded as shards, which have these."""
    refuse_fixed_sums(params)
    serve_others(params)
    shards = _by_form(lambda unit: unit.has_copies)
    return [shards[id(param)].sharded if id(param) in shards else param for param in params] if shards else params


def _by_form(wants: Callable[[Unit], bool]) -> dict[int, ShardedParam]:
    """Return the parameters of the units that ``wants`` accepts, by the ids of what may be registered of them."""
    # Most steps clip when every unit is sharded, and this is empty.
    units = [unit for engine in live_engines for unit in engine.units if wants(unit)]
    return {id(form): p for unit in units for p in unit.params for form in (p.sharded, p.full, p.registered_form)}


def refuse_full(params: Sequence[torch.Tensor]) -> None:
    """Raise StateError for full parameters of ``params``, which have no gradient to scale if their shards have one."""
    refuse_fixed_sums(params)
    shards = _by_form(lambda unit: unit.has_copies)
    for p in (shards[id(param)] for param in params if param.grad is None and id(param) in shards):
        if p.sharded.grad is not None:
            raise StateError(
                f"{p.fqn} is unsharded, so its gradient is that of its shard: nothing was clipped. Call model.reshard() "
                "before, or shardwise.clip_grad_norm_"
            )


def refuse_fixed_sums(params: Sequence[torch.Tensor]) -> None:
    """Raise UsageError if ``Reproducible`` sums the gradients of ``params``: the norm would be added in the order of ranks."""
    fixed = _by_form(lambda unit: unit.settings.sums is not None)
    for param in (fixed[id(param)] for param in params if id(param) in fixed):
        raise UsageError(
            f"clip_grad_norm_: Reproducible sums the gradient of {param.fqn}, and this function adds norms in the order of "
            "ranks, so that the bits depend on their number. Call fixed.clip_grad_norm_ of the Reproducible object"
        )


_COPIES_DIFFER = 1e-5  # relative, of squares of powers of norms: copies differ by rounding alone
Holders = DeviceMesh | dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a gradient.

    Attributes:
        local: the local tensor.
        place: the ranks that have parts of it; None: every rank has the whole gradient.
        num_shards: the number of different parts; further ranks have copies of them.
    """

    local: torch.Tensor
    place: Holders | None = None
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
        # Squares of many elements are added: in float32 a sum over billions would lose the small ones.
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
        """Scale ``tensors`` in place to the limit; return their norm before, :meth:`norm` of ``power``."""
        self.scale(tensors, norm := self.norm(power, dtypes))
        return norm

    def norm(self, power: torch.Tensor, dtypes: Iterable[torch.dtype]) -> torch.Tensor:
        """Return the norm from its ``power`` over all ranks: float32, unless one of the gradients' ``dtypes`` is wider.

        Raises: StateError if ``error_if_nonfinite`` and the norm is not finite.
        """
        norm = power if self.is_max else power ** (1.0 / self.norm_type)
        norm = norm if {torch.float64, torch.complex128} & set(dtypes) else norm.float()
        if self.error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise StateError(
                f"The total norm of order {self.norm_type} for gradients from `parameters` is non-finite ({norm.item()}), "
                "so it cannot be clipped. Look for the cause, or set `error_if_nonfinite=False` to scale by it anyway"
            )
        return norm

    def scale(self, tensors: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        """Scale ``tensors``, whose total norm is ``norm``, in place to the limit."""
        coefficient = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
        for (device, dtype), scaled in alike.items():
            torch_private.scale_all(scaled, coefficient.to(device, dtype.to_real()))


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``, and return the norm before.

    It takes DTensors on any meshes and plain parameters.  Holders outside of a gradient's mesh, and all ranks of a plain one,
    have copies of it.  If the meshes together span all ranks, or there is one 1-D mesh, the communication is one all-reduce of
    three numbers, and one for each smaller mesh.

    Args:
        parameters: parameters whose ``.grad`` counts; those without a gradient are skipped.
        max_norm: the largest total norm after clipping.
        norm_type: p of the p-norm, positive; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise StateError, the gradients unchanged, if the norm is nan or infinite.
        foreach: torch's argument, without effect: tensors are always scaled together.

    Returns: the total norm, a 0-dim tensor, float32 or wider, equal on all ranks.
    Raises: ConfigError on every rank if a gradient has other values outside of its mesh, as experts of other ranks have.

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
    return clip_parts([part_of(param.grad) for param in shards_of(params) if param.grad is not None], limit)


def clip_parts(parts: Sequence[Part], limit: Limit) -> torch.Tensor:
    """Do the same as :func:`clip_grad_norm_` for parts of gradients."""
    if not parts:
        return torch.tensor(0.0, device=torch.get_default_device())
    tensors = [part.local for part in parts]
    return limit.hold(_power_over_ranks(parts, limit, tensors[0].device), tensors, [each.dtype for each in tensors])


def part_of(gradient: torch.Tensor) -> Part:
    """Return this rank's part of a plain gradient or a DTensor.  Raises: ConfigError for partial sums."""
    if not isinstance(gradient, DTensor):
        return Part(gradient.detach())
    if any(each.is_partial() for each in gradient.placements):
        raise ConfigError(f"a gradient has placements {gradient.placements}: redistribute to Replicate or Shard")
    mesh = gradient.device_mesh
    num_shards = math.prod(mesh.size(i) for i, each in enumerate(gradient.placements) if not each.is_replicate())
    return Part(torch_private.local_of(gradient).detach(), mesh, num_shards)


def _power_over_ranks(parts: Sequence[Part], limit: Limit, device: torch.device) -> torch.Tensor:
    alike: dict[tuple[Holders | None, int], list[torch.Tensor]] = {}
    for part in parts:
        alike.setdefault((part.place, part.num_shards), []).append(part.local)
    groups = _groups([*{place: None for place, _ in alike if place is not None}])
    num_ranks = math.prod(group.size() for group in groups)
    total = copied = nothing = limit.power([], device)
    smaller: dict[Holders | None, torch.Tensor] = {}  # what further ranks are to have copies of
    for (place, num_shards), tensors in alike.items():
        power = limit.power(tensors, device)
        # Scale each copy of a shard by one over the number of copies, so that a sum over all ranks counts each shard once.
        total = limit.plus(total, power if limit.is_max else power * (num_shards / num_ranks))
        if place is None or place.size() < num_ranks:
            smaller[place] = limit.plus(smaller.get(place, nothing), power)
    if not groups:
        return total
    for place, power in smaller.items():
        for group in _groups_of(place):
            power = sum_of(power, group, limit.is_max)
        copied = limit.plus(copied, power)
    # What are copies is the same on all ranks, as its extremes show, or its squares: n * sum(q^2) is sum(q)^2 for n equal q.
    sums = torch.stack([total, copied, -copied if limit.is_max else copied**2])
    for group in groups:
        sums = sum_of(sums, group, limit.is_max)
    total, most, other = sums.unbind()
    spread = (most + other) ** 2 if limit.is_max else num_ranks * other - most**2
    if smaller and bool(spread > _COPIES_DIFFER * most**2):  # the host waits only then; NaN is not
        raise ConfigError(
            "gradients that ranks are to have copies of, plain ones or those on a smaller mesh, differ between ranks. Average "
            "them first; parameters of which each rank has others (experts) need a mesh that contains all of these ranks "
            "(DTensors sharded over the experts, then fully_shard), or are clipped separately"
        )
    return total


def _groups_of(place: Holders | None) -> list[dist.ProcessGroup]:
    groups = place.get_all_groups() if isinstance(place, DeviceMesh) else [] if place is None else [place]
    return [each for each in groups if each.size() > 1]


def _groups(places: Sequence[Holders]) -> list[dist.ProcessGroup]:
    """Return the groups whose all-reduces, one after the other, sum over all ranks that have a part."""
    if not places:
        return []
    world = dist.group.WORLD
    group_ranks = dist.get_process_group_ranks
    ranks = {at: at.mesh.flatten().tolist() if isinstance(at, DeviceMesh) else group_ranks(at) for at in places}
    # One group that spans all parts needs one all-reduce; meshes side by side have none but the job's.
    together = set[int]().union(*ranks.values())
    assert world is not None
    if len(together) == world.size():
        return [world] if world.size() > 1 else []
    largest = max(places, key=lambda place: len(ranks[place]))
    if not together <= {*ranks[largest]}:
        shapes = [tuple(place.shape) if isinstance(place, DeviceMesh) else (place.size(),) for place in places]
        raise ConfigError(f"gradients lie on meshes {shapes}, of which none contains the others; clip each mesh's")
    return _groups_of(largest)


def _total_norm(gradients: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    parts, limit = [part_of(each) for each in gradients], Limit(math.inf, norm_type, error_if_nonfinite)
    return limit.norm(_power_over_ranks(parts, limit, parts[0].local.device), [each.dtype for each in gradients])


def _scale(gradients: Sequence[torch.Tensor], max_norm: float, total_norm: torch.Tensor) -> None:
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    Limit(max_norm).scale([torch_private.local_of(each) for each in gradients], norm)


# When shardwise is imported, since user code may then import torch's functions by name.
torch_private.clip_mixed_by(_total_norm, _scale, shards_of, refuse_full)

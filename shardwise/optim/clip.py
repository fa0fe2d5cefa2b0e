"""Clip gradients that lie on different meshes, or on none, by their total norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate

from shardwise import torch_private
from shardwise.comm.matrices import sum_of
from shardwise.errors import ConfigError
from shardwise.optim.owned import GradientOwner, OwnedGradient


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank holds of a gradient.

    Attributes:
        place: the ranks over which it lies; None: every rank has the same.
        num_shards: into how many different parts it is cut there; the other ranks have copies.
    """

    local: torch.Tensor
    place: DeviceMesh | dist.ProcessGroup | None = None
    num_shards: int = 1


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``, and return the norm before.

    Takes DTensors on any meshes beside plain parameters (which must have equal gradients on all ranks), and gradients that
    ``ZeroRedundancyOptimizer.reduce_gradients()`` has averaged to their owners.  If the meshes together span all ranks, or
    there is one 1-D mesh, or all gradients lie with owners, one all-reduce of one number is all the communication.

    Args:
        parameters: those whose ``.grad`` counts; ones without a gradient are passed over.
        max_norm: the largest total norm to leave.
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
    checked_norm_type(norm_type)
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [param.grad for param in params if param.grad is not None]
    parts = [part_of(gradient) for gradient in gradients if not isinstance(gradient, OwnedGradient)]
    owned = [gradient for gradient in gradients if isinstance(gradient, OwnedGradient)]
    return clip_parts(parts, owned, max_norm, norm_type, error_if_nonfinite)


def clip_parts(
    parts: Sequence[Part],
    owned: Sequence[OwnedGradient],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Do what :func:`clip_grad_norm_` does for gradients in parts and gradients with owners."""
    tensors = [part.local for part in parts] + [part for gradient in owned for part in gradient.usable_parts()]
    if not parts and not owned:
        return torch.tensor(0.0)
    total = _power_over_ranks(parts, norm_type, (parts[0].local if parts else owned[0]).device)
    for owner, gradients in _by_owner(owned):
        mine = power_of_norm([part for g in gradients for part in g.usable_parts()], norm_type, total.device)
        reduced = owner.sum_over_ranks(mine, math.isinf(norm_type))
        total = torch.maximum(total, reduced) if math.isinf(norm_type) else total + reduced
    dtypes = {gradient.dtype for gradient in (*(part.local for part in parts), *owned)}
    total = root_of_power(total, norm_type, dtypes)
    scale_by(clip_coefficient(total, max_norm, norm_type, error_if_nonfinite), tensors)
    return total


def checked_norm_type(norm_type: float) -> None:
    """Raises: ConfigError unless there is a norm of this order."""
    if norm_type <= 0:
        raise ConfigError(f"norm_type is {norm_type}; expected a positive number or math.inf")


def power_of_norm(tensors: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the ``norm_type``-th power of the norm of all ``tensors``; of the infinity norm itself.  0-dim, wide."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), device=device, dtype=dtype)
    for tensor in tensors:
        if not tensor.numel():
            continue
        values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
        precise = torch.float64 if values.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(values, norm_type, dtype=precise).to(device, dtype)
        total = torch.maximum(total, norm) if math.isinf(norm_type) else total + norm**norm_type
    return total


def root_of_power(power: torch.Tensor, norm_type: float, dtypes: Iterable[torch.dtype]) -> torch.Tensor:
    """Return the norm, in float32 unless a gradient is wider."""
    total = power if math.isinf(norm_type) else power ** (1.0 / norm_type)
    return total if {torch.float64, torch.complex128} & set(dtypes) else total.float()


def clip_coefficient(total: torch.Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """Return what gradients of norm ``total`` are to be multiplied by.  Raises: RuntimeError as asked."""
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite ({total.item()}), so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def scale_by(coefficient: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Multiply all ``tensors`` by ``coefficient``, in place."""
    for tensor in tensors:
        tensor.detach().mul_(coefficient.to(tensor.device, tensor.real.dtype if tensor.is_complex() else tensor.dtype))


def _by_owner(owned: Iterable[OwnedGradient]) -> list[tuple[GradientOwner, list[OwnedGradient]]]:
    found: dict[int, tuple[GradientOwner, list[OwnedGradient]]] = {}
    for gradient in owned:
        found.setdefault(id(gradient.owner), (gradient.owner, []))[1].append(gradient)
    return list(found.values())


def part_of(gradient: torch.Tensor) -> Part:
    """Return what this rank holds of a plain gradient or a DTensor.  Raises: ConfigError for partial sums."""
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


def _power_over_ranks(parts: Sequence[Part], norm_type: float, device: torch.device) -> torch.Tensor:
    groups = _groups(list(dict.fromkeys(part.place for part in parts if part.place is not None)))
    num_ranks = math.prod(group.size() for group in groups)
    is_max = math.isinf(norm_type)
    by_share: dict[float, list[torch.Tensor]] = {}
    for part in parts:
        # Every copy of a shard adds its part of one: then one sum over all ranks counts each shard once.
        by_share.setdefault(1.0 if is_max else part.num_shards / num_ranks, []).append(part.local)
    total = power_of_norm([], norm_type, device)
    for share, tensors in by_share.items():
        power = power_of_norm(tensors, norm_type, device)
        total = torch.maximum(total, power) if is_max else total + power * share
    for group in groups:
        total = sum_of(total, group, is_max)
    return total


def _groups(places: list[DeviceMesh | dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Return the groups whose all-reduces, one after another, sum over all ranks that hold a part."""
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
            f"gradients lie on meshes {shapes} of which none contains the others; clip the parameters of each mesh by "
            "themselves"
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

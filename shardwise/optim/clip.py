"""Clip gradients that lie on different meshes, or on none, by their total norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate

from shardwise import torch_private
from shardwise.errors import ConfigError


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``, and return the norm before.

    Takes DTensors on any meshes beside plain parameters (which must have equal gradients on all ranks).  If the meshes
    together span all ranks, or there is one 1-D mesh, one all-reduce of one number is all the communication.

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
    if norm_type <= 0:
        raise ConfigError(f"norm_type is {norm_type}; expected a positive number or math.inf")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [param.grad for param in params if param.grad is not None]
    locals_ = [_local(gradient) for gradient in gradients]
    total = _total_norm(gradients, locals_, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite ({total.item()}), so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for local in locals_:
        local.mul_(coefficient.to(local.device, local.dtype))
    return total


def _local(gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor):
        return gradient.detach()
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise ConfigError(
            f"a gradient has placements {gradient.placements}; its partial sums must be reduced before a norm exists: "
            "redistribute it to Replicate or Shard"
        )
    return torch_private.local_of(gradient).detach()


def _total_norm(gradients: list[torch.Tensor], locals_: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    if not gradients:
        return torch.tensor(0.0)
    device = locals_[0].device
    meshes = list(dict.fromkeys(gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)))
    groups = _groups(meshes)
    num_ranks = math.prod(group.size() for group in groups)
    is_max = math.isinf(norm_type)
    total = torch.zeros((), device=device, dtype=torch.float64 if _has_double(locals_) else torch.float32)
    for gradient, local in zip(gradients, locals_, strict=True):
        if not local.numel():
            continue
        norm = torch.linalg.vector_norm(local, norm_type, dtype=total.dtype).to(device)
        if is_max:
            total = torch.maximum(total, norm)
        else:
            # Every copy of a shard adds its part of one: then one sum over all ranks counts each shard once.
            total = total + norm**norm_type * (_num_shards(gradient) / num_ranks)
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    return total if is_max else total ** (1.0 / norm_type)


def _has_double(locals_: list[torch.Tensor]) -> bool:
    return any(local.dtype == torch.float64 for local in locals_)


def _num_shards(gradient: torch.Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return 1
    mesh = gradient.device_mesh
    sizes = [mesh.size(i) for i, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate)]
    return math.prod(sizes)


def _groups(meshes: list[DeviceMesh]) -> list[dist.ProcessGroup]:
    """Return the groups whose all-reduces, one after another, sum over all ranks that hold a part."""
    if not meshes:
        return []
    world = dist.group.WORLD
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    assert world is not None
    if len(ranks) == world.size() and (len(meshes) > 1 or meshes[0].ndim > 1 or meshes[0].size() == world.size()):
        return [world] if world.size() > 1 else []
    largest = max(meshes, key=lambda mesh: mesh.size())
    inside = set(largest.mesh.flatten().tolist())
    if not ranks <= inside:
        raise ConfigError(
            f"gradients lie on meshes {[tuple(mesh.shape) for mesh in meshes]} of which none contains the others; clip the "
            "parameters of each mesh by themselves"
        )
    return [largest.get_group(axis) for axis in range(largest.ndim) if largest.size(axis) > 1]

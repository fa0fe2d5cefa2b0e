"""Gradients as backward leaves them on this rank, and as hooks of users follow them: before and after they are reduced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.units.axes import names_of
from shardwise.units.group import ShardGroup
from shardwise.units.param import UnitParam

Gradients = dict[UnitParam, torch.Tensor]


def take_gradients(group: ShardGroup) -> Gradients:
    """Return the local gradients of the full parameters, in the dtypes that they are reduced in, and clear them there."""
    taken: Gradients = {}
    for param in group.params:
        full = param.full
        if full is None:
            continue
        gradient = full.grad
        if gradient is None:
            continue
        if type(gradient) is not torch.Tensor and not lies_as(full, gradient):
            continue  # between calls a full parameter that stays shows the gradient of its shard: it has been reduced
        full.grad = None
        if not param.sharded.requires_grad:
            continue  # frozen since forward
        if type(gradient) is not torch.Tensor:
            gradient = _local_gradient(gradient, param, group)
        dtype = (
            group.dtypes.by_gradient.get(gradient.dtype) if param.grad_dtype is None and not param.keeps_dtype else None
        )
        if dtype is None:
            dtype = group.dtypes.of_reduction(param, gradient.dtype)
        taken[param] = gradient if gradient.dtype is dtype else gradient.to(dtype)
    return taken


def lies_as(full: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return True if ``gradient`` is one of the full parameter, not of its shard."""
    if not isinstance(gradient, DTensor):
        return not isinstance(full, DTensor)
    return isinstance(full, DTensor) and gradient.device_mesh == full.device_mesh


def _local_gradient(gradient: torch.Tensor, param: UnitParam, group: ShardGroup) -> torch.Tensor:
    gradient = torch_private.wait_tensor(gradient)
    if not isinstance(gradient, DTensor):
        return gradient
    assert param.inner_spec is not None
    placements = list(param.inner_spec.placements)
    dims, names = group.axes.dims, gradient.device_mesh.mesh_dim_names
    if dims is not None and names is not None:
        # On a full SPMD mesh the sum over the data-parallel axes is the reduction's to make.
        for name in (*names_of(dims.shard), *names_of(dims.replicate)):
            placements[names.index(name)] = gradient.placements[names.index(name)]
    if gradient.placements != tuple(placements):
        gradient = gradient.redistribute(placements=placements)
    return torch_private.wait_tensor(torch_private.local_of(gradient))


def add_gradients(old: Mapping[UnitParam, torch.Tensor], new: Mapping[UnitParam, torch.Tensor]) -> Gradients:
    """Return the sum per parameter; tensors of one side alone are taken over, neither side is changed."""
    total: Gradients = dict(old)
    for param, gradient in new.items():
        total[param] = total[param] + gradient if param in total else gradient
    return total


def run_gradient_hooks(params: Iterable[UnitParam]) -> None:
    """Run the hooks that users registered on sharded parameters to follow the accumulation of their gradients."""
    # Of those that are their own full form autograd has run them.
    for sharded, hook in torch_private.post_accumulate_hooks([p.sharded for p in params if p.full is not p.sharded]):
        hook(sharded)

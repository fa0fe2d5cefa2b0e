"""Gradients as backward leaves them on this rank, and as hooks of users follow them: before and after they are reduced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.units.axes import names_of
from shardwise.units.group import ShardGroup
from shardwise.units.param import UnitParam

Gradients = dict[UnitParam, torch.Tensor]


def take_gradients(group: ShardGroup, some: Iterable[UnitParam] | None = None) -> Gradients:
    """Return the local gradients of the full parameters, in the dtypes that they are reduced in, and clear them there.

    ``some``: of these parameters of the group; None: of all.
    """
    taken: Gradients = {}
    for param in group.params if some is None else some:
        full = param.full
        if full is None:
            continue
        gradient = full.grad
        if gradient is None:
            continue
        if type(gradient) is not torch.Tensor and not lies_as(full, gradient):
            continue  # between calls a full parameter that stays shows the gradient of its shard: it has been reduced
        full.grad = None
        if gradient.is_sparse:  # of an embedding: other ranks have other rows, and a section has all of them
            gradient = gradient.to_dense()
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


def change_by_hooks(params: Sequence[UnitParam], gradients: Sequence[torch.Tensor]) -> BaseException | None:
    """Let the hooks that users registered on sharded parameters see, and change, what is about to be accumulated.

    Of parameters that are their own full form autograd has run them.
    Returns: what a hook has raised: ``gradients`` are as they were for it and those after it.
    """
    hooked = torch_private.gradient_hooks([p.sharded for p in params])
    try:
        for index, hook in hooked:
            if params[index].full is not params[index].sharded:
                with torch.no_grad():
                    changed = hook(gradients[index])
                if changed is not None:
                    _take_changed(params[index], gradients[index], changed)
    except BaseException as error:
        return error
    return None


def _take_changed(param: UnitParam, gradient: torch.Tensor, changed: torch.Tensor) -> None:
    is_alike = isinstance(changed, DTensor) is isinstance(gradient, DTensor) and changed.shape == gradient.shape
    if not is_alike:
        raise StateError(
            f"a hook on the gradient of {param.fqn} was given a {type(gradient).__name__} of shape {tuple(gradient.shape)} and "
            f"returned a {type(changed).__name__} of shape {tuple(changed.shape)}: hooks on sharded parameters get the reduced "
            "gradient as a DTensor and return one like it, or None"
        )
    if isinstance(changed, DTensor) and isinstance(gradient, DTensor) and changed.placements != gradient.placements:
        changed = changed.redistribute(gradient.device_mesh, gradient.placements)
    torch_private.local_of(gradient).copy_(torch_private.wait_tensor(torch_private.local_of(changed)))


def run_gradient_hooks(params: Iterable[UnitParam], failed: BaseException | None = None) -> None:
    """Run the hooks that users registered on sharded parameters to follow the accumulation of their gradients.

    ``failed``: what an earlier hook has raised; it is raised here, when all else of the backward is done.
    """
    if failed is not None:
        raise failed
    followed = dict.fromkeys(params)  # each once, however many backwards have waited to be set
    ours = {param.hook_id for param in followed if param.full is param.sharded}
    for sharded, hook in torch_private.post_accumulate_hooks([param.sharded for param in followed], ours):
        hook(sharded)

"""``sync_module_states``: parameters and buffers of a unit as the first rank of its mesh has them, before they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.comm.board import open_board
from shardwise.comm.sync import broadcast_from_first
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.units.axes import MeshAxes


def values_of_first(named: Sequence[tuple[str, torch.Tensor]], axes: MeshAxes) -> list[torch.Tensor]:
    """Return tensors with the values of the first rank of the mesh: the same ones, or new ones for those on meta.  Collective.

    Raises: ConfigError where the first rank has some on meta itself, DesyncError if ranks pass others; on every rank.
    """
    dims = [dim for dim in (axes.replicate_mesh_dim, axes.shard_mesh_dim) if dim is not None]
    groups = [group for dim in dims if (group := axes.mesh.get_group(dim)).size() > 1]
    _agree(named, axes, groups)
    found = [
        torch.empty_like(tensor, device=axes.device, requires_grad=False) if tensor.is_meta else tensor.detach()
        for _, tensor in named
    ]
    for group in groups:  # along the replicas of the first shard, among others, then along the shards
        broadcast_from_first(found, group)
    return found


def sync_buffers(modules: Iterable[tuple[str, nn.Module]], axes: MeshAxes) -> None:
    """Let the buffers of modules, which come with their paths, have the values of the first rank.  Collective."""
    places = [(path, module, name) for path, module in modules for name, _ in module.named_buffers(recurse=False)]
    buffers = [(f"{path}.{name}", module.get_buffer(name)) for path, module, name in places]
    for (_, module, name), (_, buffer), value in zip(places, buffers, values_of_first(buffers, axes), strict=True):
        if buffer.is_meta:
            torch_private.buffers_of(module)[name] = value


def _agree(named: Sequence[tuple[str, torch.Tensor]], axes: MeshAxes, groups: Sequence[dist.ProcessGroup]) -> None:
    facts = [f"{name} of shape {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in named]
    empty = [name for name, tensor in named if tensor.is_meta]
    error: ShardwiseError | None = None
    if empty and dist.get_rank() == int(axes.mesh.mesh.min()):
        error = ConfigError(
            f"sync_module_states=True: the first rank has {empty[0]} on meta, expected values for all others to take. Load the "
            "weights on that rank before the model is sharded, or leave sync_module_states out and initialise after sharding"
        )
    try:
        for group in groups:  # an error goes from each group to those that its ranks are also in
            try:
                open_board(group, "sync_module_states").agree("sync_module_states", facts, error)
            except ShardwiseError as found:
                error = found
        if error is not None:
            raise error
    finally:
        del error  # the error refers to this frame

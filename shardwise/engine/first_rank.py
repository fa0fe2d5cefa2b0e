"""``sync_module_states``: broadcast parameters and buffers of a unit from the first rank of its mesh before sharding."""

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
    """Broadcast tensors from the first rank of the mesh; return them, with new ones for those on meta.  Collective.

    Raises: ConfigError if the first rank has some on meta, DesyncError if ranks pass different ones; on every rank.
    """
    dims = [dim for dim in (axes.replicate_mesh_dim, axes.shard_mesh_dim) if dim is not None]
    groups = [group for dim in dims if (group := axes.mesh.get_group(dim)).size() > 1]
    _agree(named, axes, groups)
    found = [
        torch.empty_like(tensor, device=axes.device, requires_grad=False) if tensor.is_meta else tensor.detach()
        for _, tensor in named
    ]
    for group in groups:  # first along the replicas, then along the shards
        broadcast_from_first(found, group)
    return found


def sync_buffers(modules: Iterable[tuple[str, nn.Module]], axes: MeshAxes) -> None:
    """Broadcast the buffers of ``modules``, pairs of path and module, from the first rank.  Collective."""
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
            f"sync_module_states=True: the first rank has {empty[0]} on meta, expected values to broadcast. Load the "
            "weights on that rank before sharding, or leave sync_module_states out and call init_parameters after sharding"
        )
    try:
        for group in groups:  # ranks carry an error from one group into the next
            try:
                open_board(group, "sync_module_states").agree("sync_module_states", facts, error)
            except ShardwiseError as found:
                error = found
        if error is not None:
            raise error
    finally:
        del error  # the error refers to this frame

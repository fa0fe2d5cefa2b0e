"""Meshes as the doors take them, checked and turned into axes."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, init_device_mesh

from shardwise import torch_private
from shardwise.errors import ArgumentTypeError, ConfigError, UsageError
from shardwise.units.axes import DataParallelMeshDims, MeshAxes, names_of

logger = logging.getLogger("shardwise")


def default_mesh(dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the 1-D mesh of all ranks; without a process group, make one (of one rank if no launcher set it up)."""
    if not dist.is_initialized():
        _join_or_stand_alone()
    return init_device_mesh(torch_private.accelerator_type(), (dist.get_world_size(),), mesh_dim_names=dim_names)


def _join_or_stand_alone() -> None:
    device_type = torch_private.accelerator_type()
    backend = "nccl" if device_type == "cuda" else "gloo" if device_type == "cpu" else None
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
        return
    logger.info("no process group and no launcher: shardwise makes a group of one rank")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def check_mesh(mesh: object) -> None:
    """Raise ArgumentTypeError unless ``mesh`` is a DeviceMesh."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"mesh is {mesh!r} of type {type(mesh).__name__}; expected a DeviceMesh, as init_device_mesh('cuda', (ranks,)) of "
            "torch.distributed.device_mesh makes one, or None for all ranks"
        )


def axes_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> MeshAxes:
    """Return the roles of the axes of ``mesh``: 1-D shards, 2-D is (replicate, shard), named ones as ``dims`` says.

    Raises: ValueError, AssertionError with torch's words for meshes that do not fit.
    """
    check_mesh(mesh)
    if dims is not None:
        return _named_axes(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; pass the data-parallel axes alone, e.g. mesh['dp'], "
            "or name them with dp_mesh_dims"
        )
    if mesh.ndim == 1:
        return MeshAxes(mesh, shard_mesh_dim=0)
    if mesh.mesh_dim_names is None:
        raise UsageError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified, "
            'e.g. init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))'
        )
    return MeshAxes(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> MeshAxes:
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*names_of(dims.shard), *names_of(dims.replicate)):
        if name not in names:
            raise ConfigError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
    if not names_of(dims.shard):
        return MeshAxes(_one_axis(mesh, names_of(dims.replicate)), None, 0, dims, mesh)
    shard = _one_axis(mesh, names_of(dims.shard))
    if not names_of(dims.replicate):
        return MeshAxes(shard, 0, None, dims, mesh)
    joined = torch_private.join_meshes([_one_axis(mesh, names_of(dims.replicate)), shard])
    return MeshAxes(joined, 1, 0, dims, mesh)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else torch_private.flatten_mesh(mesh[names], "_".join(names))


def resolve_reshard(value: Any, num_shards: int) -> bool | int:
    """Return ``reshard_after_forward`` as True, False or a true divisor of ``num_shards``.

    Raises: ConfigError for another type or a number that does not divide.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ConfigError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {value}"
        )
    if value < 1 or value > num_shards or num_shards % value != 0:
        raise ConfigError(
            f"If passing reshard_after_forward as an int, it should be a factor of {num_shards}, not {value}"
        )
    if value == 1:
        logger.warning(
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, "
            "instead of reshard_after_forward=True (bool)"
        )
        return False
    return True if value == num_shards else value

"""Which axes of a device mesh shard and which replicate."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DeviceMesh, Shard

from shardwise.errors import ConfigError, UsageError


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a full SPMD mesh are data-parallel; several names are flattened into one axis.

    Attributes:
        shard: axis name(s) over which parameters are sharded.
        replicate: axis name(s) over which they are replicated (HSDP, or DDP if ``shard`` is None).

    Raises: ValueError if both are None.  Source: torch.distributed.fsdp.DataParallelMeshDims.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ConfigError("At least one of shard or replicate must be set in DataParallelMeshDims")


def names_of(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return a role of :class:`DataParallelMeshDims` as the names of its axes."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, eq=False)
class MeshAxes:
    """A data-parallel mesh and the roles of its axes.

    Attributes:
        mesh: the mesh of data-parallel axes alone (1-D or 2-D).
        shard_mesh_dim: index of the axis that shards, None if nothing is sharded.
        replicate_mesh_dim: index of the axis that replicates, None if none does.
        dims: set when parameters are DTensors on ``spmd_mesh``, which has the data-parallel axes among others.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)

    @functools.cached_property  # asked for at every collective
    def num_shards(self) -> int:
        """Ranks on the shard axis; 1 without one."""
        return 1 if self.shard_mesh_dim is None else self.mesh.size(self.shard_mesh_dim)

    @functools.cached_property
    def shard_rank(self) -> int:
        """This rank's coordinate on the shard axis."""
        return 0 if self.shard_mesh_dim is None else self.mesh.get_local_rank(self.shard_mesh_dim)

    @functools.cached_property
    def num_replicas(self) -> int:
        """Ranks on the replica axis; 1 without one."""
        return 1 if self.replicate_mesh_dim is None else self.mesh.size(self.replicate_mesh_dim)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())


@dataclass(frozen=True, eq=False)
class DataParallelMeshInfo:
    """A data-parallel mesh as a placement function names it.

    Attributes:
        mesh: the mesh of data-parallel axes alone (1-D or 2-D).
        shard_mesh_dim: index of the axis that shards, None if nothing is sharded.
        replicate_mesh_dim: index of the axis that replicates, None if none does.
        dp_mesh_dims: set when parameters are DTensors on ``spmd_mesh``, which has the data-parallel axes among others.

    Source: torch's classes of these names in ``torch.distributed.fsdp``.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)


class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh with an axis that shards.  Raises: AssertionError without ``shard_mesh_dim``."""

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None:
            raise UsageError("Expects non-None shard_mesh_dim")


class HSDPMeshInfo(FSDPMeshInfo):
    """A mesh with an axis that shards and one that replicates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise UsageError("Expects non-None replicate_mesh_dim")


class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh with an axis that replicates and none that shards."""

    def __post_init__(self) -> None:
        if self.replicate_mesh_dim is None:
            raise UsageError("Expects non-None replicate_mesh_dim")


@dataclass(frozen=True, eq=False)
class ShardPlacementResult:
    """Where ``shard_placement_fn`` wants one parameter.

    Attributes:
        placement: the dim to cut; None: dim 0.
        mesh_info: the data-parallel mesh, as :class:`FSDPMeshInfo` or :class:`HSDPMeshInfo`; parameters on one mesh must
            share one object.

    Source: torch.distributed.fsdp.ShardPlacementResult.
    """

    placement: Shard | None
    mesh_info: DataParallelMeshInfo


def axes_from(info: object) -> MeshAxes | None:
    """Return what an object with the fields of :class:`DataParallelMeshInfo`, ours or torch's, says; None for others."""
    mesh, shards = getattr(info, "mesh", None), getattr(info, "shard_mesh_dim", None)
    if not isinstance(mesh, DeviceMesh):
        return None
    given = getattr(info, "dp_mesh_dims", None)
    dims = None if given is None else DataParallelMeshDims(given.shard, given.replicate)
    return MeshAxes(mesh, shards, getattr(info, "replicate_mesh_dim", None), dims, getattr(info, "spmd_mesh", None))


def smaller_axes(axes: MeshAxes, size: int) -> MeshAxes:
    """Return a mesh whose shard axis has ``size`` ranks, neighbours on the shard axis of ``axes``; makes process groups."""
    ranks: torch.Tensor = axes.mesh.mesh.view(-1, size)
    return MeshAxes(DeviceMesh(axes.mesh.device_type, ranks), shard_mesh_dim=1, replicate_mesh_dim=0)

"""The roles of mesh axes (shard, replicate), the strategies, and the placements of sharded parameters.

A strategy says what a rank holds; a unit needs to know which axis of its mesh cuts parameters and which one copies them, and a
DTensor needs one placement per axis, also of tensor parallelism's, in the order in which they cut.

Sources of strategies: ZeRO, arXiv 1910.02054 (stages 1 to 3); hybrid sharding, arXiv 2304.11277; state over all ranks beside
hybrid sharding ("HFSDP"), Megatron-FSDP.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwise import torch_private
from shardwise.errors import ConfigError, UsageError
from shardwise.fsdp.param import ShardedParam
from shardwise.layout import ChunkShard, row_major
from shardwise.torch_private import DTensorSpec


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel axes of a full SPMD mesh; several names are flattened into one axis.

    Attributes:
        shard: axis name(s) over which parameters are sharded.
        replicate: axis name(s) over which parameters are replicated (HSDP, or DDP if ``shard`` is None).

    Raises: ConfigError if both are None.  Source: torch.distributed.fsdp.DataParallelMeshDims.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ConfigError("At least one of shard or replicate must be set in DataParallelMeshDims")


def names_of(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axis names of one attribute of :class:`DataParallelMeshDims`."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, eq=False)
class DataParallelMeshInfo:
    """A data-parallel mesh in the result of a placement function.

    Attributes:
        mesh: the mesh of the data-parallel axes only (1-D or 2-D).
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
    _needed: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self._needed:
            if getattr(self, name) is None:
                raise UsageError(f"Expects non-None {name}")


# Compared by identity, since meshes that are equal may have groups of other ranks: ``groups`` tells whether two are one.
@dataclass(frozen=True, eq=False)
class MeshAxes(DataParallelMeshInfo):
    """A data-parallel mesh and the roles of its axes."""

    @functools.cached_property  # every collective reads it
    def num_shards(self) -> int:
        """The number of ranks on the shard axis; 1 without such an axis."""
        return 1 if self.shard_mesh_dim is None else self.mesh.size(self.shard_mesh_dim)

    @functools.cached_property
    def shard_rank(self) -> int:
        """This rank's coordinate on the shard axis."""
        return 0 if self.shard_mesh_dim is None else self.mesh.get_local_rank(self.shard_mesh_dim)

    @functools.cached_property
    def num_replicas(self) -> int:
        """The number of ranks on the replica axis; 1 without such an axis."""
        return 1 if self.replicate_mesh_dim is None else self.mesh.size(self.replicate_mesh_dim)

    @functools.cached_property
    def groups(self) -> tuple[str | None, ...]:
        """The names of the process groups of the axis that shards and of the one that replicates."""
        dims = self.shard_mesh_dim, self.replicate_mesh_dim
        return tuple(None if dim is None else self.mesh.get_group(dim).group_name for dim in dims)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())


class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh with an axis that shards.  Raises: UsageError without ``shard_mesh_dim``."""

    _needed = ("shard_mesh_dim",)


class HSDPMeshInfo(FSDPMeshInfo):
    """A mesh with an axis that shards and one that replicates."""

    _needed = ("shard_mesh_dim", "replicate_mesh_dim")


class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh with an axis that replicates and none that shards."""

    _needed = ("replicate_mesh_dim",)


@dataclass(frozen=True, eq=False)
class ShardPlacementResult:
    """The placement of one parameter that ``shard_placement_fn`` returns.

    Attributes:
        placement: the dim to shard; None: dim 0.
        mesh_info: the data-parallel mesh, a :class:`FSDPMeshInfo` or :class:`HSDPMeshInfo`.

    Source: torch.distributed.fsdp.ShardPlacementResult.
    """

    placement: Shard | None
    mesh_info: DataParallelMeshInfo


def axes_from(info: object) -> MeshAxes | None:
    """Return the axes of a mesh info, shardwise's or torch's; None for any other object."""
    mesh, shards = getattr(info, "mesh", None), getattr(info, "shard_mesh_dim", None)
    if not isinstance(mesh, DeviceMesh):
        return None
    named = getattr(info, "dp_mesh_dims", None)
    dims = None if named is None else DataParallelMeshDims(named.shard, named.replicate)
    return MeshAxes(mesh, shards, getattr(info, "replicate_mesh_dim", None), dims, getattr(info, "spmd_mesh", None))


def smaller_axes(axes: MeshAxes, size: int) -> MeshAxes:
    """Return a mesh whose shard axis has ``size`` ranks, neighbours on the shard axis of ``axes``; it makes process groups."""
    ranks: torch.Tensor = axes.mesh.mesh.view(-1, size)
    return MeshAxes(DeviceMesh(axes.mesh.device_type, ranks), shard_mesh_dim=1, replicate_mesh_dim=0)


# ---- DTensor placements of sharded parameters: without and with replicas, with tensor parallelism, on a full SPMD mesh.


def shard_spec(param: nn.Parameter, fqn: str, axes: MeshAxes, shard: Shard | None) -> tuple[int, DTensorSpec]:
    """Return the dim of ``param`` to shard on ``axes``, and the spec of its sharded form; ``shard`` None means ``Shard(0)``."""
    dim = 0 if shard is None else shard.dim
    dim += param.ndim if dim < 0 else 0
    if param.ndim and not 0 <= dim < param.ndim:
        raise UsageError(
            f"Shard dim {dim} is invalid for {param.ndim}D tensor: '{fqn}' has shape {tuple(param.shape)}; "
            f"return a Shard of 0..{param.ndim - 1} from shard_placement_fn"
        )
    if isinstance(param, DTensor):
        spec_of = _tensor_parallel_spec if axes.dp_mesh_dims is None else _spmd_spec
        return dim, spec_of(param, fqn, axes, dim)
    if axes.dp_mesh_dims is not None:
        raise ConfigError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
            f"distribute_module). Got plain tensor for parameter '{fqn}'."
        )
    placements = _data_parallel_placements(axes, Shard(dim) if param.ndim else Replicate())
    stride = row_major(tuple(param.shape))
    return dim, torch_private.make_spec(axes.mesh, placements, param.shape, stride, param.dtype)


def cut_shard(whole: torch.Tensor, cut: ChunkShard, rank: int) -> torch.Tensor:
    """Return the shard of ``rank``: a view of a plain tensor ``whole``, a copy of a tensor subclass.

    Subclasses (quantised weights) are sharded and copied by methods that they define: ``chunk``, ``new_zeros``, ``copy_``.
    ``narrow`` may be missing, and ``clone`` may quantise again.
    """
    rows = cut.rows(rank)
    if type(whole) is torch.Tensor:  # a view: packing copies it into the memory that it shares with other shards
        return whole if cut.is_whole else whole.narrow(cut.dim, rows.start, len(rows))
    shard, chunks = whole, () if cut.is_whole else whole.chunk(cut.num_shards, cut.dim)
    if any(type(chunk) is not type(whole) for chunk in chunks):  # the class does not define ``chunk``
        shard = whole.narrow(cut.dim, rows.start, len(rows))
    elif chunks:
        shard = chunks[rank] if rank < len(chunks) else chunks[0].new_zeros(cut.shard_shape(rank))
    copied = shard.new_zeros(shard.shape)
    return copied.copy_(shard) if type(copied) is type(whole) else shard.clone()


def _data_parallel_placements(axes: MeshAxes, shard: Placement) -> tuple[Placement, ...]:
    placements: list[Placement] = [Replicate()] * axes.mesh.ndim
    if axes.shard_mesh_dim is not None:
        placements[axes.shard_mesh_dim] = shard
    return tuple(placements)


def _tensor_parallel_spec(param: DTensor, fqn: str, axes: MeshAxes, dim: int) -> DTensorSpec:
    inner = torch_private.spec_of(param)
    if inner.mesh.device_type != axes.mesh.device_type:
        raise ConfigError(
            f"Requires DTensor to have mesh of the same type as the FSDP mesh but got {inner.mesh.device_type} for "
            f"DTensor '{fqn}' and {axes.mesh.device_type} for FSDP"
        )
    mesh = torch_private.join_meshes([axes.mesh, inner.mesh])
    shard = torch_private.strided_shard(dim, inner.num_shards_map[dim])
    placements = (*_data_parallel_placements(axes, shard), *inner.placements)
    return torch_private.make_spec(mesh, placements, param.shape, param.stride(), param.dtype)


def _spmd_spec(param: DTensor, fqn: str, axes: MeshAxes, dim: int) -> DTensorSpec:
    inner = torch_private.spec_of(param)
    dims, names = axes.dp_mesh_dims, inner.mesh.mesh_dim_names
    assert dims is not None
    if (axes.spmd_mesh is not None and inner.mesh != axes.spmd_mesh) or names is None:
        raise ConfigError(
            f"Expected param's DTensor mesh to be the same mesh passed to fully_shard, but '{fqn}' is on {inner.mesh}"
        )
    placements, shards, copies = list(inner.placements), names_of(dims.shard), names_of(dims.replicate)
    for role, name in (*(("shard", name) for name in shards), *(("replicate", name) for name in copies)):
        index = names.index(name)
        if not isinstance(placements[index], Replicate):
            raise ConfigError(
                f"Expected Replicate() on DP {role} dim '{name}' (index {index}) but got {placements[index]}"
            )
        if role == "shard":
            # Axes to the right cut first, so that this one cuts what is left of each of their parts.
            right = zip(inner.mesh.shape[index + 1 :], inner.placements[index + 1 :], strict=True)
            factor = math.prod(size for size, each in right if getattr(each, "dim", None) == dim)
            placements[index] = torch_private.strided_shard(dim, factor)
    if len(shards) <= 1:
        return torch_private.make_spec(inner.mesh, placements, param.shape, param.stride(), param.dtype)
    # Several shard axes act as one: in the parameter's mesh the flattened axis replaces the first of them.
    meshes, flat = list[DeviceMesh](), list[Placement]()
    first = min(map(names.index, shards))
    for index, name in enumerate(names):
        if index == first:
            meshes.append(axes.mesh)
            flat += _data_parallel_placements(axes, placements[index])
        elif name not in (*shards, *copies):
            meshes.append(inner.mesh[name])
            flat.append(placements[index])
    return torch_private.make_spec(torch_private.join_meshes(meshes), flat, param.shape, param.stride(), param.dtype)


def sub_parameter(param: ShardedParam, cut: ChunkShard, local: torch.Tensor, axes: MeshAxes) -> nn.Parameter:
    """Return ``local`` as the parameter on the smaller mesh of ``reshard_after_forward``."""
    # With tensor parallelism the two meshes need not have one parent mesh, and then cannot be joined.  So the spec has only the
    # data-parallel sharding, and the local tensor-parallel shape is its global shape.
    shape = torch.Size(cut.shape)
    placements = _data_parallel_placements(axes, Replicate() if cut.is_whole else Shard(cut.dim))
    spec = torch_private.make_spec(axes.mesh, placements, shape, row_major(cut.shape), local.dtype)
    sub = nn.Parameter(torch_private.dtensor_from_local(local, spec), requires_grad=param.sharded.requires_grad)
    torch_private.give_attributes(param.attributes, sub)
    return sub


class Strategy(str, Enum):
    """What each rank of a data-parallel run holds; ``shard_model`` and ``fully_shard`` take members, and their values as text.

    Attributes:
        ZERO3: parameters, gradients and optimizer state are sharded.
        HSDP: the same over the second axis of a 2-D mesh, with copies over the first.
        HFSDP: parameters as HSDP between forward and backward; gradients and optimizer state are sharded over both axes.
        ZERO2: gradients and optimizer state are sharded, parameters too, but from forward to backward they are full.
        ZERO1: every rank has all parameters and gradients, and the optimizer state of some (``ZeroRedundancyOptimizer``).
        DDP: every rank has everything.

    Raises: ConfigError for what is no strategy.

    Example:
        >>> Strategy("zero2") is Strategy.ZERO2
        True
    """

    ZERO3 = "zero3"
    HSDP = "hsdp"
    HFSDP = "hfsdp"
    ZERO2 = "zero2"
    ZERO1 = "zero1"
    DDP = "ddp"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ConfigError(f"strategy is {value!r}, expected one of {', '.join(cls)}")

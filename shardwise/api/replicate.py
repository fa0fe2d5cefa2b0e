"""``replicate``: data parallelism with whole parameters on every rank (DDP), by the engine that shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor

from shardwise import torch_private
from shardwise.api.fully_shard import check_compression, check_modules, modules_in
from shardwise.api.mesh import axes_of, default_mesh
from shardwise.api.module import FSDPModule, mix_in
from shardwise.codec.compression_policy import CompressionPolicy
from shardwise.comm.sync import broadcast_from_first
from shardwise.engine.attachment import Attachment, attachment_of
from shardwise.engine.build import Preset, build_unit
from shardwise.engine.hooks import keep_buffers_equal
from shardwise.errors import ConfigError
from shardwise.units.axes import DataParallelMeshDims, MeshAxes
from shardwise.units.precision import MixedPrecisionPolicy, OffloadPolicy, offload_from, precision_from


class ReplicateModule(FSDPModule):
    """Mixed into the class of every module that ``replicate`` was called on; the methods of :class:`FSDPModule`."""


@overload
def replicate(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = ...,
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    compression: CompressionPolicy | None = ...,
    **ddp: Any,
) -> ReplicateModule: ...


@overload
def replicate(
    module: list[nn.Module],
    ignored_modules: Iterable[nn.Module] | None = ...,
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    compression: CompressionPolicy | None = ...,
    **ddp: Any,
) -> list[ReplicateModule]: ...


def replicate(
    module: nn.Module | list[nn.Module],
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    compression: CompressionPolicy | None = None,
    **ddp: Any,
) -> ReplicateModule | list[ReplicateModule]:
    """Average gradients over ranks that all hold the whole parameters.

    Parameters and gradients become DTensors with ``Replicate()`` on a 1-D mesh; every call makes one unit.  Small gradients of
    neighbouring units are all-reduced together, and those of one unit for the whole model in buckets while backward runs.
    Called the older way, with any argument of ``DistributedDataParallel`` (``device_ids``, ``process_group``, ...) or
    ``ignored_modules``, it behaves as that: parameters stay plain tensors, and parameters and buffers are made equal to
    rank 0's.

    Args:
        module: the module, or several that form one unit.
        ignored_modules: modules whose parameters are left alone (older way).
        mesh: the 1-D mesh of replicas; None: all ranks, its axis called "replicate".
        mp_policy, offload_policy, ignored_params: as for :func:`shardwise.fully_shard`.
        dp_mesh_dims: names the replicate axes of a full SPMD mesh; shard axes are refused.
        compression: how gradients travel in fewer bits; ``gather`` must be None.
        ddp: the older way's ``process_group``, ``device_ids``, ``device_id``, ``broadcast_buffers`` (default True); the
            tuning arguments of DDP (bucket sizes, ``static_graph``, ``find_unused_parameters``, ``gradient_as_bucket_view``)
            have nothing to tune here and are taken as they are.

    Returns: ``module``, its class mixed with :class:`ReplicateModule`.

    Raises: RuntimeError for a module that ``fully_shard`` manages, or a ``device_id`` of a wrong type; ValueError for a mesh
        that is not 1-D.

    Example:
        >>> from shardwise import replicate
        >>> replicate(model)  # doctest: +SKIP
    """
    modules = modules_in(module, "replicate")
    for each in modules:
        if attachment_of(each) is not None and not isinstance(each, ReplicateModule):
            raise RuntimeError("Cannot apply `replicate()` on a Module already managed by `fully_shard`")
    check_modules(modules, "replicate")
    is_plain = bool(ddp) or ignored_modules is not None
    axes = _plain_axes(ddp) if is_plain and mesh is None else _mesh_axes(mesh, dp_mesh_dims)
    ignored = {id(param) for param in ignored_params or ()}
    ignored |= {id(param) for each in ignored_modules or () for param in each.parameters()}
    precision, offload = precision_from(mp_policy), offload_from(offload_policy)
    preset = Preset(axes, False, precision, offload, None, frozenset(ignored), is_plain, compression)
    check_compression(compression, axes, "replicate")
    if is_plain:
        tensors = [t for each in modules for t in (*each.parameters(), *each.buffers()) if id(t) not in ignored]
        plain = [tensor.detach() for tensor in tensors if not isinstance(tensor, DTensor)]
        broadcast_from_first(plain, axes.mesh.get_group(0))
    attachment = build_unit(modules, preset)
    for each in attachment.unit.modules:
        if is_plain and ddp.get("broadcast_buffers", True):
            keep_buffers_equal(each, axes.mesh.get_group(0))
        mix_in(each, ReplicateModule, "Replicate")
    return cast("ReplicateModule | list[ReplicateModule]", module)


def _mesh_axes(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None) -> MeshAxes:
    mesh = mesh if mesh is not None else default_mesh(("replicate",))
    if dims is not None:
        axes = axes_of(mesh, dims)
        if axes.shard_mesh_dim is not None:
            raise ConfigError(
                "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). "
                "Use fully_shard() for sharding."
            )
        return axes
    if mesh.ndim != 1:
        raise ConfigError(f"replicate expects a 1D DeviceMesh but got {mesh}")
    return MeshAxes(mesh, replicate_mesh_dim=0)


def _plain_axes(ddp: dict[str, Any]) -> MeshAxes:
    device_id = ddp.get("device_id")
    if device_id is not None and not isinstance(device_id, (int, torch.device)):
        raise RuntimeError(f"Expected device_id to be int or torch.device, but got {type(device_id)}")
    mesh: DeviceMesh | None = ddp.get("device_mesh")
    group: dist.ProcessGroup | None = ddp.get("process_group")
    if mesh is None and group is None:
        mesh = default_mesh(("replicate",))
    elif mesh is None and group is not None:
        device_type = torch_private.accelerator_type()
        mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=("replicate",))
    assert mesh is not None
    return MeshAxes(mesh, replicate_mesh_dim=0)


def _state(module: nn.Module) -> Attachment | None:
    return attachment_of(module)


replicate.state = _state  # pyright: ignore[reportFunctionMemberAccess]

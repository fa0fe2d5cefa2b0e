"""``replicate``: data parallelism with whole parameters on every rank (DDP), by the engine that shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor

from shardwise import torch_private
from shardwise.api.arguments import ids_of_ignored
from shardwise.api.fully_shard import check_compression, check_modules, modules_in
from shardwise.api.mesh import axes_of, check_mesh, default_mesh
from shardwise.api.module import FSDPModule, mix_in
from shardwise.codec.compression_policy import CompressionPolicy
from shardwise.comm.sync import broadcast_from_first
from shardwise.engine.attachment import Attachment, attachment_of
from shardwise.engine.build import Preset, build_unit
from shardwise.engine.hooks import keep_buffers_equal
from shardwise.errors import ArgumentTypeError, ConfigError, StateError, did_you_mean
from shardwise.units.axes import DataParallelMeshDims, MeshAxes
from shardwise.units.precision import MixedPrecisionPolicy, OffloadPolicy, offload_from, precision_from

OLDER_ARGUMENTS = frozenset(
    {
        *("process_group", "device_mesh", "device_ids", "device_id", "output_device", "dim"),
        *("init_sync", "broadcast_buffers", "forward_sync_buffers", "mixed_precision"),
        *("bucket_cap_mb", "bucket_cap_mb_list", "gradient_as_bucket_view", "batched_grad_copy", "static_graph"),
        *("find_unused_parameters", "skip_all_reduce_unused_params", "check_reduction"),
        *("delay_all_reduce_named_params", "param_to_hook_all_reduce"),
    }
)


class ReplicateModule(FSDPModule):
    """Mixed into the class of every module that ``replicate`` was called on; the methods of :class:`FSDPModule`."""


@overload
def replicate(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = ...,
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
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
    offload_policy: OffloadPolicy | None = ...,
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
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008  frozen
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
    rank 0's.  Otherwise ranks begin with what each has: values that differ are a DesyncError in the first averaged backward.

    Args:
        module: the module, or several that form one unit.
        ignored_modules: modules whose parameters are left alone (older way).
        mesh: the 1-D mesh of replicas; None: all ranks, its axis called "replicate".
        mp_policy, offload_policy, ignored_params: as for :func:`shardwise.fully_shard`.
        dp_mesh_dims: names the replicate axes of a full SPMD mesh; shard axes are refused.
        compression: how gradients travel in fewer bits; ``gather`` must be None.
        ddp: the older way's ``process_group``, ``device_mesh``, ``device_ids``, ``device_id``, ``init_sync``,
            ``forward_sync_buffers`` and ``broadcast_buffers``, which mean what they mean to ``DistributedDataParallel``; its
            tuning arguments (bucket sizes, ``static_graph``, ``find_unused_parameters``, ``gradient_as_bucket_view``) have
            nothing to tune here and are taken as they are.

    Returns: ``module``, its class mixed with :class:`ReplicateModule`.

    Raises: RuntimeError for a module that ``fully_shard`` manages, or a ``device_id`` of a wrong type; TypeError for an
        argument that neither way has; ValueError for a mesh that is not 1-D, and for DDP's ``mixed_precision``.

    Example:
        >>> from shardwise import replicate
        >>> replicate(model)  # doctest: +SKIP
    """
    _check_older(ddp)
    modules = modules_in(module, "replicate")
    for each in modules:
        if attachment_of(each) is not None and not isinstance(each, ReplicateModule):
            raise StateError("Cannot apply `replicate()` on a Module already managed by `fully_shard`")
    check_modules(modules, "replicate")
    is_plain = bool(ddp) or ignored_modules is not None
    axes = _plain_axes(ddp) if is_plain and mesh is None else _mesh_axes(mesh, dp_mesh_dims)
    ignored = ids_of_ignored(ignored_params, "replicate")
    ignored |= {id(param) for each in ignored_modules or () for param in each.parameters()}
    precision, offload = precision_from(mp_policy), offload_from(offload_policy)
    preset = Preset(axes, False, precision, offload, None, ignored, is_plain, compression)
    check_compression(compression, axes, "replicate")
    if is_plain and ddp.get("init_sync", True):
        shared = [tensor.detach() for tensor in _start_tensors(modules, ddp) if id(tensor) not in ignored]
        broadcast_from_first(shared, axes.mesh.get_group(0))
    attachment = build_unit(modules, preset)
    for each in attachment.unit.modules:
        if is_plain and _shares_buffers(ddp):
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
    check_mesh(mesh)
    if mesh.ndim != 1:
        raise ConfigError(f"replicate expects a 1D DeviceMesh but got {mesh}")
    return MeshAxes(mesh, replicate_mesh_dim=0)


def _check_older(ddp: dict[str, Any]) -> None:
    unknown = sorted(set(ddp) - OLDER_ARGUMENTS)
    known = [*OLDER_ARGUMENTS, "mesh", "mp_policy", "offload_policy", "ignored_params", "dp_mesh_dims", "compression"]
    if unknown:
        raise ArgumentTypeError(
            f"replicate() has no argument {', '.join(unknown)}.{did_you_mean(unknown[0], known)} It takes "
            "mesh, mp_policy, offload_policy, ignored_params, dp_mesh_dims and compression, or, called the older "
            "way, ignored_modules and what DistributedDataParallel takes"
        )
    if ddp.get("mixed_precision") is not None:
        raise ConfigError(
            "replicate() does not take DDP's mixed_precision: pass mp_policy=MixedPrecisionPolicy(param_dtype=..., "
            "reduce_dtype=...) and no argument of DistributedDataParallel"
        )


def _shares_buffers(ddp: dict[str, Any]) -> bool:
    """True if buffers are made equal before forwards: ``broadcast_buffers`` is the older name, None the default of both."""
    newer, older = ddp.get("forward_sync_buffers"), ddp.get("broadcast_buffers")
    return older is not False if newer is None else bool(newer)


def _start_tensors(modules: list[nn.Module], ddp: dict[str, Any]) -> list[torch.Tensor]:
    """Return the plain tensors that DDP makes equal at the start: buffers, unless the older name says no."""
    found: list[torch.Tensor] = [param for each in modules for param in each.parameters()]
    if _shares_buffers(ddp) or ddp.get("forward_sync_buffers") is not None:
        found += [buffer for each in modules for buffer in each.buffers()]
    return [tensor for tensor in found if not isinstance(tensor, DTensor)]


def _plain_axes(ddp: dict[str, Any]) -> MeshAxes:
    device_id = ddp.get("device_id")
    if device_id is not None and not isinstance(device_id, (int, torch.device)):
        raise StateError(f"Expected device_id to be int or torch.device, but got {type(device_id)}")
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

"""``fully_shard``: parameters, gradients and optimizer states sharded over data-parallel ranks (ZeRO-3).

The call convention and the methods are those of torch's FSDP2 (``torch.distributed.fsdp.fully_shard``, 2.13), so that a
user changes one import.  Source of the method: ZeRO, arXiv 1910.02054; PyTorch FSDP, arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast, overload

from torch import nn
from torch.distributed.tensor import DeviceMesh

from shardwise import torch_private
from shardwise.api.arguments import explains_arguments, ids_of_ignored
from shardwise.api.mesh import axes_of, default_mesh, resolve_reshard
from shardwise.api.module import FSDPModule, mix_in
from shardwise.codec.compression_policy import CompressionPolicy
from shardwise.engine.attachment import Attachment, attachment_of, is_managed_by_torch
from shardwise.engine.build import Preset, ShardPlacementFn, build_unit
from shardwise.engine.hooks import wrap_forward_method
from shardwise.engine.roots import provisional_engine
from shardwise.engine.wiring import share_lanes
from shardwise.errors import ConfigError, UsageError
from shardwise.units.axes import DataParallelMeshDims, MeshAxes
from shardwise.units.precision import MixedPrecisionPolicy, OffloadPolicy, offload_from, precision_from


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    compression: CompressionPolicy | None = ...,
    sync_module_states: bool = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    compression: CompressionPolicy | None = ...,
    sync_module_states: bool = ...,
) -> list[FSDPModule]: ...


@explains_arguments
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008  frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    compression: CompressionPolicy | None = None,
    sync_module_states: bool = False,
) -> FSDPModule | list[FSDPModule]:
    """Shard the parameters of ``module`` that no earlier call on a submodule has sharded.

    Call it on each block and on the root, in any order before the first forward; bottom-up costs least, because what an
    outer module has sharded already has to move.  Every call makes one unit: its parameters are all-gathered
    together before forward and backward, and its gradients are reduced together.  Parameters become DTensors cut along
    dim 0 like ``torch.chunk``; while a unit computes they are ordinary tensors.

    Args:
        module: the module, or several that form one unit.
        mesh: 1-D: shard over it.  2-D with names: replicate over the first axis, shard over the second (HSDP).  None: all
            ranks; without a process group a group of one rank is made.
        reshard_after_forward: True: give full parameters back after forward and gather them again in backward.  False:
            keep them.  An int: keep shards over that many ranks.  None: True, but False for the root.
        shard_placement_fn: maps a parameter to None, a ``Shard(dim)``, or a :class:`ShardPlacementResult` on another mesh.
        mp_policy: dtypes of compute, reduction and output.
        offload_policy: None or ``OffloadPolicy()``: nothing is offloaded.
            ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer states in host memory.
        ignored_params: parameters that are neither sharded nor moved.
        dp_mesh_dims: names the data-parallel axes of ``mesh`` when that is a full SPMD mesh with DTensor parameters on it.
        compression: what of the unit travels in fewer bits; between replicas alone on a mesh that has them.  None: nothing.
        sync_module_states: broadcast parameters and buffers of the first rank of the mesh before sharding; other ranks may
            have them on meta.  If False, all ranks must have the same values, which the first forward checks.

    Returns: ``module``, its class mixed with :class:`FSDPModule`.

    Raises:
        ValueError: no module, a container without forward, a mesh or ``reshard_after_forward`` that does not fit, bad
            placements.
        AssertionError: the module was sharded before, an unnamed 2-D mesh, a shard dim that the tensor does not have.

    Example:
        >>> import torch
        >>> from shardwise import fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> for layer in model:  # doctest: +SKIP
        ...     fully_shard(layer)
        >>> fully_shard(model)  # doctest: +SKIP
    """
    modules = modules_in(module, "fully_shard")
    check_modules(modules, "fully_shard")
    mesh = mesh if mesh is not None else default_mesh()
    axes = axes_of(mesh, dp_mesh_dims)
    if axes.shard_mesh_dim is None:
        reshard: bool | int | None = False
    else:
        reshard = None if reshard_after_forward is None else resolve_reshard(reshard_after_forward, axes.num_shards)
    ignored = ids_of_ignored(ignored_params, "fully_shard")
    precision, offload = precision_from(mp_policy), offload_from(offload_policy)
    preset = Preset(
        axes, reshard, precision, offload, shard_placement_fn, ignored, False, compression, sync_module_states
    )
    check_compression(compression, axes, "fully_shard")
    attachment = build_unit(modules, preset)
    for each in attachment.unit.modules:
        mix_in(each, FSDPModule, "FSDP")
    return cast("FSDPModule | list[FSDPModule]", module)


def modules_in(given: object, door: str) -> list[nn.Module]:
    """Return what was given to ``door``, a module or several, as a list.

    Raises: ConfigError if it is anything else.
    """
    if isinstance(given, nn.Module):
        return [given]
    if isinstance(given, type):
        raise ConfigError(
            f"{door} takes a module, found the class {given.__name__}. Make an instance and call {door} on it, or on each of "
            f"its blocks: for block in model.modules(): if isinstance(block, {given.__name__}): {door}(block)"
        )
    modules = list(cast(Iterable[object], given)) if isinstance(given, Iterable) else [given]
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ConfigError(
                f"{door} takes a module or a list of modules, found {each!r} of type {type(each).__name__}"
            )
    if not modules:
        raise ConfigError(f"{door} takes a module or a list of modules, found an empty {type(given).__name__}")
    return cast(list[nn.Module], modules)


def check_modules(modules: Sequence[nn.Module], door: str) -> None:
    """Raise unless every module can be given to ``door``."""
    for module in modules:
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if is_container and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"{door} does not support containers that do not implement forward: {module}\n"
                f"Call {door} on its children instead."
            )
        if is_managed_by_torch(module):
            raise ConfigError(
                f"{door}: torch's own {' and '.join(torch_private.composable_apis_of(module))} manages the parameters of this "
                f"{type(module).__name__} already; call one of the two, not both"
            )
        if attachment_of(module) is not None:
            raise UsageError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"{type(module).__name__} was given to {door} before: leave out one of the calls; shardwise.policy(...) and "
                "the set_* methods change settings afterwards"
            )


def check_compression(policy: object, axes: MeshAxes, door: str) -> None:
    """Raise ConfigError unless ``policy`` is a CompressionPolicy, or None, for parameters on ``axes``."""
    if policy is not None and not isinstance(policy, CompressionPolicy):
        raise ConfigError(f"{door}: compression is {policy!r}, expected a CompressionPolicy or None")
    if policy is not None and policy.gather is not None and axes.replicate_mesh_dim is not None:
        raise ConfigError(
            f"{door}: CompressionPolicy(gather={policy.gather!r}) on a mesh with replicas, between which parameters are not "
            "gathered; leave gather=None: reduce is for what goes between replicas"
        )


def _state(module: nn.Module) -> Attachment | None:
    return attachment_of(module)


fully_shard.state = _state  # pyright: ignore[reportFunctionMemberAccess]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat ``module.method_name`` like ``forward``: unshard before it, reshard after it.

    Does nothing if ``module`` is not sharded.  Raises: ValueError if it has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ConfigError(f"{type(module)} does not have a method {method_name}")
    attachment = attachment_of(module)
    assert attachment is not None
    wrap_forward_method(module, attachment, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots (stages of a pipeline) share streams and buffers.

    Raises: ValueError if a module is not sharded.
    """
    attachments = [attachment_of(cast(nn.Module, module)) for module in modules]
    for module, attachment in zip(modules, attachments, strict=True):
        if attachment is None:
            raise ConfigError(f"Expects list of FSDPModules but got {module}")
    engines = [provisional_engine(attachment) for attachment in attachments if attachment is not None]
    share_lanes(engines)

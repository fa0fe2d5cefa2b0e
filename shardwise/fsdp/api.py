"""``fully_shard``, ``replicate`` and ``shard_model``: parameters, gradients and optimizer states over data-parallel ranks.

The call convention and the methods are those of torch's FSDP2 (``torch.distributed.fsdp.fully_shard``, 2.13), so that a
user changes one import.  Source of the method: ZeRO, arXiv 1910.02054; PyTorch FSDP, arXiv 2304.11277.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, init_device_mesh

from shardwise import torch_private
from shardwise.arguments import check_kind, check_whole, explains_arguments, ids_of_ignored, unknown_argument
from shardwise.collectives.compressed import CompressionPolicy
from shardwise.collectives.owned import broadcast_from_first
from shardwise.collectives.streams import accelerator_type
from shardwise.errors import ArgumentTypeError, ConfigError, StateError, UsageError
from shardwise.fsdp.attachment import attachment_of, is_managed_by_torch, names_of_units
from shardwise.fsdp.build import Preset, ShardPlacementFn, build_unit, refuse_wrappers
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.hooks import keep_buffers_equal, wrap_forward_method
from shardwise.fsdp.mesh import DataParallelMeshDims, MeshAxes, Strategy, names_of
from shardwise.fsdp.module import FSDPModule, mix_in
from shardwise.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy, offload_from, precision_from
from shardwise.fsdp.roots import bind_units, provisional_engine
from shardwise.fsdp.unit import Unit
from shardwise.observe import say
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES, Child, UnitRow, UnitTable, group_blocks, repeated_blocks

# ---- Describe the units of a model.


def describe_units(model: nn.Module) -> UnitTable:
    """Return the units of ``model`` with their sizes; ``str()`` of the result is a table.

    It needs no forward and no communication; every rank gets the same table.  Tied parameters count in the unit that owns
    them.  With tensor parallelism, bytes and elements are those of the local part, which data parallelism gathers.

    Raises: ConfigError if ``model`` contains no unit.

    Example:
        >>> from shardwise import describe_units
        >>> print(describe_units(model))  # doctest: +SKIP
        unit        modules  parameters      bytes  padding          route
        (root)            1      36,992  144.5 KiB     1.00  shared memory
        blocks.0-7        8     399,872  1.525 MiB     1.00  shared memory
        2 units, 436,864 parameters, 1.667 MiB
    """
    names = names_of_units(model)
    if not names:
        raise ConfigError(f"{type(model).__name__} contains no unit; call shard_model, fully_shard or replicate first")
    return UnitTable(tuple(_row(unit, name) for unit, name in names.items()))


def _row(unit: Unit, name: str) -> UnitRow:
    shards = [param.shard for param in unit.params]
    numel = sum(shard.numel for shard in shards)
    num_bytes = sum(param.shard.numel * param.dtype.itemsize for param in unit.params)
    is_cut = unit.memory.is_collective
    moved = sum(each.section_numel * each.num_shards if is_cut and not each.is_whole else each.numel for each in shards)
    route = unit.route if engine_of(unit) is not None else ""
    return UnitRow(name, len(unit.modules), numel, num_bytes, moved / numel if numel else 1.0, route)


# ---- Check the meshes that the APIs take, and assign the roles of their axes.

logger = logging.getLogger("shardwise")


def default_mesh(dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the 1-D mesh of all ranks; initialize the process group if needed (of one rank without a launcher)."""
    device_type = accelerator_type()
    if not dist.is_initialized():
        backend = {"cuda": "nccl", "cpu": "gloo"}.get(device_type)
        if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
            dist.init_process_group(backend)
        else:
            logger.info("no process group and no launcher: shardwise makes a group of one rank")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=dim_names)


def _checked_mesh(mesh: object, dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return ``mesh``, or the default mesh for None.  Raises: ArgumentTypeError for any other object."""
    if mesh is None:
        return default_mesh(dim_names)
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"mesh is {mesh!r} of type {type(mesh).__name__}; expected a DeviceMesh, as init_device_mesh('cuda', (ranks,)) of "
            "torch.distributed.device_mesh makes one, or None for all ranks"
        )
    return mesh


def _axes_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> MeshAxes:
    """Return the roles of the axes of ``mesh``: 1-D is (shard,), 2-D is (replicate, shard), ``dims`` names others.

    Raises: ConfigError, UsageError with torch's messages for a mesh that does not fit.
    """
    if dims is not None:
        names = mesh.mesh_dim_names
        if names is None:
            raise ConfigError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
        roles = [role for role in (names_of(dims.replicate), names_of(dims.shard)) if role]
        for name in (name for role in roles for name in role):
            if name not in names:
                raise ConfigError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
        parts = [mesh[r[0]] if len(r) == 1 else torch_private.flatten_mesh(mesh[r], "_".join(r)) for r in roles]
        # Several names of one role act as one axis: the ranks of a collective are those of all of them.
        joined = parts[0] if len(parts) == 1 else torch_private.join_meshes(parts)
        return MeshAxes(joined, len(parts) - 1 if dims.shard else None, 0 if dims.replicate else None, dims, mesh)
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
    first, second = mesh.mesh_dim_names
    if "shard" in first or "replicate" in second:
        raise ConfigError(
            f"the axes of the mesh are named {(first, second)}, and of two axes the first replicates and the second shards. "
            f"Swap them: init_device_mesh(device, {tuple(reversed(mesh.shape))}, mesh_dim_names={(second, first)}), or say it: "
            f"dp_mesh_dims=DataParallelMeshDims(shard={first!r}, replicate={second!r})"
        )
    return MeshAxes(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _resolve_reshard(value: Any, num_shards: int) -> bool | int | None:
    """Return ``reshard_after_forward`` as None, True, False or a true divisor of ``num_shards``.

    Raises: ConfigError for another type or a number that does not divide.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ConfigError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {value}"
        )
    if not 1 <= value <= num_shards or num_shards % value:
        raise ConfigError(
            f"If passing reshard_after_forward as an int, it should be a factor of {num_shards}, not {value}"
        )
    return value > 1 if value in (1, num_shards) else value


def _check_strategy(strategy: Strategy, axes: MeshAxes, reshard_after_forward: object) -> None:
    """Raise ConfigError if ``fully_shard`` does not take ``strategy``, or not with these arguments."""
    name, num_axes = strategy.value, 2 if strategy in (Strategy.HSDP, Strategy.HFSDP) else 1
    if strategy in (Strategy.ZERO1, Strategy.DDP):
        raise ConfigError(f"{name} shards no parameter: call shard_model(model, strategy={name!r}) or replicate")
    if axes.dp_mesh_dims is not None or axes.mesh.ndim != num_axes:
        raise ConfigError(f"{name} takes a mesh of {num_axes} data-parallel axes without dp_mesh_dims, not {axes.mesh}")
    if strategy in _KEEPING and reshard_after_forward is not None:
        raise ConfigError(f"{name} says what is kept after forward: leave out reshard_after_forward")


_KEEPING = (Strategy.ZERO2, Strategy.HFSDP)  # more of the parameters between forward and backward than of the gradients
_Args = ParamSpec("_Args")
_Kind = TypeVar("_Kind")


class _Api(Protocol[_Args, _Kind]):
    """An API that takes a module or a list of them, and returns what it was given, with the methods of ``_Kind``."""

    @overload
    def __call__(self, module: nn.Module, *args: _Args.args, **kwargs: _Args.kwargs) -> _Kind: ...

    @overload
    def __call__(self, module: list[nn.Module], *args: _Args.args, **kwargs: _Args.kwargs) -> list[_Kind]: ...


def _of(_: type[_Kind]) -> Callable[[Callable[Concatenate[Any, _Args], Any]], _Api[_Args, _Kind]]:
    """Return the decorator that types an API as :class:`_Api` and gives it ``state(module)``, as torch's composable APIs."""

    def with_state(function: Any) -> Any:
        function.state = attachment_of
        return function

    return with_state


@_of(FSDPModule)
@explains_arguments
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    strategy: Strategy | str | None = None,
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

    Call it on each block and then on the root, before the first forward.  Every call makes one unit: its parameters are
    all-gathered together before forward and backward, and its gradients are reduced together.  Parameters become DTensors
    that are sharded along dim 0 like ``torch.chunk``; while a unit computes they are ordinary tensors.

    Args:
        module: the module, or several that form one unit.
        mesh: 1-D: shard over it.  2-D with names: replicate over the first axis, shard over the second (HSDP).  None: all
            ranks; without a process group a group of one rank is made.
        strategy: "zero3", "hsdp", "hfsdp" or "zero2" of :class:`Strategy`; None: "zero3" on a 1-D mesh, "hsdp" on a 2-D one.
        reshard_after_forward: True: free full parameters after forward and gather them again in backward.  False: keep
            them.  An int: keep shards over that many ranks.  None: True, but False for the root.
        shard_placement_fn: maps a parameter to None, a ``Shard(dim)``, or a :class:`ShardPlacementResult` on another mesh.
        mp_policy: dtypes of compute, reduction and output.
        offload_policy: None or ``OffloadPolicy()``: nothing is offloaded.
            ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer states in host memory.
        ignored_params: parameters that are neither sharded nor moved.
        dp_mesh_dims: names the data-parallel axes of ``mesh`` when that is a full SPMD mesh with DTensor parameters on it.
        compression: compression of the unit's parameters and gradients; with replicas, of gradients between replicas.
            None: no compression.
        sync_module_states: broadcast parameters and buffers of the first rank of the mesh before sharding; other ranks may
            have them on meta.  If False, each rank shards its own values; the first forward warns if they differ.

    Returns: ``module``, its class mixed with :class:`FSDPModule`.

    Raises:
        ConfigError: no module, a container without forward, a mesh, strategy or ``reshard_after_forward`` that does not fit,
            bad placements.
        UsageError: the module was sharded before, an unnamed 2-D mesh, a shard dim that the tensor does not have.

    Example:
        >>> import torch
        >>> from shardwise import fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> for layer in model:  # doctest: +SKIP
        ...     fully_shard(layer)
        >>> fully_shard(model)  # doctest: +SKIP
    """
    modules = modules_in(module, "fully_shard")
    axes = _axes_of(_checked_mesh(mesh), dp_mesh_dims)
    if strategy is not None:
        strategy = Strategy(strategy)
        _check_strategy(strategy, axes, reshard_after_forward)
    if strategy is Strategy.ZERO2:
        reshard_after_forward = False
    elif strategy is Strategy.HFSDP:  # shards over all ranks; from forward to backward those over the inner axis
        flat = torch_private.flatten_mesh(axes.mesh, "_".join(axes.mesh.mesh_dim_names or ()))
        axes, reshard_after_forward = MeshAxes(flat, shard_mesh_dim=0), axes.num_shards
    reshard = False if axes.shard_mesh_dim is None else _resolve_reshard(reshard_after_forward, axes.num_shards)
    ignored = ids_of_ignored(ignored_params, "fully_shard")
    policies = precision_from(mp_policy), offload_from(offload_policy)
    preset = Preset(axes, reshard, *policies, shard_placement_fn, ignored, False, compression, sync_module_states)
    # All arguments are checked by now: from here on the model changes.
    unit = _build(modules, preset, FSDPModule)
    if reshard is False and strategy in _KEEPING:
        for each in (unit, *unit.beside):
            each.settings.keeps_for_backward = True  # full parameters stay for a backward, not after an evaluation
    return cast(Any, module)


def modules_in(given: object, api: str) -> list[nn.Module]:
    """Return the argument of ``api``, a module or several, as a list.

    Raises: ConfigError, UsageError or StateError if it is anything else, or if ``api`` cannot take one of the modules.
    """
    is_one = isinstance(given, nn.Module) or not isinstance(given, Iterable)
    modules = [given] if is_one else [*cast(Iterable[object], given)]
    wrong = next((each for each in modules or [given] if not isinstance(each, nn.Module)), None)
    if wrong is not None:
        raise ConfigError(f"{api} takes a module or a list of modules, found {wrong!r} of type {type(wrong).__name__}")
    for module in cast(list[nn.Module], modules):
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if is_container and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"{api} does not support containers that do not implement forward: {module}\n"
                f"Call {api} on its children instead."
            )
        if is_managed_by_torch(module):
            raise ConfigError(
                f"{api}: torch's own {' and '.join(torch_private.composable_apis_of(module))} manages the parameters of this "
                f"{type(module).__name__} already; call one of the two, not both"
            )
        if api == "replicate" and isinstance(module, FSDPModule) and not isinstance(module, ReplicateModule):
            raise StateError("Cannot apply `replicate()` on a Module already managed by `fully_shard`")
        if attachment_of(module) is not None:
            raise UsageError(
                f"Each distinct composable distributed API can only be applied to a module once. {type(module).__name__} "
                f"was given to {api} before: leave out one call; shardwise.policy(...) changes settings"
            )
    return cast(list[nn.Module], modules)


def _build(modules: list[nn.Module], preset: Preset, kind: type[FSDPModule]) -> Unit:
    """Make a unit of ``modules``, and give them the methods of ``kind``."""
    policy = preset.compression
    if policy is not None and not isinstance(policy, CompressionPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"compression is {policy!r}, expected a CompressionPolicy or None")
    if policy is not None and policy.gather is not None and preset.axes.replicate_mesh_dim is not None:
        raise ConfigError(
            f"CompressionPolicy(gather={policy.gather!r}) on a mesh with replicas, between which parameters are not gathered; "
            "leave gather=None: reduce compresses the gradients between replicas"
        )
    attachment = build_unit(modules, preset)
    # Last, since a class is not to have methods for a unit that could not be made.
    for each in attachment.unit.modules:
        mix_in(each, kind, attachment)
    return attachment.unit


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat ``module.method_name`` like ``forward``: unshard before it, reshard after it.

    It does nothing if ``module`` is not sharded.  Raises: ConfigError if it has no such method.
    """
    if (attachment := attachment_of(module)) is not None:
        if not hasattr(module, method_name):
            raise ConfigError(f"{type(module)} does not have a method {method_name}")
        wrap_forward_method(module, attachment, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots (stages of a pipeline) share streams and buffers.

    Raises: ConfigError if a module is not sharded.
    """
    # Stages of a pipeline run in turn on one device: with a pool each, every stage would hold its own idle buffers.
    engines: list[Engine] = []
    for module in modules:
        attachment = attachment_of(cast(nn.Module, module))
        if attachment is None:
            raise ConfigError(f"Expects list of FSDPModules but got {module}")
        engines.append(provisional_engine(attachment))
    for engine in engines[1:]:
        engine.comm_ctx.streams, engine.comm_ctx.pool = engines[0].comm_ctx.streams, engines[0].comm_ctx.pool
        bind_units(engine)


# ---- ``replicate``: data parallelism with full parameters on every rank (DDP), by the same engine.

# One that a newer torch adds may change what is trained: it is refused until its effect here is known.
OLDER_ARGUMENTS = {
    *("process_group", "device_mesh", "device_ids", "device_id", "output_device", "dim"),
    *("init_sync", "broadcast_buffers", "forward_sync_buffers", "mixed_precision"),
    *("bucket_cap_mb", "bucket_cap_mb_list", "gradient_as_bucket_view", "batched_grad_copy", "static_graph"),
    *("find_unused_parameters", "skip_all_reduce_unused_params", "check_reduction"),
    *("delay_all_reduce_named_params", "param_to_hook_all_reduce"),
}


class ReplicateModule(FSDPModule):
    """The mixin of every module that ``replicate`` was called on, with the methods of :class:`FSDPModule`."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward reduces gradients; DDP's attribute.  Set it before the forward, which decides for its backward."""
        attachment = self._attachment()
        return attachment.unit.policy.sync if attachment.asked_sync is None else attachment.asked_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._attachment().asked_sync = bool(value)

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate gradients of the forwards in this context, unsynced, as ``DistributedDataParallel.no_sync`` does.

        The forward decides, wherever its backward runs; the first backward of a later forward reduces the sums.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


@_of(ReplicateModule)
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
    parameters: Literal["dtensor", "plain"] = "dtensor",
    **ddp: Any,
) -> ReplicateModule | list[ReplicateModule]:
    """Average gradients over ranks that all have the full parameters.

    Parameters and gradients become DTensors with ``Replicate()`` on a 1-D mesh; every call makes one unit, whose
    gradients are all-reduced when its backward ends; those of a single unit for the whole model in buckets during backward.
    With ``parameters="plain"`` it behaves like ``DistributedDataParallel``: parameters stay plain tensors, and parameters and
    buffers are broadcast from rank 0.  Any argument of that class (``device_ids``, ``process_group``, ...) or
    ``ignored_modules``, the older call, chooses the same.  Otherwise nothing is broadcast, and values that
    differ between ranks raise DesyncError in the first averaged backward.

    Args:
        module: the module, or several that form one unit.
        ignored_modules: modules whose parameters are ignored (older call).
        mesh: the 1-D mesh of replicas; None: all ranks, its axis called "replicate".
        mp_policy, offload_policy, ignored_params: as for :func:`shardwise.fully_shard`.
        dp_mesh_dims: names the replicate axes of a full SPMD mesh; shard axes are refused.
        compression: compression of gradients; ``gather`` must be None.
        parameters: "plain" or "dtensor", what parameters are afterwards.
        ddp: arguments of the older call: ``process_group``, ``device_mesh``, ``device_ids``, ``device_id``, ``init_sync``,
            ``forward_sync_buffers`` and ``broadcast_buffers`` have the same meaning as for ``DistributedDataParallel``; its
            tuning arguments (bucket sizes, ``static_graph``, ``find_unused_parameters``, ``gradient_as_bucket_view``) are
            accepted and have no effect.

    Returns: ``module``, its class mixed with :class:`ReplicateModule`.

    Raises: StateError for a module that ``fully_shard`` manages, or a ``device_id`` of a wrong type; ConfigError for an
        argument that neither call has, other ``parameters``, a mesh that is not 1-D, and DDP's ``mixed_precision``.

    Example:
        >>> from shardwise import replicate
        >>> replicate(model)  # doctest: +SKIP
    """
    for name in sorted(ddp.keys() - OLDER_ARGUMENTS):
        known = [*inspect.signature(replicate).parameters][1:-1] + sorted(OLDER_ARGUMENTS)
        raise unknown_argument("replicate", name, known)
    if parameters not in ("dtensor", "plain"):
        raise ConfigError(f"replicate(parameters={parameters!r}); expected 'dtensor' or 'plain'")
    if ddp.get("mixed_precision") is not None:
        raise ConfigError("replicate() does not take DDP's mixed_precision: pass mp_policy and no argument of DDP")
    modules = modules_in(module, "replicate")
    is_plain = parameters == "plain" or bool(ddp) or ignored_modules is not None
    axes = _replica_axes(mesh, dp_mesh_dims, ddp)
    ignored = ids_of_ignored(ignored_params, "replicate")
    ignored |= {id(param) for each in ignored_modules or () for param in each.parameters()}
    options = precision_from(mp_policy), offload_from(offload_policy), None, ignored, is_plain, compression
    # Buffers are broadcast before forwards; ``broadcast_buffers`` is the older name, None means the default.
    newer = ddp.get("forward_sync_buffers")
    shares_buffers = ddp.get("broadcast_buffers") is not False if newer is None else bool(newer)
    # Before sharding, so that the forms of parameters that DDP's users already hold have the first rank's values.
    if is_plain and ddp.get("init_sync", True):
        found: list[torch.Tensor] = [param for each in modules for param in each.parameters()]
        if shares_buffers or newer is not None:
            found += [buffer for each in modules for buffer in each.buffers()]
        shared = [each.detach() for each in found if id(each) not in ignored and not isinstance(each, DTensor)]
        broadcast_from_first(shared, axes.mesh.get_group(0))
    for each in _build(modules, Preset(axes, False, *options), ReplicateModule).modules:
        if is_plain and shares_buffers:
            keep_buffers_equal(each, axes.mesh.get_group(0))
    return cast(Any, module)


def _replica_axes(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, ddp: dict[str, Any]) -> MeshAxes:
    device_id, group = ddp.get("device_id"), ddp.get("process_group")
    if device_id is not None and not isinstance(device_id, (int, torch.device)):
        raise StateError(f"Expected device_id to be int or torch.device, but got {type(device_id)}")
    mesh = mesh if mesh is not None else ddp.get("device_mesh")
    if mesh is None and group is not None:
        mesh = DeviceMesh.from_group(group, accelerator_type(), mesh_dim_names=("replicate",))
    mesh = _checked_mesh(mesh, ("replicate",))
    axes = MeshAxes(mesh, replicate_mesh_dim=0) if dims is None else _axes_of(mesh, dims)
    if axes.shard_mesh_dim is not None:
        raise ConfigError(
            "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). Use fully_shard() for sharding."
        )
    if axes.mesh.ndim != 1:
        raise ConfigError(f"replicate expects a 1D DeviceMesh but got {mesh}")
    return axes


# ---- ``shard_model``: ``fully_shard`` with automatically chosen units.
# One unit for the whole model gathers all of it at once; one per layer sends hundreds of small messages.  Users of FSDP wrap
# the repeated blocks, by hand or by a list of classes (``transformer_auto_wrap_policy`` of FSDP1); here blocks are found as
# what repeats, and ``plan/grouping.py`` chooses units from their descriptions.

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def families_of(model: nn.Module, ignored: frozenset[int]) -> Iterator[tuple[Child, ...]]:
    """Yield, for every module of ``model`` that has repeated blocks, its children with parameters.

    The search runs from outer to inner modules and does not enter blocks or modules that are units already.  Parameters whose
    id is in ``ignored`` do not count; a tied parameter counts in its first block.
    """
    seen: set[int] = set()
    counted = set(ignored)
    todo = [("", model)]
    while todo:
        path, parent = todo.pop()
        pairs: list[tuple[Child, nn.Module]] = []
        for name, module in parent.named_children():
            # A module that two parents share, or one without parameters, makes no block.
            if id(module) in seen or all(id(param) in ignored for param in module.parameters()):
                continue
            seen.add(id(module))
            pairs.append((_describe(f"{path}.{name}" if path else name, module, parent), module))
        blocks = {child.path for child in repeated_blocks([child for child, _ in pairs])}
        if blocks:
            yield tuple(_weighed(child, module, counted) if child.path in blocks else child for child, module in pairs)
        inner = [(child.path, m) for child, m in pairs if child.path not in blocks and not child.is_explicit]
        todo += reversed(inner)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of ``model`` by their path."""
    children = (child for family in families_of(model, frozenset()) for child in repeated_blocks(family))
    return {child.path: model.get_submodule(child.path) for child in children}


def _describe(path: str, module: nn.Module, parent: nn.Module) -> Child:
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward
    # The norms or projections inside a layer are equal modules, too.  So outside of containers only a module with children can
    # be a block.
    is_listed = isinstance(parent, _CONTAINERS)
    inner = _unwrapped(module)
    kind = vars(type(inner)).get("_original_class", type(inner))
    can_be_unit = not is_list and (is_listed or any(True for _ in module.children()))
    # A first layer often has one parameter more, but is a block of the same class.
    kind_of_block = kind if is_listed else None
    named = inner.named_parameters(remove_duplicate=False)
    structure = tuple((name, tuple(param.shape), param.dtype) for name, param in named)
    return Child(path, (kind, structure), 0, attachment_of(module) is not None, can_be_unit, kind_of_block)


def _weighed(child: Child, module: nn.Module, counted: set[int]) -> Child:
    own = {id(param): _num_bytes(param) for param in _own_parameters(module) if id(param) not in counted}
    counted.update({} if child.is_explicit else own)
    return child if child.is_explicit else replace(child, num_bytes=sum(own.values()))


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters below ``module`` that belong to no inner unit."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if attachment_of(child) is None:
            yield from _own_parameters(child)


def _num_bytes(param: nn.Parameter) -> int:
    """Return the bytes that data parallelism gathers: with tensor parallelism, those of the largest local part."""
    numel = param.numel()
    if isinstance(param, DTensor):
        sizes = (param.device_mesh.size(axis) for axis, each in enumerate(param.placements) if each.is_shard())
        numel = -(-numel // math.prod(sizes))
    return numel * param.element_size()


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers, so that a compiled or checkpointed block equals an unwrapped one."""
    while len(children := list(module.children())) == 1 and not any(True for _ in module.parameters(recurse=False)):
        module = children[0]
    return module


@runtime_checkable
class MemoryPolicy(Protocol):
    """Makes a step of a model fit into memory; :class:`shardwise.MemoryLimit` is one."""

    def fit(
        self, model: nn.Module, mesh: DeviceMesh, strategy: str, min_unit_bytes: int, precision: MixedPrecisionPolicy
    ) -> OffloadPolicy | None:
        """Change what blocks of ``model`` keep for backward, before it is sharded; return a place of shards, or None."""


# Makes the policy of a limit in bytes; filled when shardwise is imported, since ``fsdp`` may not import ``offload``.
memory_policies: list[Callable[[int | str], MemoryPolicy]] = []


@explains_arguments
def shard_model(
    model: nn.Module,
    *,
    strategy: Strategy | str | None = None,
    min_unit_bytes: int = DEFAULT_MIN_UNIT_BYTES,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008  frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    compression: CompressionPolicy | None = None,
    sync_module_states: bool = False,
    memory: MemoryPolicy | int | str | None = None,
) -> FSDPModule:
    """Call :func:`fully_shard` on the repeated blocks of ``model``, several small ones in one unit, and on ``model``.

    Blocks are two or more outermost children of one module with the same class and parameter structure (names, shapes,
    dtypes).  In a ``ModuleList``, ``ModuleDict`` or ``Sequential`` all such children are blocks, with the others of their
    class (a first layer often has one parameter more); in any other module only children that have children themselves.
    Wrappers of compiled or checkpointed blocks do not count.

    Neighbouring blocks smaller than ``min_unit_bytes`` are merged evenly into units of at least that size.  Each larger block
    is a unit.  All other parameters belong to the unit of ``model``, and a model without repeated blocks is one unit.

    A module that ``fully_shard`` or ``replicate`` was called on before does not change, with everything in it, and is never
    merged.  Print :func:`describe_units` to see the units; rank 0 logs the same table at level INFO (``TORCH_LOGS=fsdp``).

    A unit of several blocks is gathered when the first of them runs and resharded when the last has run.  Blocks may run in
    another order than in the container, or not at all; that needs more memory for a time, but results are the same.

    Args:
        model: the root module; only parameters of inner units may be sharded already.
        strategy: a :class:`Strategy`, or its value: "zero3", "zero2", "hsdp" or "hfsdp" shard over ``mesh``.  "ddp":
            :func:`replicate` of the whole model; "zero1": the same with plain parameters, which ``ZeroRedundancyOptimizer``
            takes.  None: "zero3" on a 1-D mesh, "hsdp" on a 2-D one.
        min_unit_bytes: bytes of a unit's unsharded parameters, in the dtypes in which they are stored, without
            ``ignored_params``; a tied parameter counts in its first block.  0 never merges.  With the default, 1.5 MiB, larger
            units were not faster: for 64 blocks of 0.2 MB (two CPU ranks) eight in a unit were best, while blocks of 12.6 MB
            hide the latency of a collective by themselves.  Raise it for slow links; about two units are unsharded at once.
        mesh, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy: as for :func:`fully_shard`.
            ``output_dtype`` of ``mp_policy`` applies to the outputs of ``model`` only; activations between blocks stay in the
            compute dtype.
        ignored_params, dp_mesh_dims, compression, sync_module_states: as for :func:`fully_shard`, for all units.
        memory: a :class:`MemoryLimit`, with which a step fits into so much memory; or "8 GiB", or bytes: one without inputs,
            which plans in the first training forward.

    Returns: ``model``, its class mixed with :class:`FSDPModule`.

    Raises:
        ConfigError: ``model`` is no module, or a container without forward; ``min_unit_bytes`` is negative; and
            what :func:`fully_shard` raises.
        UsageError: ``model`` was sharded before.

    Example:
        >>> from shardwise import describe_units, shard_model
        >>> shard_model(model)  # doctest: +SKIP
        >>> print(describe_units(model))  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  from user code
        raise ConfigError(
            f"shard_model takes the root module, found {type(model).__name__}; "
            "to make one unit of several modules call fully_shard([...]) before shard_model(root)."
        )
    check_whole("min_unit_bytes", min_unit_bytes, 0, "; 0 never merges blocks")
    modules_in(model, "shard_model")
    strategy = None if strategy is None else Strategy(strategy)
    if memory is not None:
        memory = memory_policies[0](memory) if isinstance(memory, int | str) else memory
        check_kind("shard_model: memory", memory, MemoryPolicy, "bytes, a text such as '8 GiB', or a MemoryLimit")
        mesh = mesh if mesh is not None else default_mesh()
        name = (strategy or Strategy.ZERO3).value
        offload_policy = memory.fit(model, mesh, name, min_unit_bytes, mp_policy) or offload_policy
    if strategy is Strategy.ZERO1 or strategy is Strategy.DDP:
        given = reshard_after_forward, shard_placement_fn, dp_mesh_dims
        if any(each is not None for each in given) or sync_module_states:
            raise ConfigError(f"shard_model: strategy {strategy.value!r} shards no parameter: leave out what shards")
        options: dict[str, Any] = {"ignored_params": ignored_params, "compression": compression}
        options["parameters"] = "plain" if strategy is Strategy.ZERO1 else "dtensor"
        return replicate(model, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy, **options)
    mesh = mesh if mesh is not None else default_mesh()
    mp_policy = precision_from(mp_policy)
    # Between blocks a cast to the output dtype and back would cost memory and precision.
    within = replace(mp_policy, output_dtype=None)
    ignored_params = set(ignored_params or ())  # read more than once below
    ignored = ids_of_ignored(ignored_params, "shard_model")
    refuse_wrappers(model.named_modules(), ignored)
    shard: Callable[..., object] = partial(
        cast(Any, fully_shard),
        mesh=mesh,
        strategy=strategy,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
        compression=compression,
        sync_module_states=sync_module_states,
    )
    for children in list(families_of(model, ignored)):
        for paths in group_blocks(children, min_unit_bytes):
            modules = [model.get_submodule(path) for path in paths]
            shard(modules[0] if len(modules) == 1 else modules, mp_policy=within)
    shard(model, mp_policy=mp_policy)
    if dist.get_rank() == 0:
        say(f"shard_model(min_unit_bytes={min_unit_bytes:,}) made of {type(model).__name__}:\n{describe_units(model)}")
    return cast("FSDPModule", model)


# ---- ``use_in``: make code that calls torch's FSDP2 by name call shardwise.

# Classes need no replacement: shardwise accepts torch's policies and meshes, and modules are instances of its FSDPModule.
_NAMED: list[Any] = [fully_shard, replicate, register_fsdp_forward_method, share_comm_ctx]
_OURS: dict[str, Any] = {each.__name__: each for each in _NAMED}
_OLDER_PATHS = ("torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard")
_PLACES = ("torch.distributed.fsdp", "torch.distributed._composable.replicate_with_fsdp")


class use_in(contextlib.ExitStack):
    """Replace torch's ``fully_shard`` and related functions in the namespaces of ``modules`` by those of shardwise.

    It is for code that calls ``fully_shard`` itself: pass a trainer's module that has imported the name, or
    ``torch.distributed.fsdp`` for code that imports it at run time (accelerate, Lightning, transformers), also from the older
    path ``torch.distributed._composable.fsdp``.  A warning names other modules that have imported torch's functions by name.
    Only these namespaces change, from the call on or inside ``with``; call it before the model is sharded, on every rank.

    Attributes:
        replaced: pairs of a module and a name, in the order of replacement.

    Raises: ConfigError if a module has none of these names.

    Example: ``with use_in(their_trainer): their_trainer.main()``, or ``use_in(their_trainer)`` once at the start of a script.
    """

    def __init__(self, *modules: ModuleType) -> None:
        super().__init__()
        added = [each for module in modules for each in _at_older_paths(module) if each not in modules]
        self.replaced: list[tuple[ModuleType, str]] = [
            (module, name) for module in (*modules, *added) for name, value in vars(module).items() if _is_torchs(value)
        ]
        for module in modules:
            has_ours = any(value is ours for value in vars(module).values() for ours in _OURS.values())  # called again
            if not (has_ours or any(owner is module for owner, _ in self.replaced)):
                raise ConfigError(
                    f"{module.__name__} has no name for torch's fully_shard; pass the module that calls it, or "
                    "torch.distributed.fsdp if that one imports it in a function"
                )
        torchs: set[int] = set()
        for module, name in self.replaced:
            before = getattr(module, name)
            torchs.add(id(before))
            self.callback(setattr, module, name, before)
            setattr(module, name, _OURS[before.__name__])
        # torch.distributed reads the state of modules by these names, and shards none.
        others = [(name, each) for name, each in [*sys.modules.items()] if not name.startswith("torch.distributed.")]
        named = [(name, map(id, [*getattr(each, "__dict__", {}).values()])) for name, each in others]
        if left := [name for name, ids in named if torchs.intersection(ids)]:
            logger.warning("%s imported torch's function before use_in: pass these modules, too", ", ".join(left))


def _at_older_paths(module: ModuleType) -> list[ModuleType]:
    """Return torch's other modules that have the names of ``module``.

    They are imported here: a later import would copy the replaced names, and ``__exit__`` would not restore them.
    """
    found: list[ModuleType] = []
    for name in _OLDER_PATHS if module.__name__ == "torch.distributed.fsdp" else ():
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name))
    return found


def _is_torchs(value: object) -> bool:
    return callable(value) and getattr(value, "__name__", None) in _OURS and value.__module__.startswith(_PLACES)

"""``shard_model``: ``fully_shard`` with automatically chosen units.

One unit for the whole model gathers all of it at once; one per layer sends hundreds of small messages.  Users of FSDP wrap the
repeated blocks, by hand or by a list of classes (``transformer_auto_wrap_policy`` of FSDP1); here blocks are found as what
repeats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor

from shardwise.arguments import check_kind, check_whole, explains_arguments, ids_of_ignored
from shardwise.collectives.compressed import CompressionPolicy
from shardwise.errors import ConfigError
from shardwise.fsdp.api import default_mesh, describe_units, fully_shard, modules_in, replicate
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.build import ShardPlacementFn, refuse_wrappers
from shardwise.fsdp.mesh import DataParallelMeshDims, Strategy
from shardwise.fsdp.module import FSDPModule
from shardwise.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy, precision_from
from shardwise.observe import say
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES, Child, group_blocks, repeated_blocks

# ---- Find the repeated blocks of a model; ``plan/grouping.py`` chooses units from their descriptions.

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

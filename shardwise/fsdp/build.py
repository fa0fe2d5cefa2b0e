"""Make a unit of modules: find their parameters, shard them, hook the modules.  Deep copies of sharded modules.

``module.weight = shard(module.weight)`` would be two lines.  The others are for what users' models have: parameters that
several modules share, that an outer or inner call owns, that lie over one memory, that optimizers and closures still hold.
What cannot be sharded is refused before anything has changed, by name.  Source: FSDP2's ``FSDPParam`` (torch 2.13).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from shardwise import torch_private
from shardwise.arguments import Extent, find_shared
from shardwise.collectives.compressed import Compression, CompressionPolicy
from shardwise.collectives.streams import accelerator_type
from shardwise.consistency.process_groups import announce
from shardwise.consistency.store import are_threads, default_store
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.attachment import (
    ATTACHMENT,
    PENDING,
    Attachment,
    all_units,
    attachment_of,
    is_managed_by_torch,
    remember,
    roots_to_come,
)
from shardwise.fsdp.engine import on_new_units
from shardwise.fsdp.flat_buffer import ParamStorage
from shardwise.fsdp.hooks import Hooks, wrap_forward_method
from shardwise.fsdp.init_parameters import beginning_of, sync_buffers, values_of_first
from shardwise.fsdp.mesh import MeshAxes, ShardPlacementResult, axes_from, cut_shard, shard_spec, smaller_axes
from shardwise.fsdp.param import Registration, ShardedParam, manager_of, refuse_grad_dtype, refuse_gradients
from shardwise.fsdp.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, keeps_dtype
from shardwise.fsdp.roots import may_share_memory
from shardwise.fsdp.settings import UnitSettings
from shardwise.fsdp.unit import Unit
from shardwise.fsdp.waiting_gradients import withdrawn
from shardwise.layout import cut_of
from shardwise.observe import note
from shardwise.plan.schedule import UnitPolicy

# ---- Deep copies: a copied module gets its own units, with copies of the shards.


Memo = dict[Any, Any]


def copy_module(module: nn.Module, attachment: Attachment, memo: Memo) -> nn.Module:
    """Return a deep copy of a sharded module, for ``copy.deepcopy``.

    The module is resharded first.  Gradients are not copied, since ``nn.Parameter`` does not copy them either; this includes
    unsynced gradients and residuals of compression.  The user's settings are copied, but lists of modules to prefetch.
    """
    owners = (attachment.unit, *attachment.unit.others)
    for owner in owners:
        owner.reshard()
    is_outermost = PENDING not in memo
    pending: list[tuple[Attachment, Attachment]] = memo.setdefault(PENDING, [])
    result = memo[id(module)] = object.__new__(type(module))
    with withdrawn(owner.earlier.waiting for owner in owners):
        # torch copies the gradients of DTensors, unlike those of other parameters: their copies are said to be None.
        memo.update({id(each.sharded.grad): None for owner in owners for each in owner.params})
        for key, value in module.__dict__.items():
            result.__dict__[key] = copy.deepcopy(value, memo)
    if is_outermost:
        # Only now all modules that may share a parameter are copied.
        del memo[PENDING]
        units = {old.unit: new.unit for old, new in pending}
        by_table = {id(torch_private.parameters_of(each)): each for each in result.modules()}
        for old, new in pending:
            _complete(old, new, units, memo, by_table)
    return result


def _complete(
    old: Attachment, new: Attachment, units: dict[Unit, Unit], memo: Memo, by_table: dict[int, nn.Module]
) -> None:
    source, unit = old.unit, new.unit
    modules = [memo[id(module)] for module in source.modules if id(module) in memo]
    beside = [Unit(modules, each.settings, each.policy) for each in source.beside]
    for mine, its in zip((unit, *beside), (source, *source.beside), strict=True):
        mine.adopt_modules(modules)
        _copy_parameters(its, mine, memo, by_table)
        remember(mine)
    unit.take_beside(beside)
    if unit.settings.may_diverge:
        roots_to_come[new] = None
    Hooks(new).listen()
    new.ignored = tuple((memo[id(table)], name) for table, name in old.ignored if id(table) in memo)
    for tied in source.tied_units:
        if tied in units:
            unit.use_tied(units[tied])
    for name in old.forward_methods:
        for module in unit.modules:
            module.__dict__.pop(name, None)
            wrap_forward_method(module, new, name)


def _copy_parameters(source: Unit, unit: Unit, memo: Memo, by_table: dict[int, nn.Module]) -> None:
    params: list[ShardedParam] = []
    for param in source.params:
        owners = [(by_table.get(id(memo.get(id(at.parameters)))), at.name) for at in param.registrations]
        places = [(owner, name) for owner, name in owners if owner is not None]
        registrations = [Registration.of(*place) for place in places]
        sharded = cast(nn.Parameter, registrations[0].current)
        attributes = copy.deepcopy(param.attributes, memo)
        if attributes is not vars(sharded):  # copies of plain parameters lack them
            torch_private.give_attributes(attributes, sharded)
        specs = param.spec, param.inner_spec
        copied = ShardedParam(param.fqn, registrations, param.shard, *specs, sharded, param.shard_shape)
        copied.keeps_dtype, copied.beginning = param.keeps_dtype, param.beginning
        copied.module = weakref.ref(places[0][0])
        params.append(copied)
    refuse_gradients(params)
    asked = source.settings
    unit.settings = replace(asked, custom=replace(asked.custom), forward_prefetch=None, backward_prefetch=None)
    unit.settings.sums = None if asked.sums is None else asked.sums.of_copy()
    unit.settings.compression = None if asked.compression is None else Compression(asked.compression.policy)
    unit.own(params)
    unit.ensure_packed()


_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})  # of torch

ShardPlacementFn = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]


@dataclass(frozen=True, slots=True)
class Preset:
    """The checked arguments of an API (``fully_shard``, ``replicate``).

    Attributes:
        keeps_plain: parameters stay plain tensors.
        syncs: ``sync_module_states``.
    """

    axes: MeshAxes
    reshard_after_forward: bool | int | None
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    placement_fn: ShardPlacementFn | None = None
    ignored: frozenset[int] = frozenset()
    keeps_plain: bool = False
    compression: CompressionPolicy | None = None
    syncs: bool = False


@dataclass(slots=True)
class _FoundParam:
    """A parameter and its registrations.

    Attributes:
        param: the parameter.
        fqn: its path from the module that is sharded.
        module: the module of its first registration.
        registrations: all places where it is registered.
        values: the values to shard instead of its own; None: its own.
        memory: where it was before it was sharded; None: it has no memory (meta).
    """

    param: nn.Parameter
    fqn: str
    module: nn.Module
    registrations: list[Registration] = field(default_factory=list)
    values: torch.Tensor | None = None
    memory: Extent | None = None


def build_unit(modules: Sequence[nn.Module], preset: Preset) -> Attachment:
    """Shard the parameters of ``modules`` that no inner unit owns and hook the modules."""
    for tell in on_new_units:
        tell()  # optimizers are watched from the first unit on
    if accelerator_type() == "cpu":
        torch_private.draw_as_one_process(lambda: dist.is_initialized() and are_threads())  # threads have one generator
    note("init", "unit")  # a place at which tests inject faults (``testing/faults.py``)
    if (store := default_store()) is not None:
        announce(store, dist.get_rank())
    # Of modules that lie in each other the outer one alone is hooked: its forward runs the inner one's.
    inner = {child for module in modules for child in module.modules() if child is not module}
    roots = tuple(dict.fromkeys(module for module in modules if module not in inner))
    device, managed = preset.axes.device, _managed_modules(roots)
    # Checks come before the model changes, except those of placements: a model that is refused stays usable.
    refuse_wrappers(managed, preset.ignored)
    found = _find_parameters(managed, preset.ignored)
    _refuse_unfit(found)
    shared = None if preset.keeps_plain else _shared_memory(roots, found)
    if shared is not None and not preset.syncs:
        raise shared
    for buffer in (buffer for _, module in managed for buffer in module.buffers(recurse=False)):
        if buffer.device != device and not buffer.is_meta:
            buffer.data = buffer.to(device)
    if preset.syncs:  # the error of one rank is then raised on all
        sync_buffers(managed, preset.axes, shared)
    for item in found:
        _move_parameter(item, device)
    # Tied parameters that another unit owns stay there: this unit waits for that one, and reduces no gradient of them.
    tied = [(item, owner) for item in found if (owner := manager_of(item.param)) is not None]
    unit, *beside = _make_units(roots, [item for item in found if manager_of(item.param) is None], preset)
    unit.take_beside(beside)
    for item, owner in tied:
        unit.tie(owner, item.registrations)
        for registration in item.registrations:
            registration.put(owner.sharded)
        for lending in {each for module in owner.unit().modules if (each := attachment_of(module)) is not None}:
            Hooks(lending).reshard_for_state_dict(item.module)
    for each in (unit, *beside):
        remember(each)
    # The module owns its attachment, and that the unit; every reference back is weak, so that a deleted model is freed.
    attachment = Attachment(unit)
    tables = [torch_private.parameters_of(module) for _, module in managed if preset.ignored]
    attachment.ignored = tuple([(table, n) for table in tables for n, p in table.items() if id(p) in preset.ignored])
    for module in roots:
        module.__dict__[ATTACHMENT] = attachment
    Hooks(attachment).install()
    return attachment


def _managed_modules(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules below ``roots`` that no inner unit owns, in module order, with their paths."""
    managed: dict[nn.Module, str] = {}
    todo = [("", root) for root in reversed(roots)]
    while todo:
        path, module = todo.pop()
        is_inner = module not in roots and attachment_of(module) is not None
        if not (module in managed or is_inner or is_managed_by_torch(module)):
            managed[module] = path
            todo += reversed([(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()])
    return [(path, module) for module, path in managed.items()]


def refuse_wrappers(managed: Iterable[tuple[str, nn.Module]], ignored: frozenset[int]) -> None:
    """Raise ConfigError if a wrapper of torch that reduces gradients has a parameter that is not ignored."""
    for path, module in managed:
        kind = next((each.__name__ for each in type(module).__mro__ if each.__name__ in _WRAPPERS), None)
        if kind is not None and any(id(param) not in ignored for param in module.parameters()):
            raise ConfigError(
                f"{path or 'the module'} is a {kind}, which exchanges gradients of the same parameters itself. Shard the "
                f"wrapped module (model.module) and leave {kind} out, or leave its parameters to {kind} with ignored_params"
            )


def _find_parameters(managed: Iterable[tuple[str, nn.Module]], ignored: frozenset[int]) -> list[_FoundParam]:
    found: dict[int, _FoundParam] = {}
    for path, module in managed:
        for name, param in torch_private.parameters_of(module).items():
            if param is not None and id(param) not in ignored:
                item = _FoundParam(param, f"{path}.{name}".lstrip("."), module)
                found.setdefault(id(param), item).registrations.append(Registration.of(module, name))
    return list(found.values())


def _refuse_unfit(found: Iterable[_FoundParam]) -> None:
    for item in found:
        refuse_grad_dtype(item.param, item.fqn)
        if is_lazy(item.param):
            raise ConfigError(
                f"{item.fqn} has no shape yet: it belongs to a lazy module before its first forward. Run one forward of the "
                "plain model, on every rank with the same random seed, and shard it then"
            )
        if isinstance(item.module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{item.fqn} belongs to a module of torch.jit.script or trace, whose parameters cannot be replaced. Shard the "
                "plain module (and compile it with torch.compile), or name its parameters in ignored_params"
            )
    # By its place, since user code may have replaced the parameter of an outer unit meanwhile (``to_empty``).
    managed = [item for item in found if isinstance(item.param, DTensor) or manager_of(item.param) is not None]
    units = list(all_units) if managed else []
    places = {(id(at.parameters), at.name) for unit in units for param in unit.params for at in param.registrations}
    for item in managed:
        at = item.registrations[0]
        if (id(at.parameters), at.name) in places:
            raise StateError(f"{item.fqn} belongs to the unit of an outer module. Shard inner modules before it")


def _shared_memory(roots: Sequence[nn.Module], found: Sequence[_FoundParam]) -> ConfigError | None:
    """Return an error if a parameter below ``roots`` shares memory with another one, or with a buffer; note their memory.

    To tie them would be another model: an optimizer of one process updates such a memory once for each of the two.
    """
    prefixes = ["model"] if len(roots) == 1 else [f"modules[{index}]" for index in range(len(roots))]
    for item in found:
        if manager_of(item.param) is None:
            item.memory = Extent.of(torch_private.local_of(item.param), item.param.requires_grad)
    known = {id(item.param): item.memory for item in found}
    sharded: dict[int, tuple[str, Extent]] = {}  # by id: a tied parameter has its memory once
    others: dict[int, tuple[str, Extent]] = {}
    for prefix, root in zip(prefixes, roots, strict=True):
        for path, tensor in (*root.named_parameters(prefix), *root.named_buffers(prefix)):
            owner = manager_of(cast(Any, tensor))
            # What a later call must not share is where a parameter was before it was sharded.
            own = known.get(id(tensor)) or Extent.of(tensor, tensor.requires_grad)
            memory = own if owner is None else owner.memory
            if memory is not None:
                tensors_of = others if owner is None and id(tensor) not in known else sharded
                tensors_of[id(owner or tensor)] = path, memory
    tensors = [*sharded.values(), *others.values()]
    shared = find_shared([memory for _, memory in tensors], len(sharded))
    if shared is None:
        return None
    (first, memory), (second, other) = (tensors[index] for index in shared)
    advice = "Give one of them memory of its own first (clone()), or compute it from the other in forward"
    if shared[1] < len(sharded) and memory.is_same_view(other):
        advice = f"Write {second} = {first} first, which ties them"
    return ConfigError(
        f"{first} and {second} share memory but are two tensors: in one process a step changes both, but shards are copies, so "
        f"that they would become different. {advice}"
    )


def _move_parameter(item: _FoundParam, device: torch.device) -> None:
    param = item.param
    if param.device == device or param.is_meta or isinstance(param, DTensor):
        return  # a DTensor on another kind of device is refused with its placements
    moved = param.to(device)
    if type(param.data) is torch.Tensor:
        param.data = moved
    else:
        item.param = nn.Parameter(moved.detach(), requires_grad=param.requires_grad)
        _hand_on(param, item.param)


def _make_units(roots: Sequence[nn.Module], found: Sequence[_FoundParam], preset: Preset) -> list[Unit]:
    """Shard what was ``found``; return the units that own it, one per mesh, or one without parameters."""
    # One collective per mesh: parameters on another mesh (``shard_placement_fn``) cannot travel with the rest.
    by_mesh: dict[MeshAxes, list[tuple[_FoundParam, Shard | None]]] = {}
    for item in found:
        axes, shard = _resolve_placement(item, preset)
        axes = next((each for each in by_mesh if each.groups == axes.groups), axes)
        by_mesh.setdefault(axes, []).append((item, shard))
    units, reshard = list[Unit](), preset.reshard_after_forward
    for axes, items in (by_mesh or {preset.axes: []}).items():
        if items and preset.syncs:
            values = values_of_first([(item.fqn, torch_private.local_of(item.param)) for item, _ in items], axes)
            for (item, _), value in zip(items, values, strict=True):
                item.values = value
        params = [_shard_parameter(item, axes, shard, preset) for item, shard in items]
        refuse_gradients(params)
        storage = ParamStorage(preset.axes.device, preset.offload)
        settings = UnitSettings(axes, preset.precision, storage, preset.keeps_plain)
        settings.keeps_for_backward = reshard is None
        settings.compression = None if preset.compression is None else Compression(preset.compression)
        if items and type(reshard) is int:  # a bool is an int, too
            settings.sub_axes = smaller_axes(axes, reshard)
        unit = Unit(roots, settings, UnitPolicy(reshard_after_forward=True if reshard is None else reshard), params)
        # Now that it is known how the shards travel: peers on this host may read them where they lie.
        settings.storage = replace(storage, is_shared=may_share_memory(unit))
        unit.ensure_packed()
        units.append(unit)
    return units


def _resolve_placement(item: _FoundParam, preset: Preset) -> tuple[MeshAxes, Shard | None]:
    """Return the mesh and the shard dim of a parameter."""
    wanted: object = preset.placement_fn(item.param) if preset.placement_fn is not None else None
    if wanted is None or isinstance(wanted, Shard):
        return preset.axes, wanted
    # The result may be shardwise's or torch's class, so read its attributes.
    info, placement = getattr(wanted, "mesh_info", None), getattr(wanted, "placement", None)
    axes = axes_from(info)
    if axes is None or not (placement is None or isinstance(placement, Shard)):
        raise ConfigError(
            f"Invalid shard_placement_fn result: {wanted} for parameter '{item.fqn}'; "
            "return None, a Shard or a ShardPlacementResult"
        )
    return axes, placement


def _hand_on(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give ``target`` the user's gradient hooks and attributes of ``source``."""
    torch_private.move_hooks(source, target)
    torch_private.give_attributes(dict(torch_private.attributes_of(source)), target)


def _refuse(param: weakref.ref[ShardedParam], _: torch.Tensor) -> None:
    """Raise StateError, as the gradient hook of the parameter that ``param`` was made from."""
    if (sharded := param()) is not None:
        raise StateError(
            f"forward has used {sharded.fqn} as it was before it was sharded, which an optimizer on the sharded model does "
            "not step. A list, a closure or functools.partial still has it: read it from its module in forward"
        )


def _shard_parameter(item: _FoundParam, axes: MeshAxes, shard: Shard | None, preset: Preset) -> ShardedParam:
    dim, spec = shard_spec(item.param, item.fqn, axes, shard)
    inner_spec = torch_private.spec_of(item.param) if isinstance(item.param, DTensor) else None
    whole = torch_private.local_of(item.param).detach() if item.values is None else item.values
    cut = cut_of(tuple(whole.shape), dim, axes.num_shards)
    mine = cut.shard_shape(axes.shard_rank)
    if preset.keeps_plain:
        sharded = item.param  # DDP's users have it in optimizers already, so it stays the same object
    else:
        with torch.no_grad():
            local = cut_shard(whole, cut, axes.shard_rank)
            if isinstance(preset.offload, CPUOffloadPolicy) and local.device.type != "meta":
                local = local.cpu()
            sharded = torch_private.parameter_from_local(local, spec, item.param.requires_grad)
        _hand_on(item.param, sharded)
    result = ShardedParam(item.fqn, item.registrations, cut, spec, inner_spec, sharded, mine)
    result.memory, result.module = item.memory, weakref.ref(item.module)
    result.keeps_dtype = keeps_dtype(preset.precision, item.param, item.fqn)
    result.register(sharded)
    if not preset.keeps_plain:
        # User code may tie or use the parameter that it had before: the first is followed, the second refused by name.
        result.manage(item.param)
        result.original = weakref.ref(item.param)
        if item.param.requires_grad:
            item.param.register_hook(partial(_refuse, weakref.ref(result)))
        if axes.num_shards > 1:
            result.beginning = beginning_of(whole, result.local)
    return result

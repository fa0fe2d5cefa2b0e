"""Turn modules into a unit: find its parameters, shard them, hook the modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import torch_private
from shardwise.black_box import note
from shardwise.codec.compression_policy import CompressionPolicy
from shardwise.comm.alive import announce
from shardwise.comm.coding_state import Compression
from shardwise.engine.attachment import ATTACHMENT, Attachment, attachment_of, is_managed_by_torch
from shardwise.engine.first_rank import sync_buffers, values_of_first
from shardwise.engine.hooks import Hooks, watch_optimizers
from shardwise.engine.take_over import (
    axes_of_plan,
    fits,
    is_used_elsewhere,
    leave,
    managed_by_slot,
    owner_in,
    remember,
    unit_of,
    whole,
)
from shardwise.engine.whole_values import watch_gathers
from shardwise.engine.wiring import may_share_memory
from shardwise.errors import ConfigError, StateError
from shardwise.layout.shard import ChunkShard
from shardwise.plan.policy import UnitPolicy
from shardwise.units.axes import MeshAxes, ShardPlacementResult, axes_from, smaller_axes
from shardwise.units.beginning import Beginning
from shardwise.units.group import ShardGroup
from shardwise.units.param import Slot, UnitParam
from shardwise.units.place import ParamStorage
from shardwise.units.placement import cut_shard, place
from shardwise.units.precision import CPUOffloadPolicy, GradDtype, MixedPrecisionPolicy, OffloadPolicy, keeps_dtype
from shardwise.units.unit import Unit

_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})  # of torch

ShardPlacementFn = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]

# Ties between modules that are sharded by separate calls show in nothing but the identity of the original parameter, so
# who has sharded it must be remembered from one call to the next, for as long as someone holds the original.
_sharded_from: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Parameters that stay what they are, by id: a weak reference to them would keep torch from swapping their contents.
_managed_plain: weakref.WeakValueDictionary[int, UnitParam] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Preset:
    """What a door asks for: the arguments of ``fully_shard``, checked.

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
    """A parameter and the places it hangs in; ``owned``: what the unit of an outer module has made of it,
    and on which mesh; ``values``: what to shard instead of its own values."""

    param: nn.Parameter
    fqn: str
    module: nn.Module
    slots: list[Slot] = field(default_factory=list)
    owned: UnitParam | None = None
    owned_on: MeshAxes | None = None
    values: torch.Tensor | None = None


def build_unit(modules: Sequence[nn.Module], preset: Preset) -> Attachment:
    """Shard the parameters of ``modules`` that no inner unit owns and hook the modules."""
    watch_optimizers()
    watch_gathers()
    note("init", "unit")
    store = torch_private.default_store() if dist.is_initialized() else None
    if store is not None:
        announce(store, dist.get_rank())
    roots = _outermost(modules)
    device = preset.axes.device
    managed = _managed_modules(roots)
    refuse_wrappers(managed, preset.ignored)
    found = _find_parameters(managed, preset.ignored)
    _refuse_unfit(found)
    _move_buffers(managed, device)
    if preset.syncs:
        sync_buffers(managed, preset.axes)
    _find_owned(found)
    for item in found:
        if item.owned is None:
            _move_parameter(item, device)
    reshard = True if preset.reshard_after_forward is None else preset.reshard_after_forward
    unit = Unit(roots, preset.precision, UnitPolicy(reshard_after_forward=reshard))
    unit.uses_default_reshard = preset.reshard_after_forward is None
    own: list[_FoundParam] = []
    for item in found:
        lender = _manager_of(item.param) if item.owned is None else item.owned
        is_taken = item.owned is not None and not is_used_elsewhere(item.owned, item.slots)
        if is_taken or lender is None or not _lend(lender, item, unit):
            own.append(item)
    taken = [item.owned for item in own if item.owned is not None]
    _check_not_run(taken)
    leave(taken)
    unit.groups = _make_groups(own, preset, device)
    unit.number_parameters()
    for param in unit.params:
        if isinstance(param.sharded, DTensor):
            param.made_of = torch_private.storage_id(param.sharded), weakref.ref(param.local)
    remember(unit)
    attachment = Attachment(unit)
    attachment.ignored = _ignored_in(managed, preset.ignored)
    for module in roots:
        module.__dict__[ATTACHMENT] = attachment
    hooks = Hooks(attachment)
    hooks.install()
    hooks.install_state_dict_hooks()
    hooks.listen()
    return attachment


def _manager_of(param: nn.Parameter) -> UnitParam | None:
    """Return what an earlier call has made of ``param``, None if it is in no unit."""
    owner = _sharded_from.get(param)
    if owner is not None:
        return owner()
    plain = _managed_plain.get(id(param))
    return plain if plain is not None and plain.sharded is param else None


def _outermost(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    inner = {child for module in modules for child in module.modules() if child is not module}
    return tuple(dict.fromkeys(module for module in modules if module not in inner))


def _managed_modules(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules below ``roots`` that no inner unit owns, in module order, with their paths."""
    managed: dict[nn.Module, str] = {}
    for root in roots:
        todo = [("", root)]
        while todo:
            path, module = todo.pop()
            is_inner = module not in roots and attachment_of(module) is not None
            if module in managed or is_inner or is_managed_by_torch(module):
                continue
            managed[module] = path
            children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
            todo += reversed(children)
    return [(path, module) for module, path in managed.items()]


def refuse_wrappers(managed: Iterable[tuple[str, nn.Module]], ignored: frozenset[int]) -> None:
    """Raise ConfigError for one of torch's wrappers that reduce gradients, if any of its parameters is not ignored."""
    for path, module in managed:
        kind = next((each.__name__ for each in type(module).__mro__ if each.__name__ in _WRAPPERS), None)
        if kind is not None and any(id(param) not in ignored for param in module.parameters()):
            raise ConfigError(
                f"{path or 'the module'} is a {kind}, which exchanges gradients of the same parameters itself. Shard the "
                f"wrapped module (model.module) and leave {kind} out, or leave its parameters to {kind} with ignored_params"
            )


def _ignored_in(
    managed: Iterable[tuple[str, nn.Module]], ignored: frozenset[int]
) -> tuple[tuple[dict[str, nn.Parameter | None], str], ...]:
    if not ignored:
        return ()
    tables = [torch_private.parameters_of(module) for _, module in managed]
    return tuple((table, name) for table in tables for name, param in table.items() if id(param) in ignored)


def _find_parameters(managed: Iterable[tuple[str, nn.Module]], ignored: frozenset[int]) -> list[_FoundParam]:
    found: dict[int, _FoundParam] = {}
    for path, module in managed:
        parameters = torch_private.parameters_of(module)
        for name, param in parameters.items():
            if param is None or id(param) in ignored:
                continue
            item = found.get(id(param))
            if item is None:
                item = found[id(param)] = _FoundParam(param, f"{path}.{name}" if path else name, module)
            item.slots.append(Slot.of(module, name))
    return list(found.values())


def _refuse_unfit(found: Iterable[_FoundParam]) -> None:
    for item in found:
        if is_lazy(item.param):
            raise ConfigError(
                f"{item.fqn} has no shape yet, as all parameters of lazy modules before their first forward. Run one forward "
                "of the plain model, on every rank with the same random seed, and shard it then"
            )
        if isinstance(item.module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{item.fqn} belongs to a module of torch.jit.script or trace, which reads its parameters where no other can "
                "be put. Shard the plain module (and compile it with torch.compile), or name its parameters in ignored_params"
            )


def _find_owned(found: Iterable[_FoundParam]) -> None:
    """Note which parameters belong to the unit of an outer module already."""
    candidates = [item for item in found if isinstance(item.param, DTensor) or id(item.param) in _managed_plain]
    if candidates:
        places = managed_by_slot()
        for item in candidates:
            item.owned = owner_in(places, item.slots)
            item.owned_on = None if item.owned is None else axes_of_plan(item.owned)


def _move_buffers(managed: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    for _, module in managed:
        for buffer in module.buffers(recurse=False):
            if buffer.device != device and buffer.device.type != "meta":
                buffer.data = buffer.to(device)


def _move_parameter(item: _FoundParam, device: torch.device) -> None:
    param = item.param
    if param.device == device or param.device.type == "meta":
        return
    if isinstance(param, DTensor):
        raise ConfigError(
            f"Requires DTensor to have mesh of the same type as the FSDP mesh but got {param.device_mesh.device_type} "
            f"for DTensor '{item.fqn}' and {device.type} for FSDP"
        )
    moved = param.to(device)
    if type(param.data) is torch.Tensor:
        param.data = moved
    else:
        item.param = nn.Parameter(moved.detach(), requires_grad=param.requires_grad)
        _hand_on(param, item.param)


def _lend(lender: UnitParam, item: _FoundParam, unit: Unit) -> bool:
    """Hang the parameter that another unit owns in the slots of ``item``; False if that unit is gone."""
    owner = unit_of(lender)
    if owner is None:
        return False
    if item.owned is None:
        lender.slots += item.slots
        for slot in item.slots:
            slot.put(lender.sharded)
        for group in owner.groups:
            group.note_ties()
    lending = next((each for module in owner.modules if (each := attachment_of(module)) is not None), None)
    if lending is not None:
        Hooks(lending).reshard_for_state_dict(item.module)
    unit.borrow(owner)
    return True


def _make_groups(found: list[_FoundParam], preset: Preset, device: torch.device) -> list[ShardGroup]:
    by_mesh: dict[int, tuple[MeshAxes, list[UnitParam]]] = {}
    infos: dict[int, tuple[object, MeshAxes]] = {}
    resolved = [(item, *_resolve_placement(item, preset, infos)) for item in found]
    if preset.syncs:
        _sync_params([(item, axes) for item, axes, _ in resolved if item.owned is None])
    for item, axes, shard in resolved:
        make = _shard_parameter if item.owned is None else _take_over
        by_mesh.setdefault(id(axes), (axes, []))[1].append(make(item, axes, shard, preset))
    _check_shared_groups([axes for axes, _ in by_mesh.values()])
    groups: list[ShardGroup] = []
    for axes, params in by_mesh.values():
        group = ShardGroup(params, axes, preset.precision, ParamStorage(device, preset.offload), preset.keeps_plain)
        if preset.compression is not None:
            group.compression = Compression(preset.compression)
        group.place = replace(group.place, is_shared=may_share_memory(group))
        size = preset.reshard_after_forward
        if isinstance(size, int) and not isinstance(size, bool):
            group.sub_axes = smaller_axes(axes, size)
        group.ensure_packed()
        groups.append(group)
    return groups


def _sync_params(found: Sequence[tuple[_FoundParam, MeshAxes]]) -> None:
    for axes in {id(axes): axes for _, axes in found}.values():
        items = [item for item, its_axes in found if its_axes is axes]
        values = values_of_first([(item.fqn, torch_private.local_of(item.param)) for item in items], axes)
        for item, value in zip(items, values, strict=True):
            item.values = value


def _resolve_placement(
    item: _FoundParam, preset: Preset, infos: dict[int, tuple[object, MeshAxes]]
) -> tuple[MeshAxes, Shard | None]:
    """Return the mesh and the dim of a parameter; ``infos``: by id, objects given for meshes, kept alive, and what they say."""
    wanted: object = preset.placement_fn(item.param) if preset.placement_fn is not None else None
    if wanted is None:
        return preset.axes, None
    if isinstance(wanted, Shard):
        return preset.axes, wanted
    # Ours or torch's: what it holds is what counts.
    info, placement = getattr(wanted, "mesh_info", None), getattr(wanted, "placement", None)
    axes = infos[id(info)][1] if id(info) in infos else axes_from(info)
    if axes is None or not (placement is None or isinstance(placement, Shard)):
        raise ConfigError(
            f"Invalid shard_placement_fn result: {wanted} for parameter '{item.fqn}'; "
            "return None, a Shard or a ShardPlacementResult"
        )
    infos[id(info)] = (info, axes)
    return axes, placement


def _check_shared_groups(all_axes: Sequence[MeshAxes]) -> None:
    seen: dict[tuple[str, ...], MeshAxes] = {}
    for axes in all_axes:
        dims = [dim for dim in (axes.shard_mesh_dim, axes.replicate_mesh_dim) if dim is not None]
        key = tuple(axes.mesh.get_group(dim).group_name for dim in dims)
        if key in seen:
            raise ConfigError(
                "Params sharing the same process group must use the same FSDPMeshInfo object, but got different objects: "
                f"{seen[key]} vs {axes}"
            )
        seen[key] = axes


def _hand_on(source: nn.Parameter, target: nn.Parameter) -> None:
    """Copy what users have set on ``source`` to ``target``: gradient hooks, and attributes that are not this package's."""
    torch_private.share_hooks(source, target)
    attributes = torch_private.attributes_of(source).items()
    torch_private.give_attributes({k: v for k, v in attributes if not k.startswith("shardwise_")}, target)


def _shard_parameter(item: _FoundParam, axes: MeshAxes, shard: Shard | None, preset: Preset) -> UnitParam:
    placed = place(item.param, item.fqn, axes, shard)
    if item.values is not None:
        placed = replace(placed, local=item.values)
    cut = ChunkShard(tuple(placed.local.shape), placed.dim, axes.num_shards)
    shape = cut.shard_shape(axes.shard_rank)
    if preset.keeps_plain:
        sharded = item.param
    else:
        with torch.no_grad():
            local = cut_shard(placed.local, cut, axes.shard_rank)
            if isinstance(preset.offload, CPUOffloadPolicy) and local.device.type != "meta":
                local = local.cpu()
            sharded = torch_private.parameter_from_local(local, placed.spec, item.param.requires_grad)
        _hand_on(item.param, sharded)
    result = UnitParam(item.fqn, item.slots, cut, placed.spec, placed.inner_spec, sharded, shape, preset.keeps_plain)
    result.module = weakref.ref(item.module)
    result.keeps_dtype = keeps_dtype(preset.precision, item.param, item.fqn)
    if torch_private.has_chosen_grad_dtype(item.param):
        result.grad_dtype = GradDtype(item.param.grad_dtype)
        result.follow_grad_dtype()
    result.register(sharded)
    if preset.keeps_plain:
        _managed_plain[id(item.param)] = result
    else:
        result.original = weakref.ref(item.param)
        _sharded_from[item.param] = weakref.ref(result)
        if axes.num_shards > 1:
            result.beginning = Beginning.of(placed.local, result.local)
    return result


def _check_not_run(params: Iterable[UnitParam]) -> None:
    for param in params:
        owner = unit_of(param)
        attachments = [attachment_of(module) for module in owner.modules] if owner is not None else []
        if any(each is not None and each.is_root is not None for each in attachments):
            raise StateError(
                f"{param.fqn} belongs to the unit of an outer module, which has run a forward already. Shard inner modules "
                "before the first forward of the root"
            )


def _take_over(item: _FoundParam, axes: MeshAxes, shard: Shard | None, preset: Preset) -> UnitParam:
    """Return the parameter that an outer unit has given up, cut as this unit wants it; a collective if that is otherwise."""
    old = item.owned
    assert old is not None
    storage = torch.device("cpu") if isinstance(preset.offload, CPUOffloadPolicy) else axes.device
    device = storage if old.local.device.type != "meta" else old.local.device
    if not preset.keeps_plain and fits(old, item.owned_on, axes, 0 if shard is None else shard.dim, device):
        old.fqn, old.full, old.is_hooked = item.fqn, None, False
        old.module = weakref.ref(item.module)
        return old
    item.param = whole(old)
    if item.param is not old.sharded:
        _hand_on(old.sharded, item.param)
    _move_parameter(item, axes.device)
    new = _shard_parameter(item, axes, shard, preset)
    if old.beginning is not None and not old.beginning.was_overwritten(old.local):
        # The gathered values are the same on every rank, even if ranks had sharded different ones.
        new.beginning = None if new.beginning is None else replace(old.beginning, shard=new.beginning.shard)
    original = old.original()
    if original is not None:
        new.original = weakref.ref(original)
        _sharded_from[original] = weakref.ref(new)
    return new

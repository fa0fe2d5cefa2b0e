"""Turn modules into a unit: find its parameters, shard them, hook the modules, and join units under one engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import torch_private
from shardwise.comm.agree import Bulletin
from shardwise.comm.alive import announce
from shardwise.comm.buffers import BufferPool
from shardwise.comm.c10d import C10dCommunicator
from shardwise.comm.lanes import Lane
from shardwise.comm.links.link import Transport, default_transport
from shardwise.comm.links.routes import RoutedCommunicator
from shardwise.engine.engine import Engine, Lanes
from shardwise.engine.group_links import GroupLink, can_link
from shardwise.engine.hooks import Attachment, watch_optimizers
from shardwise.engine.optimizers import check_optimizers
from shardwise.engine.take_over import (
    axes_of_plan,
    fits,
    is_used_elsewhere,
    leave,
    managed_by_slot,
    owner_in,
    remember,
    whole,
)
from shardwise.errors import ConfigError, StateError
from shardwise.layout.shard import ChunkShard
from shardwise.plan.naming import compress_paths
from shardwise.plan.policy import UnitPolicy
from shardwise.units.axes import MeshAxes, ShardPlacementResult, smaller_axes
from shardwise.units.group import GroupComm, ShardGroup
from shardwise.units.param import Slot, UnitParam
from shardwise.units.placement import cut_shard, place
from shardwise.units.precision import CPUOffloadPolicy, GradDtype, MixedPrecisionPolicy, OffloadPolicy
from shardwise.units.unit import Unit

ShardPlacementFn = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]
ATTACHMENT = "_shardwise_attachment"

# Ties between modules that are sharded by separate calls show in nothing but the identity of the original parameter, so
# who has sharded it must be remembered from one call to the next, for as long as someone holds the original.
_sharded_from: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Parameters that stay what they are, by id: a weak reference to them would keep torch from swapping their contents.
_managed_plain: weakref.WeakValueDictionary[int, UnitParam] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a door asks for: the arguments of ``fully_shard``, checked; ``keeps_plain``: parameters stay plain tensors."""

    axes: MeshAxes
    reshard_after_forward: bool | int | None
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    placement_fn: ShardPlacementFn | None = None
    ignored: frozenset[int] = frozenset()
    keeps_plain: bool = False


@dataclass(slots=True)
class _Found:
    """A parameter and the places it hangs in; ``owned``: what the unit of an outer module has made of it,
    and on which mesh."""

    param: nn.Parameter
    fqn: str
    module: nn.Module
    slots: list[Slot] = field(default_factory=list)
    owned: UnitParam | None = None
    owned_on: MeshAxes | None = None


def attachment_of(module: nn.Module) -> Attachment | None:
    """Return what a door has attached to ``module``, None if none was applied."""
    return module.__dict__.get(ATTACHMENT)


def build_unit(modules: Sequence[nn.Module], recipe: Recipe) -> Attachment:
    """Shard the parameters of ``modules`` that no inner unit owns and hook the modules."""
    watch_optimizers()
    store = torch_private.default_store() if dist.is_initialized() else None
    if store is not None:
        announce(store, dist.get_rank())
    roots = _outermost(modules)
    device = recipe.axes.device
    managed = _managed_modules(roots)
    _move_buffers(managed, device)
    found = _find_parameters(managed, recipe.ignored)
    _find_owned(found)
    for item in found:
        if item.owned is None:
            _move_parameter(item, device)
    reshard = True if recipe.reshard_after_forward is None else recipe.reshard_after_forward
    unit = Unit(roots, recipe.precision, UnitPolicy(reshard_after_forward=reshard))
    unit.uses_default_reshard = recipe.reshard_after_forward is None
    own: list[_Found] = []
    for item in found:
        lender = _manager_of(item.param) if item.owned is None else item.owned
        is_taken = item.owned is not None and not is_used_elsewhere(item.owned, item.slots)
        if is_taken or lender is None or not _lend(lender, item, unit):
            own.append(item)
    taken = [item.owned for item in own if item.owned is not None]
    _check_not_run(taken)
    leave(taken)
    unit.groups = _make_groups(own, recipe, device, unit)
    unit.number_parameters()
    remember(unit)
    attachment = Attachment(unit, resolve_engine)
    for module in roots:
        module.__dict__[ATTACHMENT] = attachment
    attachment.install()
    attachment.install_state_dict_hooks()
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
            if module in managed or (module not in roots and attachment_of(module) is not None):
                continue
            managed[module] = path
            children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
            todo += reversed(children)
    return [(path, module) for module, path in managed.items()]


def _find_parameters(managed: Iterable[tuple[str, nn.Module]], ignored: frozenset[int]) -> list[_Found]:
    found: dict[int, _Found] = {}
    for path, module in managed:
        parameters = torch_private.parameters_of(module)
        for name, param in parameters.items():
            if param is None or id(param) in ignored:
                continue
            item = found.get(id(param))
            if item is None:
                item = found[id(param)] = _Found(param, f"{path}.{name}" if path else name, module)
            item.slots.append(Slot.of(module, name))
    return list(found.values())


def _find_owned(found: Iterable[_Found]) -> None:
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


def _move_parameter(item: _Found, device: torch.device) -> None:
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


def _lend(lender: UnitParam, item: _Found, unit: Unit) -> bool:
    """Hang the parameter that another unit owns in the slots of ``item``; False if that unit is gone."""
    owner = lender.owner()
    if owner is None:
        return False
    if item.owned is None:
        lender.slots += item.slots
        for slot in item.slots:
            slot.put(lender.sharded)
    lending = next((each for module in owner.modules if (each := attachment_of(module)) is not None), None)
    if lending is not None:
        lending.reshard_for_state_dict(item.module)
    if owner not in unit.borrows:
        unit.borrows.append(owner)
    return True


def _make_groups(found: list[_Found], recipe: Recipe, device: torch.device, unit: Unit) -> list[ShardGroup]:
    by_mesh: dict[int, tuple[MeshAxes, list[UnitParam]]] = {}
    for item in found:
        axes, shard = _resolve_placement(item, recipe)
        make = _shard_parameter if item.owned is None else _take_over
        by_mesh.setdefault(id(axes), (axes, []))[1].append(make(item, axes, shard, recipe, unit))
    _check_shared_groups([axes for axes, _ in by_mesh.values()])
    groups: list[ShardGroup] = []
    for axes, params in by_mesh.values():
        group = ShardGroup(params, axes, recipe.precision, recipe.offload, device)
        size = recipe.reshard_after_forward
        if isinstance(size, int) and not isinstance(size, bool):
            group.sub_axes = smaller_axes(axes, size)
        group.shares_memory = _may_share_memory(group)
        group.keeps_plain = recipe.keeps_plain
        group.ensure_packed()
        groups.append(group)
    return groups


def _may_share_memory(group: ShardGroup) -> bool:
    dim = group.axes.shard_mesh_dim
    if dim is None or not group.is_collective or default_transport() != "auto":
        return False
    return can_link(group, group.axes.mesh.get_group(dim))


def _resolve_placement(item: _Found, recipe: Recipe) -> tuple[MeshAxes, Shard | None]:
    wanted = recipe.placement_fn(item.param) if recipe.placement_fn is not None else None
    if wanted is None:
        return recipe.axes, None
    if isinstance(wanted, Shard):
        return recipe.axes, wanted
    if isinstance(wanted, ShardPlacementResult):  # pyright: ignore[reportUnnecessaryIsInstance]  user code returns it
        return wanted.mesh_info, wanted.placement
    raise ConfigError(
        f"Invalid shard_placement_fn result: {wanted} for parameter '{item.fqn}'; "
        "return None, a Shard or a ShardPlacementResult"
    )


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


def _shard_parameter(item: _Found, axes: MeshAxes, shard: Shard | None, recipe: Recipe, unit: Unit) -> UnitParam:
    placed = place(item.param, item.fqn, axes, shard)
    cut = ChunkShard(tuple(placed.local.shape), placed.dim, axes.num_shards)
    shape = cut.shard_shape(axes.shard_rank)
    if recipe.keeps_plain:
        sharded = item.param
    else:
        with torch.no_grad():
            local = cut_shard(placed.local, cut, axes.shard_rank)
            if isinstance(recipe.offload, CPUOffloadPolicy) and local.device.type != "meta":
                local = local.cpu()
            sharded = torch_private.parameter_from_local(local, placed.spec, item.param.requires_grad)
    result = UnitParam(item.fqn, item.slots, cut, placed.spec, placed.inner_spec, sharded, shape, recipe.keeps_plain)
    result.module = weakref.ref(item.module)
    result.owner = weakref.ref(unit)
    result.keeps_dtype = recipe.precision.keeps_dtype(item.param, item.fqn)
    if torch_private.has_chosen_grad_dtype(item.param):
        result.grad_dtype = GradDtype(item.param.grad_dtype)
        result.follow_grad_dtype()
    result.register(sharded)
    if recipe.keeps_plain:
        _managed_plain[id(item.param)] = result
    else:
        result.original = weakref.ref(item.param)
        _sharded_from[item.param] = weakref.ref(result)
    return result


def _check_not_run(params: Iterable[UnitParam]) -> None:
    for param in params:
        owner = param.owner()
        attachments = [attachment_of(module) for module in owner.modules] if owner is not None else []
        if any(each is not None and each.is_root is not None for each in attachments):
            raise StateError(
                f"{param.fqn} belongs to the unit of an outer module, which has run a forward already. Shard inner modules "
                "before the first forward of the root"
            )


def _take_over(item: _Found, axes: MeshAxes, shard: Shard | None, recipe: Recipe, unit: Unit) -> UnitParam:
    """Return the parameter that an outer unit has given up, cut as this unit wants it; a collective if that is otherwise."""
    old = item.owned
    assert old is not None
    storage = torch.device("cpu") if isinstance(recipe.offload, CPUOffloadPolicy) else axes.device
    device = storage if old.local.device.type != "meta" else old.local.device
    if not recipe.keeps_plain and fits(old, item.owned_on, axes, 0 if shard is None else shard.dim, device):
        old.fqn, old.full, old.is_hooked = item.fqn, None, False
        old.module, old.owner = weakref.ref(item.module), weakref.ref(unit)
        return old
    item.param = whole(old)
    _move_parameter(item, axes.device)
    new = _shard_parameter(item, axes, shard, recipe, unit)
    original = old.original()
    if original is not None:
        new.original = weakref.ref(original)
        _sharded_from[original] = weakref.ref(new)
    return new


# ---- engines ----


def resolve_engine(attachment: Attachment) -> Engine:
    """Return the engine of ``attachment``'s root: at the first forward the module that runs it becomes the root.

    Raises: RuntimeError if an inner unit has been a root before, or the root unit has several modules, or parameters
        are still on meta or not where the offload policy wants them.
    """
    if attachment.is_root is not None:
        engine = attachment.unit.engine_ref()
        return engine if engine is not None else _become_root(attachment)
    return _become_root(attachment)


def provisional_engine(attachment: Attachment) -> Engine:
    """Return an engine for calls before the first forward (``unshard``); the root takes its units over later."""
    engine = attachment.unit.engine_ref()
    if engine is None:
        engine = attachment.engine = _new_engine([attachment.unit])
    return engine


def _become_root(attachment: Attachment) -> Engine:
    modules = list(attachment.unit.modules)
    if len(modules) > 1:
        raise StateError(f"FSDP requires a single root module but got {tuple(modules)}")
    root = modules[0]
    attachments = _attachments_in(root, attachment)
    for inner in attachments[1:]:
        if inner.is_root is not None and inner.unit.engine_ref() is not None:
            raise StateError(
                f"FSDP state has already been lazily initialized for {inner.unit.name or _path_in(root, inner)}\n"
                "FSDP requires running forward through the root module first"
            )
    _name_units(root, attachments)
    _check_materialized(attachments)
    check_optimizers(param for each in attachments for param in each.unit.params)
    if attachment.unit.uses_default_reshard:
        attachment.unit.policy = replace(attachment.unit.policy, reshard_after_forward=False)
    engine = _new_engine([each.unit for each in attachments])
    for inner in attachments:
        if inner.engine is not None:
            if inner.engine.is_manual and inner is not attachment:
                raise StateError(
                    "set_manual_backward_finalization must be called on the root FSDP module; it was called on "
                    f"{inner.unit.name or _path_in(root, inner)}"
                )
            _inherit(engine, inner.engine)
        inner.is_root, inner.engine = False, None
    attachment.is_root, attachment.engine = True, engine
    return engine


def _inherit(engine: Engine, old: Engine) -> None:
    engine.is_last_backward = engine.is_last_backward and old.is_last_backward
    engine.is_manual = engine.is_manual or old.is_manual
    engine.post_optim_event = engine.post_optim_event or old.post_optim_event
    heard = engine.journal.instruments
    heard += [each for each in old.journal.instruments if each not in heard]


def _attachments_in(root: nn.Module, first: Attachment) -> list[Attachment]:
    found = {id(first): first}
    for module in root.modules():
        each = attachment_of(module)
        if each is not None:
            found.setdefault(id(each), each)
    return list(found.values())


def _path_in(root: nn.Module, attachment: Attachment) -> str:
    inner = attachment.unit.modules
    return ", ".join(name for name, module in root.named_modules() if module in inner)


def _name_units(root: nn.Module, attachments: Sequence[Attachment]) -> None:
    names: dict[int, list[str]] = {}
    for name, module in root.named_modules():
        each = attachment_of(module)
        if each is not None:
            names.setdefault(id(each), []).append(name)
    paths = {id(param): name for name, param in root.named_parameters()}
    for each in attachments:
        each.unit.name = compress_paths(names.get(id(each), [""]))
        for param in each.unit.params:
            param.fqn = paths.get(id(param.sharded), param.fqn)


def _check_materialized(attachments: Sequence[Attachment]) -> None:
    for each in attachments:
        for param in each.unit.params:
            param.adopt_registered()
    on_meta = [p.fqn for each in attachments for p in each.unit.params if p.sharded.device.type == "meta"]
    if on_meta:
        raise StateError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on "
            f"meta device: {on_meta}\nFor example, call module.to_empty(device) to materialize to device and "
            "call module.reset_parameters() on each module to initialize values."
        )
    misplaced = [
        (p.fqn, p.local.device)
        for each in attachments
        for group in each.unit.groups
        if isinstance(group.offload, CPUOffloadPolicy)
        for p in group.params
        if p.local.device.type != "cpu"
    ]
    if misplaced:
        raise StateError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            f"dict or call module.to_empty(device='cpu'). Found following parameters on non-CPU device: {misplaced}\n"
        )


def _new_engine(units: list[Unit]) -> Engine:
    device = next((group.device for unit in units for group in unit.groups), torch.device("cpu"))
    engine = Engine(device, Lanes.on(device), BufferPool(device))
    wanted: list[Transport] = [unit.transport for unit in units if unit.transport is not None]
    engine.transport = wanted[0] if wanted else default_transport()
    engine.adopt(units)
    engine.journal.bulletin = _bulletin(units, device)
    engine.max_reductions = max((unit.max_reductions for unit in units), default=1)
    bind_units(engine)
    return engine


def _bulletin(units: list[Unit], device: torch.device) -> Bulletin | None:
    meshes = [group.axes.mesh for unit in units for group in unit.groups]
    store = torch_private.default_store() if meshes else None
    if store is None:
        return None
    largest = max(meshes, key=lambda mesh: mesh.size())
    ranks = largest.mesh.flatten().tolist()
    if len(ranks) == 1:
        return None
    timeout_s = torch_private.timeout_s_of(largest.get_group(0), device)
    return Bulletin(store, ranks, dist.get_rank(), timeout_s)


def communicators(group: ShardGroup, engine: Engine) -> GroupComm:
    """Return how ``group`` talks, on the lanes and with the memory of ``engine``, as its settings say."""
    axes, lanes = group.axes, engine.lanes

    def over(process_group: dist.ProcessGroup, lane: Lane) -> RoutedCommunicator:
        packed = C10dCommunicator(process_group, lane, engine.pool)
        packed.custom_all_gather = group.custom_all_gather
        packed.custom_reduce_scatter = group.custom_reduce_scatter
        packed.allocates_from_process_group = group.allocates_from_process_group
        return RoutedCommunicator(packed, engine.spans)

    shards = reduce = replicas = sub = None
    if group.is_collective and axes.shard_mesh_dim is not None:
        process_group = axes.mesh.get_group(axes.shard_mesh_dim)
        shards = over(process_group, lanes.gather)
        reduce = over(group.reduce_process_group or process_group, lanes.reduce)
    if axes.replicate_mesh_dim is not None and axes.num_replicas > 1:
        replicas = over(axes.mesh.get_group(axes.replicate_mesh_dim), lanes.reduce)
    if group.sub_axes is not None and group.sub_axes.shard_mesh_dim is not None:
        sub = over(group.sub_axes.mesh.get_group(group.sub_axes.shard_mesh_dim), lanes.gather)
        sub.packed.custom_all_gather = None
    return GroupComm(shards, reduce, replicas, sub)


def bind_units(engine: Engine) -> None:
    """Give every group of the engine's units its communicators and its memory (again, after a setting has changed)."""
    gathers: dict[str, list[ShardGroup]] = {}
    reduces: dict[str, list[ShardGroup]] = {}
    process_groups: dict[str, dist.ProcessGroup] = {}
    for group in (group for unit in engine.units for group in unit.groups):
        comm = communicators(group, engine)
        group.bind(engine.pool, comm)
        for way, users in ((comm.shards, gathers), (comm.reduce, reduces)):
            if way is not None and can_link(group, way.packed.group):
                process_groups[way.packed.group.group_name] = way.packed.group
                users.setdefault(way.packed.group.group_name, []).append(group)
    for name, process_group in process_groups.items():
        wanted = gathers.get(name, []), reduces.get(name, []), engine.transport
        link = engine.links.get(name)
        if link is None or not link.is_for(*wanted):
            timeout_s = torch_private.timeout_s_of(process_group, engine.device)
            link = engine.links[name] = GroupLink(process_group, *wanted, engine.pool, timeout_s)
            engine.spans.register(process_group, link.prepare)

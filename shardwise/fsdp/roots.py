"""Roots: the module that runs the first forward becomes the root, and owns the engine of all units below it."""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.collectives.c10d import C10dCommunicator
from shardwise.collectives.compressed import CompressedCommunicator, Compression
from shardwise.collectives.routes import (
    LinkProvider,
    LinkUsers,
    PassKind,
    RoutedCommunicator,
    Transport,
    default_transport,
    provider_of,
)
from shardwise.collectives.streams import SideStream, watch_device
from shardwise.consistency.agreement import MismatchCheck, open_numbered_exchange
from shardwise.consistency.process_groups import group_of, patience_s
from shardwise.consistency.store import digest_of
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.buffers import BufferComparison
from shardwise.fsdp.divergence import Divergence, refuse_manual
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.initial_values import compare_beginnings
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import GroupComm, ParamGroup
from shardwise.fsdp.precision import CPUOffloadPolicy
from shardwise.fsdp.transports import CommContext
from shardwise.fsdp.unit import Unit
from shardwise.observe import unit_in_words
from shardwise.plan.grouping import compress_paths
from shardwise.plan.schedule import PrefetchBudget

# ---- The registry of all units: a new unit may take parameters from the unit of an outer module that was sharded first.

# It is global, since an inner module has no reference to the units of outer modules.  The order is that of creation, which is
# the same on all ranks.
_units: weakref.WeakKeyDictionary[Unit, None] = weakref.WeakKeyDictionary()
_unit_of: weakref.WeakKeyDictionary[ShardedParam, weakref.ref[Unit]] = weakref.WeakKeyDictionary()


def remember(unit: Unit) -> None:
    """Add ``unit`` to the registry, so that later units find its parameters."""
    _units[unit] = None
    for param in unit.params:
        _unit_of[param] = weakref.ref(unit)


def all_units() -> list[Unit]:
    """Return the units of all living models."""
    return list(_units)


def unit_of(param: ShardedParam) -> Unit | None:
    """Return the unit that manages ``param``, None if that was deleted."""
    ref = _unit_of.get(param)
    return None if ref is None else ref()


def managed_by_registration() -> dict[tuple[int, str], ShardedParam]:
    """Return all managed parameters by registration: the id of a module's dict of parameters, and a name."""
    params = (param for unit in all_units() for param in unit.params)
    return {(id(at.parameters), at.name): param for param in params for at in param.registrations}


# ---- Engines, with communicators, links and buffer pools for every group of their units.


def new_engine(units: list[Unit]) -> Engine:
    """Return an engine for ``units``.  Collective.  Raises: DesyncError if ranks have other parameters or compression."""
    device = next((group.device for unit in units for group in unit.groups), torch.device("cpu"))
    wanted: list[Transport] = [unit.transport for unit in units if unit.transport is not None]
    engine = Engine(CommContext.on(device, wanted[0] if wanted else default_transport()))
    engine.adopt(units)
    engine.exec_order.mismatch_check = mismatch_check = _mismatch_check(units, device)
    if mismatch_check is not None:
        # A name that all ranks share; the track's own number counts the engines of this process only.
        track = engine.exec_order.log.track
        track.name, track.is_of_several = mismatch_check.topic, True
    limit_reductions(engine)
    bind_units(engine)
    if mismatch_check is not None and device.type != "cpu":
        watch_device(device)
        engine.exec_order.compare_parameters()  # kernels of a gather whose sizes differ between ranks hang
    policies = _policies(units)
    if mismatch_check is not None and policies:
        mismatch_check.check_facts("compression policies", policies)
    set_divergence(engine, bool(units) and units[0].may_diverge)
    return engine


def set_divergence(engine: Engine, is_allowed: bool) -> None:
    """Set whether the ranks of ``engine`` may take different ways.  Collective.

    Raises: ConfigError if the dtype of some gradients is unknown, so that a rank without them could not send zeros.
    """
    check = engine.exec_order.mismatch_check
    if check is None:
        return
    check.check_facts("set_allow_rank_divergence", [f"set_allow_rank_divergence({is_allowed})"])
    if is_allowed is (engine.divergence is not None):
        return
    for unit in engine.units:
        unit.diverges, unit.schedule = is_allowed, None
        unit.reshard()  # ranks that took different ways differ in what is full, and in what backwards have shown
        unit.backward.unlearn()
    engine.divergence = engine.reductions.schedule = None
    diverging.pop(engine, None)
    engine.exec_order.allow_divergence(is_allowed)
    for unit in engine.units if is_allowed else ():
        for group in unit.groups:
            for param in group.params:
                if group.dtypes.takes_any_gradient(param):
                    raise ConfigError(
                        f"{param.fqn} ({unit_in_words(unit.name)}) has grad_dtype None, so on a rank that does not use it the "
                        "dtype of the zeros that set_allow_rank_divergence sends is unknown; set reduce_dtype in mp_policy, or "
                        "set grad_dtype to a dtype"
                    )
    if not is_allowed:
        return
    this = weakref.ref(engine)

    def serve(kind: PassKind) -> None:
        found = this()
        assert found is not None  # its divergence calls
        _serve_pass(found, kind)

    def reset() -> None:
        found = this()
        if found is not None:
            found.reset()

    refuse_manual(engine.manual.is_on)
    group = _groups.get(engine)
    if group is None:
        group = _groups[engine] = group_of(check.members, "gloo")
    diverging[engine] = None
    engine.divergence = Divergence(engine.exec_order, engine.reductions, engine.comm_ctx, group, (serve, reset))


def _serve_pass(engine: Engine, kind: PassKind) -> None:
    """Take part in a pass that only other ranks run: serve this rank's shards, with gradients of zero."""
    divergence = engine.divergence
    assert divergence is not None
    params: list[ShardedParam] = []
    try:
        if kind == "backward":
            engine.stash_gradients()
        engine.enter_pass(kind)
        divergence.end(ran_here=False)
        if kind == "forward":
            engine.leave_pass()
            return
        params = engine.commit() if engine.is_last_backward else engine.defer()
    except BaseException:
        engine.abort_backward()
        raise
    engine.run_hooks(params)


def _policies(units: Sequence[Unit]) -> list[str]:
    return [
        f"unit {number}: {group.compression.policy}"
        for number, unit in enumerate(units)
        for group in unit.groups
        if group.compression is not None
    ]


def limit_reductions(engine: Engine) -> None:
    """Set the number of reduce-scatter inputs that may be allocated at once to the maximum of the units' settings."""
    engine.reductions.max_inputs = max((unit.max_reductions for unit in engine.units), default=1)
    limit_gathers(engine)


def limit_gathers(engine: Engine) -> None:
    """Set the prefetch budget from the root's setting and from the number of reduce-scatter inputs, which take memory too."""
    num_bytes = engine.units[0].ahead_bytes if engine.units else None
    engine.exec_order.budget = PrefetchBudget(num_bytes=num_bytes, max_reductions=engine.reductions.max_inputs)


def use_transport(engine: Engine, transport: Transport) -> None:
    """Use ``transport`` for the engine's groups from now on."""
    engine.comm_ctx.transport = transport
    bind_units(engine)


def share_streams(engines: Sequence[Engine]) -> None:
    """Let all engines use the streams and the buffer pool of the first."""
    for engine in engines[1:]:
        engine.comm_ctx.streams, engine.comm_ctx.pool = engines[0].comm_ctx.streams, engines[0].comm_ctx.pool
        bind_units(engine)


def _mismatch_check(units: list[Unit], device: torch.device) -> MismatchCheck | None:
    meshes = [group.axes.mesh for unit in units for group in unit.groups]
    store = torch_private.default_store() if meshes else None
    if store is None:
        return None
    largest = max(meshes, key=lambda mesh: mesh.size())
    ranks = tuple(largest.mesh.flatten().tolist())
    if len(ranks) == 1:
        return None
    timeout_s = patience_s(largest.get_group(0), device)
    mismatch_check = MismatchCheck(
        open_numbered_exchange(store, "engine", ranks, ranks.index(dist.get_rank()), timeout_s)
    )
    mismatch_check.groups = list({mesh.get_group(dim): None for mesh in meshes for dim in range(mesh.ndim)})
    return mismatch_check


def communicators(group: ParamGroup, comm_ctx: CommContext) -> GroupComm:
    """Return the communicators of ``group`` for its settings, on the streams and buffer pool of ``comm_ctx``."""
    axes, streams = group.axes, comm_ctx.streams

    def over(
        process_group: dist.ProcessGroup,
        stream: SideStream,
        coded: Compression | None = None,
        fetch: SideStream | None = None,
    ) -> RoutedCommunicator:
        packed = C10dCommunicator(process_group, stream, comm_ctx.pool, group.custom, fetch)
        if coded is not None:
            return CompressedCommunicator(packed, comm_ctx.pass_tracker, coded)
        return RoutedCommunicator(packed, comm_ctx.pass_tracker)

    custom = group.custom
    reduced = group.compression if group.reduce_coding is not None else None
    has_replicas = axes.replicate_mesh_dim is not None and axes.num_replicas > 1
    shards = reduce = replicas = sub = None
    if group.is_collective and axes.shard_mesh_dim is not None:
        process_group = axes.mesh.get_group(axes.shard_mesh_dim)
        gathered = group.compression if group.gather_coding is not None else None
        shards = over(process_group, streams.gather, gathered, streams.fetch if group.place.is_offloaded else None)
        reduce = over(custom.reduce_group or process_group, streams.reduce, None if has_replicas else reduced)
    if axes.replicate_mesh_dim is not None and has_replicas:
        replicas = over(axes.mesh.get_group(axes.replicate_mesh_dim), streams.replicas, reduced)
    if group.sub_axes is not None and group.sub_axes.shard_mesh_dim is not None:
        process_group = group.sub_axes.mesh.get_group(group.sub_axes.shard_mesh_dim)
        packed = C10dCommunicator(process_group, streams.gather, comm_ctx.pool, replace(custom, all_gather=None))
        sub = RoutedCommunicator(packed, comm_ctx.pass_tracker)
    return GroupComm(shards, reduce, replicas, sub, streams if group.place.is_offloaded else None)


def bind_units(engine: Engine) -> None:
    """Bind every group of the engine's units to its communicators and the pool; call it again after a setting changed."""
    users: dict[tuple[dist.ProcessGroup, LinkProvider], LinkUsers] = {}
    comm_ctx = engine.comm_ctx
    for group in (group for unit in engine.units for group in unit.groups):
        comm = communicators(group, comm_ctx)
        group.bind(comm_ctx.pool, comm)
        if (found := _linked(group, comm.shards)) is not None:
            users.setdefault(found, LinkUsers()).gathers.append(group)
        if (found := _linked(group, comm.reduce)) is not None:
            users.setdefault(found, LinkUsers()).reduces.append(group)
        if (found := _linked(group, comm.replicas)) is not None:
            users.setdefault(found, LinkUsers()).sums.append(group)
    for (process_group, provider), its in users.items():
        name = process_group.group_name
        link = comm_ctx.links.get(name)
        if link is None or not link.is_for(its, comm_ctx.transport):
            timeout_s = patience_s(process_group, comm_ctx.device)
            link = comm_ctx.links[name] = provider.make(
                process_group, its, comm_ctx.transport, comm_ctx.pool, timeout_s
            )
            comm_ctx.pass_tracker.register(process_group, link.prepare)


def _linked(group: ParamGroup, way: RoutedCommunicator | None) -> tuple[dist.ProcessGroup, LinkProvider] | None:
    """Return the process group of ``way`` and the provider of its links; None if ``group`` cannot use a link there."""
    if way is None or isinstance(way, CompressedCommunicator):
        return None
    provider = provider_of(way.packed.group, (group.device, group.place.storage_device))
    return None if provider is None else (way.packed.group, provider)


def may_share_memory(group: ParamGroup) -> bool:
    """Return True if ranks of this host may read the shards of ``group`` in shared memory."""
    dim = group.axes.shard_mesh_dim
    if dim is None or not group.is_collective or default_transport() != "auto":
        return False
    devices = group.device, group.place.storage_device
    return group.gather_coding is None and provider_of(group.axes.mesh.get_group(dim), devices) is not None


# ---- The attachment of a sharded module.

ATTACHMENT = "_shardwise_attachment"
PENDING = "shardwise: attachments to complete"  # key in the memo of a deep copy: pairs of an attachment and its copy


class Pass:
    """One pass through a unit's modules; backward has left it when all its inputs have their gradients."""

    __slots__ = ("_backward", "_expected", "_missing")

    def __init__(self) -> None:
        self._backward = -1
        self._expected = self._missing = 0

    def expect(self, count: int) -> None:
        """Expect ``count`` more gradients."""
        self._expected += count

    def passed(self) -> bool:
        """Count one gradient of the running backward; return True if it was the last."""
        backward = torch_private.graph_task_id()
        if backward != self._backward:  # with retain_graph=True a graph may run backward again
            self._backward, self._missing = backward, self._expected
        self._missing -= 1
        return not self._missing


class Attachment:
    """The unit of a module, and its engine if it is a root.

    Ownership runs module -> attachment -> (engine ->) unit; every reference back is weak.

    Attributes:
        unit: the unit.
        engine: the engine of a root; None until the first forward, and for other modules.
        is_root: None until the first forward of the root.
        forward_methods: names of methods that are treated like ``forward``.
        before: number of graph nodes that this thread had made before the running forward of a root, and whether one of its
            inputs needs a gradient.
        ignored: the registrations of ignored parameters: a module's dict of parameters, and a name.
        shared_pass: the pass that the modules of a unit share.
        is_materialized: tensors of its modules were moved from meta to a device, and no forward has run since.
        asked_sync: whether backwards reduce gradients from the next forward on (``no_sync`` of replicas); None: as they do.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.engine: Engine | None = None
        self.is_root: bool | None = None
        self.forward_methods: list[str] = []
        self.before: tuple[int, bool] = 0, False
        self.ignored: tuple[tuple[dict[str, nn.Parameter | None], str], ...] = ()
        self.shared_pass: Pass | None = None
        self.is_materialized = False
        self.asked_sync: bool | None = None

    def __deepcopy__(self, memo: dict[Any, Any]) -> Attachment:
        """Return an attachment with an empty unit, which is filled in when the outermost copy is done."""
        result = Attachment(Unit([], self.unit.precision, self.unit.policy))
        result.is_materialized, result.asked_sync = self.is_materialized, self.asked_sync
        memo[id(self)] = result
        memo.setdefault(PENDING, []).append((self, result))
        return result


# Where ranks may take different ways, in an order that is the same on all ranks: roots that have not run a forward on this
# rank, and engines.
roots_to_come: weakref.WeakKeyDictionary[Attachment, None] = weakref.WeakKeyDictionary()
diverging: weakref.WeakKeyDictionary[Engine, None] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[Engine, dist.ProcessGroup] = weakref.WeakKeyDictionary()  # in which these speak


def is_managed_by_torch(module: nn.Module) -> bool:
    """Return True if torch's own composable APIs (``fully_shard``, ``replicate``) manage the parameters of ``module``."""
    names = torch_private.composable_apis_of(module)
    return attachment_of(module) is None and not {"fully_shard", "replicate"}.isdisjoint(names)


def attachment_of(module: nn.Module) -> Attachment | None:
    """Return the attachment of ``module``, None if it is not sharded."""
    return module.__dict__.get(ATTACHMENT)


# ---- Find tensors that were moved from the meta device but have no values yet.

# Fill bytes of new memory: NaN in floating-point tensors, an implausible number in others.
_FILL_FLOATING, _FILL = 0xFF, 0xA5
_NUM_FIRST = 8  # elements that are compared to detect equal seeds; few, since uneven shards may be small
_MOST_SHOWN = 8


def materializing(
    convert: Callable[[torch.Tensor], torch.Tensor], attachment: Attachment | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``convert`` with a mark: tensors that it moves from meta to a device are filled with bytes that mean "no values".

    ``attachment``: the attachment of the module whose tensors are converted.
    """

    def convert_and_fill(tensor: torch.Tensor) -> torch.Tensor:
        result = convert(tensor)
        if tensor.is_meta and not result.is_meta:
            if attachment is not None:
                attachment.is_materialized = True
            local = torch_private.local_of(result)
            if type(local) in (torch.Tensor, nn.Parameter):
                memory = torch.empty(0, dtype=torch.uint8, device=local.device)
                memory.set_(local.untyped_storage()).fill_(_fill_of(local))
        return result

    return convert_and_fill


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` was moved from meta and was not written to since, on this rank."""
    local = torch_private.local_of(tensor).detach()
    if local.is_meta or not local.numel() or type(local) not in (torch.Tensor, nn.Parameter):
        return False
    found = local.reshape(-1)
    is_first = bool((found[:1].view(torch.uint8) == _fill_of(local)).all())  # one element decides for most tensors
    return is_first and bool((found.view(torch.uint8) == _fill_of(local)).all())


def unwritten_in(module: nn.Module, *, buffers_only: bool = False) -> list[str]:
    """Return the names of parameters (unless ``buffers_only``) and buffers of ``module`` that have no values on this rank."""
    found = [*module.named_buffers()] if buffers_only else [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in found if is_unwritten(tensor)]


def check_values(root: nn.Module, attachments: Sequence[Attachment], mismatch_check: MismatchCheck | None) -> None:
    """Check before the first forward that a model from meta has values, and that shards differ between ranks.

    If every rank has initialized its shard with the same seed, all shards have the same random numbers.  Collective, unless
    ``mismatch_check`` is None.  Raises: StateError on every rank.
    """
    if not any(each.is_materialized for each in attachments):
        return
    local = [json.dumps(["", name]) for name in unwritten_in(root)]
    for group in (group for each in attachments for group in each.unit.groups):
        starts_here = [(param.fqn, _start_of(param)) for param in group.params]
        local += [json.dumps([name, start, group.axes.shard_rank]) for name, start in starts_here if start is not None]
    every = local if mismatch_check is None else mismatch_check.union("values", local)
    found = map(json.loads, sorted(every))
    unwritten: list[str] = []
    starts: dict[str, list[int]] = defaultdict(list)
    for name, value, *_ in found:
        unwritten += [] if name else [value]
        if name:
            starts[name].append(value)
    if unwritten:
        raise StateError(
            f"{_few(unwritten)} have no values: they were not written to after to_empty() allocated them. Call "
            "shardwise.init_parameters(model, init_fn) with a function that initializes all parameters and buffers, or "
            "load them; build buffers that are computed in __init__ under torch.device('cpu') instead of on meta"
        )
    for each in attachments:
        each.is_materialized = False
    # With equal seeds the shards that were initialized first are equal; after shards of unequal sizes, random numbers differ.
    several = [name for name, _ in root.named_parameters() if len(starts[name]) > 1]
    alike = [name for name in several if len(set(starts[name])) == 1]
    if alike and (alike[0] == several[0] or 2 * len(alike) > len(several)):
        raise StateError(
            f"the shards of {_few(alike)} begin with the same values on all ranks: every rank has initialized its "
            "local tensor (to_local()) with the same seed. Call shardwise.init_parameters(model), which initializes parameters "
            "as one process would, or draw on the parameters themselves. If the values are right (copies of one expert), call "
            "forward again: this is checked only once"
        )


def _start_of(param: ShardedParam) -> int | None:
    """Return a digest of the first elements of a shard; None if they are all equal, or the parameter is not sharded."""
    local = torch_private.local_of(param.sharded).detach()
    is_plain = type(local) in (torch.Tensor, nn.Parameter)
    if param.shard.is_whole or not local.numel() or local.shape != param.shard_shape or not is_plain:
        return None
    first = local.reshape(-1)[:_NUM_FIRST]
    return None if bool((first == first[0]).all()) else digest_of(first)


def _fill_of(tensor: torch.Tensor) -> int:
    return _FILL_FLOATING if tensor.is_floating_point() or tensor.is_complex() else _FILL


def _few(names: Iterable[str]) -> str:
    every = list(dict.fromkeys(names))
    return ", ".join(every[:_MOST_SHOWN]) + (
        f" and {len(every) - _MOST_SHOWN} more" if len(every) > _MOST_SHOWN else ""
    )


# ---- Checks of changes to the model by user code that bypass the engine.  Without them training would go wrong silently.
# Each rank would train its own copy of a parameter that was added to the module tree; a pre-sharding parameter that a list or
# closure references would receive gradients that no optimizer uses; an assignment to ``.data`` of a DTensor has no effect.

_VALUES = dict.values
_SHOWN = 4  # names that an error lists


class ModificationChecks:
    """Watches the module tree of one root, the storages of its shards, and the pre-sharding parameters.

    Attributes:
        originals: names of, and weak references to, pre-sharding parameters that user code references.

    Args:
        root: the module.
        attachments: the attachments in its tree.
    """

    def __init__(self, root: nn.Module, attachments: Iterable[Attachment]) -> None:
        self._root = weakref.ref(root)
        self._params = [param for each in attachments for param in each.unit.params]
        self.originals = [(param.fqn, param.original) for param in self._params if _is_kept_without_gradient(param)]
        self._note_tree(root)
        _check_tree(root)
        self._note_shards()
        self._check_since_made()

    # ---- before a forward ----

    def check(self) -> None:
        """Check the tree and the shards; it takes microseconds if nothing has changed.

        Raises: StateError that names parameters without a unit, or shards whose ``.data`` was assigned to.
        """
        if self._size() != self._num_params or [*chain.from_iterable(map(_VALUES, self._children))] != self._modules:
            root = self._root()
            assert root is not None  # its forward is running
            _check_tree(root)
            self._note_tree(root)
        sharded = [param.sharded for param in self._wrapped]
        storages = [*map(torch_private.storage_id, sharded)]
        if storages != self._storages:
            self._check_data(storages)
            self._note_shards()

    def _size(self) -> int:
        return sum(map(len, self._tables))

    def _note_tree(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._children = [children for module in modules if (children := torch_private.children_of(module))]
        self._modules = [*chain.from_iterable(map(_VALUES, self._children))]
        self._tables = [torch_private.parameters_of(module) for module in modules]
        self._tables += self._children  # counts children, too, except a first child of a module that had none
        self._num_params = self._size()

    def _note_shards(self) -> None:
        self._wrapped = [param for param in self._params if isinstance(param.sharded, DTensor)]
        self._seen = [(param.sharded, param.local) for param in self._wrapped]
        self._storages = [torch_private.storage_id(sharded) for sharded, _ in self._seen]

    def _check_data(self, storages: list[int]) -> None:
        rows = zip(self._wrapped, self._seen, self._storages, storages, strict=True)
        _refuse_assigned(
            [
                param.fqn
                for param, (sharded, local), before, now in rows
                if now != before and param.sharded is sharded and param.local is local
            ]
        )

    def _check_since_made(self) -> None:
        rows = zip(self._wrapped, self._storages, strict=True)
        _refuse_assigned(
            [param.fqn for param, now in rows if now != param.made_of[0] and param.made_of[1]() is param.local]
        )

    # ---- after a backward ----

    def check_originals(self) -> None:
        """Raise StateError if a pre-sharding parameter has received a gradient."""
        if self.originals:
            self.originals = [(fqn, original) for fqn, original in self.originals if original() is not None]
            used = [
                fqn for fqn, original in self.originals if (kept := original()) is not None and kept.grad is not None
            ]
            if used:
                raise StateError(
                    f"forward has used {_shown(used)} as it was before it was sharded: the gradient went to the old parameter, "
                    "which an optimizer on the sharded model does not step. A list, a closure or functools.partial still "
                    "references the old parameter: read it from its module in forward"
                )


def _refuse_assigned(names: list[str]) -> None:
    if names:
        raise StateError(
            f".data of {_shown(names)} was assigned to, which changes nothing: torch's DTensors compute with the local tensor "
            "that they were made from. Write p.copy_(values) under torch.no_grad() in place of p.data = values "
            "(torch.nn.utils.vector_to_parameters assigns to .data, too)"
        )


def _is_kept_without_gradient(param: ShardedParam) -> bool:
    original = param.original()
    return original is not None and original is not param.sharded and original.grad is None


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _refuse_shared(root: nn.Module, known: Container[int]) -> None:
    """Raise StateError if a parameter in the tree of ``root`` belongs to a unit that is not below ``root``."""
    owned = {id(form): owner for owner in managed_by_registration().values() for form in (owner.sharded, owner.full)}
    for path, param in root.named_parameters():
        owner = owned.get(id(param)) if id(param) not in known else None
        if owner is not None:
            raise StateError(
                f"{path} of this {type(root).__name__} is shared with {type(owner.module()).__name__}, which was sharded by "
                "itself and is not below it: both would train the parameter separately. Call fully_shard (or replicate) on a "
                "module that contains both, and run the forward of that module"
            )


def _check_tree(root: nn.Module) -> None:
    """Raise StateError if a trainable parameter belongs to no unit, or a parameter of a unit was removed from its module."""
    attachments = {id(each): each for module in root.modules() if (each := attachment_of(module)) is not None}
    params = [param for each in attachments.values() for param in each.unit.params]
    known = {id(form) for param in params for form in (param.sharded, param.full, param.subsharded)}
    ignored = {(id(table), name) for each in attachments.values() for table, name in each.ignored}
    tables: dict[int, str] = {}
    strangers: list[str] = []
    of_torch = {each for module in root.modules() if is_managed_by_torch(module) for each in module.modules()}
    for path, module in root.named_modules():
        table = torch_private.parameters_of(module)
        tables[id(table)] = path
        for name, param in table.items():
            if (
                param is not None
                and param.requires_grad
                and id(param) not in known
                and (id(table), name) not in ignored
                and module not in of_torch
            ):
                strangers.append(f"{path}.{name}" if path else name)
    for param in params:
        param.check_places(lambda table: id(table) in tables)
    if strangers:
        _refuse_shared(root, known)
        raise StateError(
            f"{_shown(strangers)} was added to the module tree after its units were made and belongs to none of them: every "
            "rank would train its own copy on its part of the batch. Add parameters before fully_shard (or replicate), shard "
            "the new module before the next forward, or freeze it (requires_grad_(False)); pass parameters that you train "
            "yourself as ignored_params"
        )


def live_engine(attachment: Attachment) -> Engine:
    """Return the engine of the root of ``attachment``; at the first forward its module becomes the root.

    Raises: StateError if an inner unit was a root before, if the root unit has several modules, or if parameters are still on
        meta or not on the device of the offload policy.
    """
    engine = engine_of(attachment.unit)
    return _become_root(attachment) if engine is None or attachment.is_root is None else engine


def provisional_engine(attachment: Attachment) -> Engine:
    """Return an engine for calls before the first forward (``unshard``); the root's engine replaces it later."""
    engine = engine_of(attachment.unit)
    if engine is None:
        engine = attachment.engine = new_engine([attachment.unit])
    return engine


def copy_settings(old: Attachment, new: Attachment) -> None:
    """Copy the user's settings from the engine of ``old`` to that of ``new``; the state of a step is not copied."""
    if old.engine is not None and (old.engine.manual.is_on or not old.engine.is_last_backward):
        engine = provisional_engine(new)
        engine.is_last_backward = old.engine.is_last_backward
        engine.manual.inherit(old.engine.manual)


def _become_root(attachment: Attachment) -> Engine:
    modules = list(attachment.unit.modules)
    if len(modules) > 1:
        raise StateError(f"FSDP requires a single root module but got {tuple(modules)}")
    root = modules[0]
    attachments = _attachments_in(root, attachment)
    for inner in attachments[1:]:
        if inner.unit.may_diverge:
            raise StateError(
                f"set_allow_rank_divergence must be called on the root; it was called on {_path_in(root, inner)}"
            )
        if inner.is_root is not None and engine_of(inner.unit) is not None:
            raise StateError(
                f"FSDP state has already been lazily initialized for {inner.unit.name or _path_in(root, inner)}\n"
                "FSDP requires running forward through the root module first: this module already ran, alone or below another "
                "root, and belongs to that. Run the outermost module first. If two models share this module (an actor and a "
                "critic with one trunk), call fully_shard on their parts, not on the two models, or on one module whose "
                "forward runs both"
            )
    _name_units(root, attachments)
    _check_materialized(attachments)
    if attachment.unit.uses_default_reshard:
        attachment.unit.policy = replace(attachment.unit.policy, reshard_after_forward=False)
    _give_to_readers(root, attachment.unit)
    outside = ModificationChecks(root, attachments)
    engine = new_engine([each.unit for each in attachments])
    engine.outside = outside
    check_values(root, attachments, engine.exec_order.mismatch_check)
    if engine.exec_order.mismatch_check is not None:
        compare_beginnings(engine.units, engine.exec_order.mismatch_check)
        engine.buffers = BufferComparison(root, engine.exec_order.mismatch_check)
    for inner in attachments:
        if inner.engine is not None:
            if inner.engine.manual.is_on and inner is not attachment:
                raise StateError(
                    "set_manual_backward_finalization must be called on the root FSDP module; it was called on "
                    f"{inner.unit.name or _path_in(root, inner)}"
                )
            _inherit(engine, inner.engine)
        inner.is_root, inner.engine = False, None
    refuse_manual(engine.divergence is not None and engine.manual.is_on)
    attachment.is_root, attachment.engine = True, engine
    roots_to_come.pop(attachment, None)
    return engine


def _give_to_readers(module: nn.Module, unit: Unit) -> None:
    """Unshard units together with a module that reads their parameters without calling their modules.

    ``nn.MultiheadAttention`` does so: it passes the weight of ``out_proj`` to a function.
    """
    own = attachment_of(module)
    unit = unit if own is None else own.unit
    read = attachment_of(module.out_proj) if isinstance(module, nn.MultiheadAttention) else None
    if read is not None and read.unit is not unit:
        unit.use_tied(read.unit)
    for child in module.children():
        _give_to_readers(child, unit)


def _inherit(engine: Engine, old: Engine) -> None:
    engine.is_last_backward = engine.is_last_backward and old.is_last_backward
    engine.manual.inherit(old.manual)
    engine.post_optim_event = engine.post_optim_event or old.post_optim_event


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
            param.check_places()
            if len(param.registrations) > 1:
                param.check_ties()
            param.adopt_registered()
    on_meta = [p.fqn for each in attachments for p in each.unit.params if p.sharded.device.type == "meta"]
    if on_meta:
        raise StateError(
            "Call shardwise.init_parameters(model), which allocates and initializes parameters, or to_empty() and load a "
            "checkpoint. FSDP parameters should be materialized from meta device before training, but the following were still "
            f"on meta device: {on_meta}"
        )
    misplaced = [
        (p.fqn, p.local.device)
        for each in attachments
        for group in each.unit.groups
        if isinstance(group.place.offload, CPUOffloadPolicy)
        for p in group.params
        if p.local.device.type != "cpu"
    ]
    if misplaced:
        raise StateError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            f"dict or call module.to_empty(device='cpu'). Found following parameters on non-CPU device: {misplaced}\n"
        )

"""Roots: the module that runs the first forward becomes the root, and owns the engine of all units below it.

``fully_shard`` is called on inner modules first, and cannot know which call is the last.  So nothing is decided until a
forward runs: then the outermost module that it enters is the root, as with FSDP2's lazy initialization.  Before, a call that
needs streams and buffers (``unshard``) gets a provisional engine, and an evaluation of one rank one that asks no other rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh

from shardwise.collectives.c10d import GroupCommunicator
from shardwise.collectives.compressed import Coding, CompressedCommunicator
from shardwise.collectives.routes import LinkProvider, LinkUsers, Transport, default_transport, provider_of
from shardwise.collectives.streams import SideStream, watch_device
from shardwise.consistency.agreement import MismatchCheck, open_numbered_exchange
from shardwise.consistency.process_groups import group_of, patience_s
from shardwise.consistency.store import default_store
from shardwise.errors import StateError
from shardwise.fsdp.attachment import Attachment, attachment_of, diverging, names_of_units, roots_to_come
from shardwise.fsdp.comm_context import CommContext, UnitComm
from shardwise.fsdp.divergence import Divergence, refuse_manual
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.init_parameters import check_materialized
from shardwise.fsdp.unit import StepChecks, Unit
from shardwise.plan.schedule import PrefetchBudget

# ---- Engines, with communicators, links and buffer pools for every group of their units.

# Make the checks of a root (``checks/root.py::RootChecks``); filled when shardwise is imported, since ``fsdp`` may not import
# ``checks``, which imports it.
check_makers: list[Callable[[nn.Module, Sequence[Attachment], Engine], StepChecks]] = []
# The process groups over which engines agree on a schedule if their ranks may take different ways.
_groups: weakref.WeakKeyDictionary[Engine, dist.ProcessGroup] = weakref.WeakKeyDictionary()
# Engines of evaluations that one rank may run alone before its first training step: they agree on nothing with other ranks.
_alone: weakref.WeakSet[Engine] = weakref.WeakSet()


def new_engine(units: list[Unit], is_alone: bool = False) -> Engine:
    """Return an engine for ``units``.  Collective, unless ``is_alone``: for one forward without collectives.

    Raises: DesyncError if ranks have other parameters or compression.
    """
    for unit in units:
        unit.ensure_packed()  # parameters that user code has tied since leave their units
    device = next((unit.settings.storage.device for unit in units if unit.params), torch.device("cpu"))
    asked: list[Transport] = [unit.settings.transport for unit in units if unit.settings.transport is not None]
    engine = Engine(CommContext(device, asked[0] if asked else default_transport()))
    engine.adopt(units)
    set_limits(engine)
    if is_alone:
        _alone.add(engine)
    elif (check := _mismatch_check(units, device)) is not None:
        engine.exec_order.mismatch_check = check
        # A name that all ranks share; the track's own number counts the engines of this process only.
        engine.exec_order.track.name, engine.exec_order.track.is_of_several = check.topic, True
    bind_units(engine)
    if (check := engine.exec_order.mismatch_check) is not None:
        if device.type != "cpu":
            watch_device(device)
            engine.exec_order.compare_parameters()  # kernels of a gather whose sizes differ between ranks hang
        coded = {number: each for number, unit in enumerate(units) if (each := unit.settings.compression) is not None}
        if policies := [f"unit {number}: {each.policy}" for number, each in coded.items()]:
            check.check_facts("compression policies", policies)
        set_divergence(engine, units[0].settings.may_diverge)
    return engine


def set_divergence(engine: Engine, is_allowed: bool) -> None:
    """Set whether the ranks of ``engine`` may take different ways.  Collective."""
    check = engine.exec_order.mismatch_check
    if check is None:
        return
    check.check_facts("set_allow_rank_divergence", [f"set_allow_rank_divergence({is_allowed})"])
    if is_allowed is (engine.divergence is not None):
        return
    # A collective of all ranks has just ended, so no rank is in a pass and the same is changed on all.
    for unit in engine.units:
        unit.engine_side.diverges, unit.engine_side.schedule = is_allowed, None
        unit.reshard()  # ranks that took different ways differ in what is full, and in what their last forwards have shown
        unit.backward.is_unseen = False
    engine.divergence = engine.reductions.syncs_replicas = None
    diverging.pop(engine, None)
    engine.exec_order.allow_divergence(is_allowed)
    if not is_allowed:
        return
    refuse_manual(engine.manual.is_on)
    group = _groups[engine] = _groups.get(engine) or group_of(check.members, "gloo")
    diverging[engine] = None
    engine.divergence = Divergence(engine, group)


def set_limits(engine: Engine) -> None:
    """Set how many reduce-scatter inputs may be allocated at once, the most that a unit allows, and the prefetch budget."""
    num_bytes = engine.units[0].settings.ahead_bytes
    engine.reductions.max_inputs = max(unit.settings.max_reductions for unit in engine.units)
    engine.exec_order.budget = PrefetchBudget(num_bytes=num_bytes, max_reductions=engine.reductions.max_inputs)


def _mismatch_check(units: list[Unit], device: torch.device) -> MismatchCheck | None:
    meshes = [unit.settings.axes.mesh for unit in units if unit.params]
    largest, store = max(meshes, key=DeviceMesh.size, default=None), default_store()
    if largest is None or largest.size() == 1 or store is None:
        return None
    ranks = tuple(largest.mesh.flatten().tolist())
    timeout_s = patience_s(largest.get_group(0), device)
    exchange = open_numbered_exchange(store, "engine", ranks, ranks.index(dist.get_rank()), timeout_s)
    mismatch_check = MismatchCheck(exchange)
    mismatch_check.groups = list({mesh.get_group(dim): None for mesh in meshes for dim in range(mesh.ndim)})
    return mismatch_check


def communicators(unit: Unit, comm_ctx: CommContext) -> UnitComm:
    """Return the communicators of ``unit`` for its settings, on the streams and buffer pool of ``comm_ctx``."""
    asked, streams, pool = unit.settings, comm_ctx.streams, comm_ctx.pool
    axes, compression = asked.axes, asked.compression

    def over(group: dist.ProcessGroup, stream: SideStream, coding: Coding | None, **options: Any) -> GroupCommunicator:
        options = {"custom": asked.custom, **options}
        if coding is not None and compression is not None:
            return CompressedCommunicator(compression, group, stream, pool, **options)
        return GroupCommunicator(group, stream, pool, comm_ctx.pass_tracker, **options)

    has_replicas = axes.num_replicas > 1
    shards = reduce = replicas = sub = None
    if unit.memory.is_collective and axes.shard_mesh_dim is not None:
        process_group = axes.mesh.get_group(axes.shard_mesh_dim)
        fetch = streams.fetch if asked.storage.is_offloaded else None
        shards = over(process_group, streams.gather, unit.coding("gather"), fetch=fetch)
        coding = None if has_replicas else unit.coding("reduce")  # else what goes between replicas is compressed
        reduce = over(asked.custom.reduce_group or process_group, streams.reduce, coding)
    if has_replicas:
        replicas = over(axes.mesh.get_group(axes.replicate_mesh_dim), streams.replicas, unit.coding("reduce"))
    if (smaller := asked.sub_axes) is not None:
        process_group = smaller.mesh.get_group(smaller.shard_mesh_dim)
        # Custom gathers are written for the mesh of the unit; the smaller mesh is the engine's own.
        sub = over(process_group, streams.gather, None, custom=replace(asked.custom, all_gather=None))
    if (sums := asked.sums) is not None:
        if reduce is None and replicas is None:  # one rank sums its microbatches in the same order
            replicas = over(axes.mesh.get_group(0), streams.replicas, None)
        passes = comm_ctx.pass_tracker
        reduce, replicas = (None if way is None else sums.communicator(way, passes) for way in (reduce, replicas))
    return UnitComm(shards, reduce, replicas, pool, streams, sub)


def bind_units(engine: Engine) -> None:
    """Bind the engine's units to their communicators and the pool; call it again after a setting changed."""
    users: dict[tuple[dist.ProcessGroup, LinkProvider], LinkUsers] = {}
    comm_ctx = engine.comm_ctx
    for unit in engine.units:
        comm, storage = communicators(unit, comm_ctx), unit.settings.storage
        unit.bind(comm)
        ways = [(comm.shards, "gathers"), (comm.reduce, "reduces"), (comm.replicas, "sums")]
        ways += [] if unit.settings.sums is None else [(comm.replicas, "reduces")]
        for way, kind in ways if unit.params else ():
            if way is not None and not isinstance(way, CompressedCommunicator):  # a link sends elements as they are
                provider = provider_of(way.group, (storage.device, storage.storage_device))
                if provider is not None:
                    getattr(users.setdefault((way.group, provider), LinkUsers()), kind).append(unit)
    for (process_group, provider), its in users.items() if engine not in _alone else ():
        name = process_group.group_name
        link = comm_ctx.links.get(name)
        if link is None or not link.is_for(its, comm_ctx.transport):
            timeout_s = patience_s(process_group, comm_ctx.device)
            transport, pool = comm_ctx.transport, comm_ctx.pool
            link = comm_ctx.links[name] = provider.make(process_group, its, transport, pool, timeout_s)
            comm_ctx.pass_tracker.register(process_group, link.prepare)


def may_share_memory(unit: Unit) -> bool:
    """Return True if ranks of this host may read the shards of ``unit`` in shared memory."""
    axes, storage = unit.settings.axes, unit.settings.storage
    if axes.shard_mesh_dim is None or not unit.memory.is_collective or default_transport() != "auto":
        return False
    devices = storage.device, storage.storage_device
    return unit.coding("gather") is None and provider_of(axes.mesh.get_group(axes.shard_mesh_dim), devices) is not None


def live_engine(attachment: Attachment, in_forward: bool = False) -> Engine:
    """Return the engine of the root of ``attachment``; at the first forward its module becomes the root.

    ``in_forward``: a forward begins.  Without gathers and without gradients it takes no collective, so one rank may run it
    alone: before the first one that takes collectives it gets an engine of its own.

    Raises: StateError if an inner unit was a root before, if the root unit has several modules, or if parameters are still on
        meta or not on the device of the offload policy.
    """
    engine = engine_of(attachment.unit)
    is_evaluation = in_forward and not torch.is_grad_enabled()
    if engine is not None:
        goes_on = engine in _alone and (engine.forwards or (is_evaluation and engine is attachment.engine))
        if attachment.is_root is not None or goes_on:
            return engine
    return _become_root(attachment, is_evaluation)


def provisional_engine(attachment: Attachment) -> Engine:
    """Return an engine for calls before the first forward (``unshard``); the root's engine replaces it later."""
    engine = engine_of(attachment.unit)
    if engine is None or engine in _alone:
        engine = attachment.engine = new_engine([*attachment.units])
    return engine


def _become_root(attachment: Attachment, may_be_alone: bool) -> Engine:
    root, *others = attachment.unit.modules
    if others:
        raise StateError(f"FSDP requires a single root module but got {(root, *others)}")
    names = names_of_units(root)
    below = [each for module in root.modules() if (each := attachment_of(module)) is not None]
    attachments = list(dict.fromkeys([attachment, *below]))
    units = [unit for each in attachments for unit in each.units]
    paths = {id(param): name for name, param in root.named_parameters()}
    for unit in units:  # first, since errors name units
        unit.name = names.get(unit, "")
        for param in unit.params:
            param.fqn = paths.get(id(param.sharded), param.fqn)
    for inner in attachments[1:]:
        is_manual = inner.engine is not None and inner.engine.manual.is_on
        if inner.unit.settings.may_diverge or is_manual:
            method = "set_manual_backward_finalization" if is_manual else "set_allow_rank_divergence"
            raise StateError(f"{method} must be called on the root FSDP module; it was called on {inner.unit.name}")
        if inner.is_root is not None and engine_of(inner.unit) is not None:
            raise StateError(
                f"FSDP state has already been lazily initialized for {inner.unit.name}\nFSDP requires running forward "
                "through the root module first: this module has run before, alone or below another root. Run the outermost "
                "one first; if two models share this module, call fully_shard on their parts, or on one that runs both"
            )
    check_materialized(attachments)
    # Backward reads the parameters of the root next, so freeing them after its forward would save nothing.
    for unit in attachment.units if attachment.unit.settings.keeps_for_backward else ():
        unit.policy = replace(unit.policy, reshard_after_forward=False)
    is_alone = may_be_alone and not any(unit.memory.is_collective for unit in units)
    for_gradients = [unit.engine_side.engine_for_gradient for unit in units]
    engine = new_engine(units, is_alone)
    for make in check_makers:
        engine.checks = make(root, attachments, engine)
    for unit in engine.units:
        unit.engine_side.checks = weakref.proxy(engine.checks)  # which know modules of the tree, and those own the unit
    # What the user has told provisional engines holds for the root's.
    for inner in attachments:
        if inner.engine is not None:
            engine.is_last_backward &= inner.engine.is_last_backward
            engine.manual.is_on |= inner.engine.manual.is_on
            engine.post_optim_event = engine.post_optim_event or inner.engine.post_optim_event
    if is_alone:
        for unit, engine_ref in zip(units, for_gradients, strict=True):
            unit.engine_side.engine_for_gradient = engine_ref  # a gradient may come before a forward of the root
        attachment.engine = engine
        return engine
    for inner in attachments:
        inner.is_root, inner.engine = False, None
    refuse_manual(engine.divergence is not None and engine.manual.is_on)
    attachment.is_root, attachment.engine = True, engine
    roots_to_come.pop(attachment, None)
    return engine


def serve_others(params: Sequence[torch.Tensor]) -> None:
    """Serve the passes that other ranks still run, before gradients of ``params`` are read: they are not complete yet."""
    if not (roots_to_come or diverging):
        return
    ids = {*map(id, params)}
    for attachment in list(roots_to_come):
        if not ids.isdisjoint([id(param) for module in attachment.unit.modules for param in module.parameters()]):
            live_engine(attachment)  # other ranks run a first forward that this one does not run
    for engine in list(diverging):
        mine = [form for unit in engine.units for param in unit.params for form in (param.sharded, param.full)]
        if engine.divergence is not None and not ids.isdisjoint(map(id, mine)):
            engine.divergence.begin(None, ids)

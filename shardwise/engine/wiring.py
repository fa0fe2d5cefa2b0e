"""Give an engine what it talks through: communicators, links and memory for every group of its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.comm.bulletin import Bulletin, Position
from shardwise.comm.c10d import C10dCommunicator
from shardwise.comm.coding_state import Compression
from shardwise.comm.device_watch import watch_device
from shardwise.comm.groups import patience_s
from shardwise.comm.lanes import Lane
from shardwise.comm.links.compressed import CompressedCommunicator
from shardwise.comm.links.link import Transport, default_transport
from shardwise.comm.links.routes import RoutedCommunicator
from shardwise.comm.posts import number_posts
from shardwise.engine.engine import Engine
from shardwise.engine.group_links import GroupLink, Users, can_link
from shardwise.engine.means import CommContext
from shardwise.plan.prefetch import PrefetchBudget
from shardwise.units.group import ShardGroup
from shardwise.units.group_comm import GroupComm
from shardwise.units.unit import Unit


def new_engine(units: list[Unit]) -> Engine:
    device = next((group.device for unit in units for group in unit.groups), torch.device("cpu"))
    wanted: list[Transport] = [unit.transport for unit in units if unit.transport is not None]
    engine = Engine(CommContext.on(device, wanted[0] if wanted else default_transport()))
    engine.adopt(units)
    engine.journal.bulletin = bulletin = _bulletin(units, device)
    if bulletin is not None:
        # Not the journal: it has the units, which would hold themselves.
        engine.means.spans.tell = lambda reason: bulletin.tell(Position(0, (), reason))
        engine.journal.log.track.name = bulletin.topic  # a count of this process alone may be another on other ranks
    limit_reductions(engine)
    bind_units(engine)
    if bulletin is not None and device.type != "cpu":
        watch_device(device)
        engine.journal.compare_parameters()  # a kernel that gathers other sizes than its peers never ends
    policies = _policies(units)
    if bulletin is not None and policies:
        bulletin.check_facts("compression policies", policies, engine.journal.position())
    return engine


def _policies(units: Sequence[Unit]) -> list[str]:
    return [
        f"unit {number}: {group.compression.policy}"
        for number, unit in enumerate(units)
        for group in unit.groups
        if group.compression is not None
    ]


def limit_reductions(engine: Engine) -> None:
    """Let as many inputs of reductions live at once as the most generous unit asks for."""
    engine.reductions.max_inputs = max((unit.max_reductions for unit in engine.units), default=1)
    limit_gathers(engine)


def limit_gathers(engine: Engine) -> None:
    """Let gathers start ahead as far as the root asks for; what is in memory then depends on how many reductions live."""
    num_bytes = engine.units[0].ahead_bytes if engine.units else None
    engine.journal.room = PrefetchBudget(num_bytes=num_bytes, max_reductions=engine.reductions.max_inputs)


def use_transport(engine: Engine, transport: Transport) -> None:
    """Let the engine's groups talk over ``transport`` from now on."""
    engine.means.transport = transport
    bind_units(engine)


def share_lanes(engines: Sequence[Engine]) -> None:
    """Let all engines use the first one's lanes and memory."""
    for engine in engines[1:]:
        engine.means.lanes, engine.means.pool = engines[0].means.lanes, engines[0].means.pool
        bind_units(engine)


def _bulletin(units: list[Unit], device: torch.device) -> Bulletin | None:
    meshes = [group.axes.mesh for unit in units for group in unit.groups]
    store = torch_private.default_store() if meshes else None
    if store is None:
        return None
    largest = max(meshes, key=lambda mesh: mesh.size())
    ranks = tuple(largest.mesh.flatten().tolist())
    if len(ranks) == 1:
        return None
    timeout_s = patience_s(largest.get_group(0), device)
    bulletin = Bulletin(number_posts(store, "engine", ranks, ranks.index(dist.get_rank()), timeout_s))
    bulletin.groups = list({mesh.get_group(dim): None for mesh in meshes for dim in range(mesh.ndim)})
    return bulletin


def communicators(group: ShardGroup, means: CommContext) -> GroupComm:
    """Return how ``group`` talks, on the lanes and with the memory of ``means``, as its settings say."""
    axes, lanes = group.axes, means.lanes

    def over(
        process_group: dist.ProcessGroup, lane: Lane, coded: Compression | None = None, fetch: Lane | None = None
    ) -> RoutedCommunicator:
        packed = C10dCommunicator(process_group, lane, means.pool, group.custom, fetch)
        if coded is not None:
            return CompressedCommunicator(packed, means.spans, coded, means.coded_sums)
        return RoutedCommunicator(packed, means.spans)

    custom = group.custom
    reduced = group.compression if group.reduce_coding is not None else None
    has_replicas = axes.replicate_mesh_dim is not None and axes.num_replicas > 1
    shards = reduce = replicas = sub = None
    if group.is_collective and axes.shard_mesh_dim is not None:
        process_group = axes.mesh.get_group(axes.shard_mesh_dim)
        gathered = group.compression if group.gather_coding is not None else None
        shards = over(process_group, lanes.gather, gathered, lanes.fetch if group.place.is_offloaded else None)
        reduce = over(custom.reduce_group or process_group, lanes.reduce, None if has_replicas else reduced)
    if axes.replicate_mesh_dim is not None and has_replicas:
        replicas = over(axes.mesh.get_group(axes.replicate_mesh_dim), lanes.replicas, reduced)
    if group.sub_axes is not None and group.sub_axes.shard_mesh_dim is not None:
        process_group = group.sub_axes.mesh.get_group(group.sub_axes.shard_mesh_dim)
        packed = C10dCommunicator(process_group, lanes.gather, means.pool, replace(custom, all_gather=None))
        sub = RoutedCommunicator(packed, means.spans)
    return GroupComm(shards, reduce, replicas, sub, lanes if group.place.is_offloaded else None)


def bind_units(engine: Engine) -> None:
    """Give every group of the engine's units its communicators and its memory (again, after a setting has changed)."""
    users: dict[dist.ProcessGroup, Users] = {}
    means = engine.means
    for group in (group for unit in engine.units for group in unit.groups):
        comm = communicators(group, means)
        group.bind(means.pool, comm)
        if (found := _linked(group, comm.shards)) is not None:
            users.setdefault(found, Users()).gathers.append(group)
        if (found := _linked(group, comm.reduce)) is not None:
            users.setdefault(found, Users()).reduces.append(group)
        if (found := _linked(group, comm.replicas)) is not None:
            users.setdefault(found, Users()).sums.append(group)
    for process_group, its in users.items():
        name = process_group.group_name
        link = means.links.get(name)
        if link is None or not link.is_for(its, means.transport):
            timeout_s = patience_s(process_group, means.device)
            link = means.links[name] = GroupLink(process_group, its, means.transport, means.pool, timeout_s)
            means.spans.register(process_group, link.prepare)


def _linked(group: ShardGroup, way: RoutedCommunicator | None) -> dist.ProcessGroup | None:
    """Return the process group of ``way`` if its ranks may find a link for ``group``."""
    if way is None or isinstance(way, CompressedCommunicator) or not can_link(group, way.packed.group):
        return None
    return way.packed.group


def may_share_memory(group: ShardGroup) -> bool:
    """Return True if ranks of this host could read the shards of ``group`` where they lie."""
    dim = group.axes.shard_mesh_dim
    if dim is None or not group.is_collective or default_transport() != "auto":
        return False
    return group.gather_coding is None and can_link(group, group.axes.mesh.get_group(dim))

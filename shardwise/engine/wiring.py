"""Give an engine what it talks through: communicators, links and memory for every group of its units."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.comm.agree import Bulletin
from shardwise.comm.buffers import BufferPool
from shardwise.comm.c10d import C10dCommunicator
from shardwise.comm.lanes import Lane
from shardwise.comm.links.link import Transport, default_transport
from shardwise.comm.links.routes import RoutedCommunicator
from shardwise.engine.engine import Engine, Lanes
from shardwise.engine.group_links import GroupLink, can_link
from shardwise.units.group import GroupComm, ShardGroup
from shardwise.units.unit import Unit


def new_engine(units: list[Unit]) -> Engine:
    device = next((group.device for unit in units for group in unit.groups), torch.device("cpu"))
    engine = Engine(device, Lanes.on(device), BufferPool(device))
    wanted: list[Transport] = [unit.transport for unit in units if unit.transport is not None]
    engine.transport = wanted[0] if wanted else default_transport()
    engine.adopt(units)
    engine.journal.bulletin = bulletin = _bulletin(units, device)
    if bulletin is not None:
        engine.journal.track.name = bulletin.topic  # a count of this process alone may be another on other ranks
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


def may_share_memory(group: ShardGroup) -> bool:
    """Return True if ranks of this host could read the shards of ``group`` where they lie."""
    dim = group.axes.shard_mesh_dim
    if dim is None or not group.is_collective or default_transport() != "auto":
        return False
    return can_link(group, group.axes.mesh.get_group(dim))

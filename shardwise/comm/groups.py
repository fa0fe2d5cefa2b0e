"""Process groups and meshes that are made on the way; making one waits for its own ranks alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DeviceMesh

from shardwise.comm.peer_owner import check_peers
from shardwise.torch_private import is_gloo, set_timeout, timeout_s_of

_alone: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = weakref.WeakKeyDictionary()


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a new process group of global ``ranks``, this one among them; waits for these ranks alone."""
    world = dist.group.WORLD
    limit = None if world is None else timedelta(seconds=timeout_s_of(world))
    group = dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    check_peers()
    return group


def patience_s(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """Return how long ranks of ``group`` wait for each other: as its timeout says, or that of the job if it was given none.

    A gloo group that was given none (those of ``init_device_mesh``) has torch's own half an hour, whatever the job was given;
    it takes the job's from here on.
    """
    seconds, world = timeout_s_of(group, device), dist.group.WORLD
    if world is None or group is world or not is_gloo(group) or seconds != default_pg_timeout.total_seconds():
        return seconds
    limit_s = timeout_s_of(world, device)
    if limit_s < seconds:
        set_timeout(group, limit_s)
    return min(limit_s, seconds)


def mesh_of_one(device_type: str) -> DeviceMesh:
    """Return a mesh of this rank alone, made once per default process group."""
    world = dist.group.WORLD
    assert world is not None
    known = _alone.setdefault(world, {})
    if device_type not in known:
        known[device_type] = DeviceMesh.from_group(group_of([dist.get_rank()]), device_type)
    return known[device_type]

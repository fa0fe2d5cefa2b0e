"""Process groups and meshes that are made on the way; making one waits for its own ranks alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

_alone: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = weakref.WeakKeyDictionary()


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a new process group of global ``ranks``, this one among them; waits for these ranks alone."""
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def mesh_of_one(device_type: str) -> DeviceMesh:
    """Return a mesh of this rank alone, made once per default process group."""
    world = dist.group.WORLD
    assert world is not None
    known = _alone.setdefault(world, {})
    if device_type not in known:
        known[device_type] = DeviceMesh.from_group(group_of([dist.get_rank()]), device_type)
    return known[device_type]

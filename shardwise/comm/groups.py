"""Process groups and meshes that are made on the way; making one waits for its own ranks alone."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

_alone: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh_of_one(device_type: str) -> DeviceMesh:
    """Return a mesh of this rank alone, made once per default process group."""
    world = dist.group.WORLD
    assert world is not None
    known = _alone.setdefault(world, {})
    if device_type not in known:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        known[device_type] = DeviceMesh.from_group(group, device_type)
    return known[device_type]

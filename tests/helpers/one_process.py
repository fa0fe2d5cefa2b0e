"""Process groups of one process: over gloo, and as any rank of a group that carries nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.torch_private import forget_meshes


@contextmanager
def standing_for(rank: int, world: int) -> Iterator[None]:
    """Be ``rank`` of ``world``, on a group that carries nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


@contextmanager
def alone(timeout_s: float = 1800.0) -> Iterator[dist.Store]:
    """Be the only rank of a job; yield its store."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    try:
        yield store
    finally:
        dist.destroy_process_group()

"""What packages of trainers look for on a rank."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist


def say_as_torchrun() -> None:
    """Set what torchrun says of a rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": str(dist.get_world_size())}


@contextmanager
def sharding_on_cpu() -> Generator[None, None, None]:
    """Let accelerate shard on CPU ranks, which its code can do and its choice of a kind of run leaves out."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield

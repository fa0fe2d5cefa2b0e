"""Parameters that are ShardedTensors, DTensors or plain, all cut from whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def cut(whole: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Return the part of ``whole`` that a local shard's ``metadata`` describes."""
    for dim, (start, size) in enumerate(zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)):
        whole = whole.narrow(dim, min(start, whole.size(dim)), size)
    return whole


def set_gradients(params: Mapping[str, torch.Tensor], wholes: Mapping[str, torch.Tensor]) -> None:
    """Give each parameter that ``wholes`` names its part of the gradient there."""
    for name, gradient in wholes.items():
        param = params[name]
        if isinstance(param, sharded_tensor.ShardedTensor):
            for shard in param.local_shards():
                shard.tensor.grad = cut(gradient, shard.metadata).clone()
        elif isinstance(param, DTensor):
            param.grad = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
        else:
            param.grad = gradient.clone()

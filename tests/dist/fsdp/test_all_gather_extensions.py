"""All-gather extensions that are put on tensors after they were sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import MixedPrecisionPolicy, fully_shard


def pre_all_gather(
    self: torch.Tensor,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Module,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[tuple[torch.Tensor, ...], Any]:
    assert isinstance(mesh, DeviceMesh)
    assert mesh.ndim == 1
    assert isinstance(module, nn.Linear)
    assert len(outer_size) == len(outer_stride) == 2
    return (self.to(mp_policy.param_dtype),), {"seen": True}


def post_all_gather(
    self: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    (tensor,) = outputs
    assert metadata == {"seen": True}
    assert tensor.dtype == param_dtype
    if out is not None:
        assert out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return None
    return tensor, (tensor,)


def patch(model: nn.Module) -> None:
    for param in model.parameters():
        if param.ndim == 2:
            local = param._local_tensor
            local.fsdp_pre_all_gather = pre_all_gather.__get__(local)
            local.fsdp_post_all_gather = post_all_gather.__get__(local)


@on_ranks()
@pytest.mark.parametrize(("hybrid", "num_ranks"), [(False, 2), (True, 4)], ids=["shards", "replicas"])
def test_all_gather_extensions_patched_on_after(hybrid: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    patch(models[0])
    optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        losses = [model(x).float().square().mean() for model in models]
        for loss, optim in zip(losses, optims, strict=True):
            loss.backward()
            optim.step()
            optim.zero_grad()
        assert torch.equal(losses[0], losses[1])
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left.to_local(), right.to_local())

"""What users of torch's FSDP2 pass to it is understood by what it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from helpers.compare import EXACT, REORDERED, assert_same
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import Shard

from shardwise import fully_shard

WIDTH = 8
ShardPlacementResult: Any = _fsdp_common.ShardPlacementResult


class Experts(nn.Module):
    """Every token goes through all experts, weighted: grouped matrices as a mixture of experts has them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 12) / 4)
        self.down = nn.Parameter(torch.randn(count, 12, WIDTH) / 4)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.einsum("nw,ewh->neh", x, self.up))
        return torch.einsum("neh,ehw,ne->nw", hidden, self.down, weights)


class Mixture(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, count), Experts(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x, self.router(x).softmax(-1))


def train(model: nn.Module, api: Callable[..., Any], placement_fn: Any, **options: Any) -> nn.Module:
    for block in model:  # type: ignore[attr-defined]
        api(block, shard_placement_fn=placement_fn(block), **options)
    api(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        noise = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, WIDTH, generator=noise)).square().mean().backward()
        optimizer.step()
    return model


@on_ranks(4)
def test_experts_on_a_mesh_of_their_own_train_as_with_torchs_class() -> None:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    everyone, inner = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)), world["efsdp"]
    # As torchtitan has it: experts are cut along dim 1 where there are fewer of them than ranks.
    for count, dim, info in ((4, 0, FSDPMeshInfo(inner, 0)), (1, 1, HSDPMeshInfo(world, 1, 0))):

        def placement_fn(block: Mixture, info: Any = info, dim: int = dim) -> Any:
            experts, whole = set(block.experts.parameters()), FSDPMeshInfo(everyone, 0)
            return lambda p: (
                ShardPlacementResult(Shard(dim), info) if p in experts else ShardPlacementResult(None, whole)
            )

        torch.manual_seed(0)
        model = nn.Sequential(Mixture(count), Mixture(count))
        plain = copy.deepcopy(model)
        ours: Any = train(model, fully_shard, placement_fn, mesh=everyone)
        theirs: Any = train(plain, torchs.fully_shard, placement_fn, mesh=everyone)
        assert ours[0].experts.up.placements == theirs[0].experts.up.placements
        assert_same(ours, theirs, REORDERED, f"{count} experts, {type(info).__name__}")


@on_ranks(2)
def test_policies_of_torch_are_followed() -> None:
    options = {
        "mp_policy": torchs.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
        "offload_policy": torchs.CPUOffloadPolicy(pin_memory=False),
    }
    for given in (options, {"offload_policy": torchs.OffloadPolicy()}):
        torch.manual_seed(0)
        model = nn.Sequential(Mixture(3), Mixture(3))
        plain = copy.deepcopy(model)
        ours = train(model, fully_shard, lambda _: None, **given)
        assert_same(ours, train(plain, torchs.fully_shard, lambda _: None, **given), EXACT)

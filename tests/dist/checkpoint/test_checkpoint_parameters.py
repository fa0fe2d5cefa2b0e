"""Parameters that differ between ranks which hold the same part of them: a checkpoint has one value, so the save is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardwise import ZeroRedundancyOptimizer, fully_shard, replicate
from shardwise.checkpoint import CheckpointError, finish, save


class Net(nn.Module):
    """With parameters that are uneven, empty, tied, frozen, scalar, and of other dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 5)
        self.short = nn.Parameter(torch.randn(7, 3).bfloat16())
        self.tied = self.linear
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.gap = nn.Parameter(torch.ones(1, 2)[:, 0])  # one element, whose stride is 2
        self.frozen = nn.Parameter(torch.randn(300, 2).t(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + (x @ self.short.float().t()).sum() + self.frozen.sum() + self.empty.sum()


def step(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD([param for param in model.parameters() if param.grad is not None], lr=0.1).step()


def refused(folder: Path, model: nn.Module, wait: bool = True) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(folder, {"model": model}, step=1, wait=wait)
        finish(folder)
    assert not list(folder.glob("step-*"))
    return str(caught.value)


@on_ranks(4)
@pytest.mark.parametrize("wait", [True, False])
def test_columns_of_each_rank_in_plain_tensors(tmp_path: Path, wait: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(Net(seed=mesh["tp"].get_local_rank()), mesh=mesh["dp"])
    step(model)
    text = refused(tmp_path, model, wait)
    assert re.search(r"model/\w+[\w.]* and \d more; rank 0 and rank 1 have different values", text)
    save(tmp_path / mesh["tp"].get_coordinate().__str__(), {"model": model}, step=1, group=mesh["dp"].get_group())


@on_ranks(2)
def test_plain_parameters_that_differ(tmp_path: Path) -> None:
    assert "rank 0 and rank 1" in refused(tmp_path, Net(seed=dist.get_rank()))
    one = Net(seed=0)
    with torch.no_grad():
        one.scale += dist.get_rank()
    assert "model/scale; rank 0 and rank 1" in refused(tmp_path, one)


@on_ranks(2)
def test_ignored_parameters_that_differ_beside_shards(tmp_path: Path) -> None:
    model = Net(seed=0)
    with torch.no_grad():
        model.scale += dist.get_rank()
    fully_shard(model, ignored_params={model.scale})
    assert "model/scale; rank 0 and rank 1" in refused(tmp_path, model)


@on_ranks(4)
@pytest.mark.parametrize("api", [fully_shard, replicate, DistributedDataParallel])
def test_equal_parameters_are_saved(tmp_path: Path, api: Callable[[nn.Module], nn.Module]) -> None:
    model = api(Net(seed=0))
    step(model)
    assert save(tmp_path, {"model": model}, step=1) is not None


@on_ranks(4)
def test_replicas_of_shards_are_compared(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Net(seed=0), mesh=mesh)
    step(model)
    save(tmp_path / "alike", {"model": model}, step=1)
    model.set_requires_all_reduce(False)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():  # as an optimizer of each replica alone would (local SGD)
        model.linear.weight.to_local().add_(mesh["replicate"].get_local_rank())
    assert "model/linear.weight; rank 0 and rank 2" in refused(tmp_path, model)


@on_ranks(2)
def test_what_differs_by_design_is_saved(tmp_path: Path) -> None:
    model = DistributedDataParallel(Net(seed=0), find_unused_parameters=True)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, mixed_dtypes=True, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    zero.step()
    own = {"noise": torch.randn(3) + dist.get_rank()}
    assert save(tmp_path, {"model": model, "optimizer": zero, "own": own}, step=1) is not None


@on_ranks(2)
def test_a_part_of_a_larger_tensor_in_a_plain_one(tmp_path: Path) -> None:
    """``torch.distributed.checkpoint.CheckpointableTensor`` of torch 2.15: a tensor with these attributes."""
    part = torch.full((2, 3), float(dist.get_rank()))
    part.global_shape, part.global_offsets = (4, 3), ((2 * dist.get_rank(), 0),)
    part.local_offsets, part.local_sizes = ((0, 0),), ((2, 3),)
    with pytest.raises(CheckpointError, match="rows/weight: found a part of a larger tensor"):
        save(tmp_path, {"rows": {"weight": part}}, step=1)

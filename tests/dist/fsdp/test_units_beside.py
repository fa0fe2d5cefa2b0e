"""Parameters of one call on two meshes are two units, which are used together and end together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import ConfigError, FSDPMeshInfo, ShardPlacementResult, clip_grad_norm_, fully_shard

MICROBATCHES = 2


class Block(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.dense, self.expert, self.recomputes = nn.Linear(6, 5), nn.Linear(5, 6), recomputes

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.expert(self.dense(x).tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)


def plain(recomputes: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(recomputes) for _ in range(3)]).double()


def sharded(meshes: DeviceMesh, recomputes: bool = False, **options: Any) -> Any:
    """Return the model whose experts are sharded over two ranks each, and everything else over four."""
    model, everyone = plain(recomputes), init_device_mesh("cpu", (4,))
    experts = {param for name, param in model.named_parameters() if "expert" in name}

    def place(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), FSDPMeshInfo(meshes["inner"] if param in experts else everyone, 0))

    for block in model:
        fully_shard(block, mesh=everyone, shard_placement_fn=place, **options)
    return fully_shard(model, mesh=everyone, **options)


def inputs(step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def step_of(model: Any, optimizer: torch.optim.Optimizer, number: int, reference: bool, group: Any) -> None:
    for micro in range(MICROBATCHES):
        if reference:
            model(inputs(number, micro)).square().sum().backward()
        else:
            with shardwise.policy(model, sync=micro == MICROBATCHES - 1):
                model(inputs(number, micro)).square().sum().backward()
    for name, param in model.named_parameters() if reference else ():
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG, group=group if "expert" in name else None)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("reshard", "recomputes"), [pytest.param(None, False, marks=pytest.mark.exhaustive), (True, True), (False, False)]
)
@on_ranks(4)
def test_they_train_as_the_plain_model_and_so_does_a_copy(reshard: bool | None, recomputes: bool) -> None:
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    group, other = meshes["inner"].get_group(), plain()
    model = sharded(meshes, recomputes, reshard_after_forward=reshard)
    mine, its = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, other))
    for number in range(4):
        if number == 2:  # a state dict between two steps, parameters by hand, and a copy that goes on
            model.load_state_dict(model.state_dict())
            model[1].unshard()
            assert model[1].expert.weight.shape == (6, 5)
            model[1].reshard()
            copied = copy.deepcopy(model)
            state = copy.deepcopy(mine.state_dict())
            model, mine = copied, torch.optim.SGD(copied.parameters(), lr=0.05, momentum=0.9)
            mine.load_state_dict(state)
        step_of(model, mine, number, False, group)
        step_of(other, its, number, True, group)
        for (name, param), want in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(
                param.full_tensor(), want, msg=lambda text, at=f"{number} {name}": f"{at} {text}"
            )


@on_ranks(4)
def test_both_are_prefetched_and_described() -> None:
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = sharded(meshes)
    rows = [row.name for row in shardwise.describe_units(model).rows]
    assert rows == ["", "0", "0 (mesh 2)", "1", "1 (mesh 2)", "2", "2 (mesh 2)"]
    for _ in range(2):
        model(inputs(0, 0)).square().sum().backward()
    with shardwise.trace(model) as trace:
        model(inputs(0, 0)).square().sum().backward()
    order = [f"{call.op.value} {call.unit}" for call in trace.calls]
    with pytest.raises(ValueError, match="not supported with multiple param groups"):
        model[0].set_custom_all_gather(None)
    with pytest.raises(ConfigError, match="differ between ranks"):  # each half of the ranks has experts of its own
        clip_grad_norm_(model.parameters(), 0.01)
    for block in (1, 2):
        begun, before = order.index(f"unshard {block} (mesh 2)"), order.index(f"wait {block - 1} (mesh 2)")
        assert before < begun < order.index(f"wait {block}"), order
    reduced = [call.unit for call in trace.calls if call.op.value == "reduce"]
    # The inputs of the first block need no gradient, so its units end with the whole backward, the last one first.
    assert reduced == ["2", "2 (mesh 2)", "1", "1 (mesh 2)", "0 (mesh 2)", "0"]

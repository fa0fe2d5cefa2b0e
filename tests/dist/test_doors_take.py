"""What the APIs are given: modules in any order, classes, models that another API has taken."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.compare import comparable, full
from helpers.inside import engine_of
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import get_overloads

from shardwise import (
    ConfigError,
    ShardedOptimizer,
    StateError,
    ZeroRedundancyOptimizer,
    fully_shard,
    replicate,
    shard_model,
)
from shardwise.testing.models import Block


class Odd(nn.Module):
    """Uneven, one row, no elements, transposed, frozen, unused."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.randn(1, 6))
        self.empty = nn.Parameter(torch.randn(0, 6))
        self.turned = nn.Parameter(torch.randn(6, 6).t())
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned + self.tiny.sum(0) + self.empty.sum() + self.frozen


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        Block(6, 9), nn.Linear(6, 6, bias=False), Odd(), Block(6, 5).double().float(), nn.Linear(6, 6, bias=False)
    )
    model[4].weight = model[1].weight
    return model


OUTER = ("same", "other dim", "replicate", "older replicate", "unsharded by hand")


@on_ranks()
@pytest.mark.parametrize(("outer", "num_ranks"), [("other mesh", 4), *((outer, 2) for outer in OUTER)])
def test_the_root_may_be_sharded_before_its_blocks(outer: str) -> None:
    """Units that are made in the wrong order are those of the right one, and train as one process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model, plain = make(), make()
    inner = {"shard_placement_fn": lambda param: Shard(param.ndim - 1)} if outer == "other dim" else {}
    if outer == "older replicate":
        replicate(model, device_ids=None)
    elif outer == "replicate":
        replicate(model)
    elif outer == "other mesh":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")))
    elif outer == "unsharded by hand":
        fully_shard(model).unshard()
    else:
        fully_shard(model)
    aliases = model.state_dict()
    early = torch.optim.SGD(model.parameters(), lr=0.1) if outer == "same" else None
    for block in (model[0], model[2], model[3]):
        fully_shard(block, **inner)
    optimizers = [early or torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)]
    for number in range(3):
        whole = torch.randn(2 * size, 6, generator=torch.Generator().manual_seed(number))
        model(whole.chunk(size)[rank]).square().mean().backward()
        plain(whole).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, value), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(*comparable(value, expected), msg=lambda text, name=name: name + text)
    if outer == "same":
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(full(aliases[name]), value)
    units = {unit.name: {param.fqn for param in unit.params} for unit in engine_of(model).units}
    names = {name for name, _ in plain.named_parameters()}
    assert units[""] == {name for name in names if name.startswith(("1.", "4."))}
    for block in "023":
        assert units[block] == {name for name in names if name.startswith(f"{block}.")}
    with pytest.raises(StateError, match="before the first forward"):
        fully_shard(model[0].up)


@on_ranks(2)
def test_the_root_may_be_sharded_first_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(6, 9), Block(6, 5))
    fully_shard(model)
    for block in model:
        fully_shard(block)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    model(torch.ones(2, 6)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_weight_that_the_root_uses_too_stays_with_the_root() -> None:
    """A block whose weight the root uses too computes with the root's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    plain = copy.deepcopy(model)
    fully_shard(model)
    fully_shard(model[1])
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    model(x).sum().backward()
    plain(x).sum().backward()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(*comparable(left.grad, right.grad))


@on_ranks(2)
def test_what_apis_refuse() -> None:
    for api in (fully_shard, replicate):
        with pytest.raises(ConfigError, match=r"found the class Block\. Make an instance"):
            api(Block)
        with pytest.raises(ConfigError, match="found 3 of type int"):
            api([nn.Linear(2, 2), 3])
        with pytest.raises(ConfigError, match="an empty list"):
            api([])
    with pytest.raises(ConfigError, match="takes the root module"):
        shard_model(Block)
    model = fully_shard(Block(6, 5))
    with pytest.raises(RuntimeError, match="[Ss]harding|sharded"):  # of DTensor, in the broadcast of parameters
        DistributedDataParallel(model)
    with pytest.raises(ConfigError, match="sharded"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    ShardedOptimizer(model.named_parameters(), torch.optim.Adam)


@on_ranks(2)
def test_a_method_that_is_not_forward_and_not_registered_raises_the_error_of_dtensor() -> None:
    class WithMethod(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    for api in (fully_shard, replicate, shard_model):
        model = api(WithMethod(6, 4))
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            model.encode(torch.ones(2, 6))


def test_type_checkers_see_what_apis_return() -> None:
    # As text: what else the signatures name need not be there at run time.
    assert [each.__annotations__["return"] for each in get_overloads(fully_shard)] == ["FSDPModule", "list[FSDPModule]"]
    assert [each.__annotations__["return"] for each in get_overloads(replicate)] == [
        "ReplicateModule",
        "list[ReplicateModule]",
    ]
    assert shard_model.__annotations__["return"] == "FSDPModule"

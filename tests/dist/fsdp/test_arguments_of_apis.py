"""What the APIs are given: modules in the wrong order, classes, models that another API has taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import Block
from helpers.ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import (
    ConfigError,
    ShardedOptimizer,
    StateError,
    ZeroRedundancyOptimizer,
    fully_shard,
    replicate,
    shard_model,
)


@on_ranks(2)
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_an_outer_module_is_not_sharded_first(api: Any) -> None:
    model = nn.Sequential(Block(6, 9), Block(6, 5))
    api(model)
    for _ in range(2):
        with pytest.raises(StateError, match=r"weight belongs to the unit of an outer module.*inner modules before"):
            api(model[0])
    model(torch.ones(2, 6)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_what_apis_refuse() -> None:
    for api in (fully_shard, replicate):
        with pytest.raises(ConfigError, match=r"takes a module or a list of modules, found <class .*Block"):
            api(Block)
        with pytest.raises(ConfigError, match="found 3 of type int"):
            api([nn.Linear(2, 2), 3])
        with pytest.raises(ConfigError, match=r"found \[\] of type list"):
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

"""torch's own composable APIs around modules that ours shard, and inside of them: each leaves alone what the other manages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import comparable
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed._composable import replicate as torchs_replicate
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from shardwise import ConfigError, fully_shard, replicate, shard_model


def _in_older_way(module: nn.Module) -> Any:
    return replicate(module, device_ids=None)


def _torchs_fully_shard(module: nn.Module) -> Any:
    return torchs_fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


OURS: list[Callable[[Any], Any]] = [fully_shard, shard_model, replicate, _in_older_way]
TORCHS: list[Callable[[Any], Any]] = [torchs_replicate, _torchs_fully_shard]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 5), nn.Linear(5, 1))
    model[1].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(("ours", "theirs", "is_inside"), checkered(OURS, TORCHS, [True, False]))
@on_ranks(2)
def test_each_trains_what_it_was_called_on_as_one_process_does(
    ours: Callable[[Any], Any], theirs: Callable[[Any], Any], is_inside: bool
) -> None:
    model, plain = _model(), _model()
    inner, outer = (ours, theirs) if is_inside else (theirs, ours)
    inner(model[1])
    outer(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
    for step in range(3):
        batches = torch.randn(size, 4, 8, generator=torch.Generator().manual_seed(step))
        expected = plain(batches[rank]).square().mean()
        loss = model(batches[rank]).square().mean()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        torch.stack([plain(each).square().mean() for each in batches]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs_ in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(*comparable(mine, theirs_))


@pytest.mark.parametrize("ours", OURS)
@on_ranks(2)
def test_torchs_registry_has_every_module_of_a_unit(ours: Callable[[Any], Any]) -> None:
    model = ours(_model())
    if ours is fully_shard:
        pair = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
        assert all("fully_shard" in _get_registry(each) for each in pair)
    for each in (model, copy.deepcopy(model)):
        assert {"fully_shard", "replicate"} <= set(_get_registry(each))
    with pytest.raises((AssertionError, RuntimeError)):
        torchs_replicate(model)
    assert fully_shard.state(model) is not None


@pytest.mark.parametrize("theirs", TORCHS)
@pytest.mark.parametrize("ours", OURS)
@on_ranks(2)
def test_a_module_that_torchs_own_manages_is_refused(ours: Callable[[Any], Any], theirs: Callable[[Any], Any]) -> None:
    model = theirs(_model())
    with pytest.raises(ConfigError, match="torch's own .* manages the parameters of this .*; call one of the two"):
        ours(model)

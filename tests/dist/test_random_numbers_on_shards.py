"""Random operations on shards after sharding: every shard gets numbers of its own, with one seed on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models import Block
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from shardwise import fully_shard, replicate, shard_model

SHAPE = 8, 6


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(3)


def _noise(param: torch.Tensor) -> torch.Tensor:
    return param.zero_().add_(torch.randn_like(param))


DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda param: param.normal_(),
    "uniform_": lambda param: param.uniform_(-1, 1),
    "bernoulli_": lambda param: param.bernoulli_(0.5),
    "trunc_normal_": nn.init.trunc_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "generator": lambda param: param.normal_(generator=_generator()),
    "data": lambda param: param.data.normal_(),
    "noise": _noise,
    "rand_like": lambda param: param.copy_(torch.rand_like(param)),
    "randint_like": lambda param: param.copy_(torch.randint_like(param, 1000)),
    "dropout": lambda param: param.copy_(nn.functional.dropout(torch.ones_like(param), 0.5)),
}


def _all_differ(param: torch.Tensor) -> None:
    assert isinstance(param, DTensor)
    shards = [each for each in param.full_tensor().chunk(dist.get_world_size()) if each.numel()]
    assert not any(torch.equal(shards[0], each) for each in shards[1:])


@pytest.mark.parametrize("what", DRAWS)
@on_ranks(2, 4)
def test_shards_are_drawn_unlike_with_one_seed(what: str) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(SHAPE[1], SHAPE[0] + 1, bias=False))  # uneven
    values: list[torch.Tensor] = []
    for _ in range(2):
        for twice in range(2):
            torch.manual_seed(5)
            for _ in range(twice + 1):
                with torch.no_grad():
                    DRAWS[what](model.weight)
            _all_differ(model.weight)
            values.append(model.weight.full_tensor().clone())
            states = [torch.empty_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
            dist.all_gather(states, torch.get_rng_state())
            # Ranks go on alike; trunc_normal_ draws again as often as the values of this rank need it.
            assert what == "trunc_normal_" or all(torch.equal(each, states[0]) for each in states)
    assert torch.equal(values[0], values[2])  # the seed decides
    assert torch.equal(values[1], values[3])
    assert torch.equal(values[0], values[1]) == (what == "generator")


@pytest.mark.parametrize("api", [fully_shard, shard_model])
@on_ranks(2)
def test_layers_are_initialized_again_before_and_between_steps(api: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = api(nn.Sequential(Block(6, 6), Block(6, 6), nn.Linear(6, 6)))
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for layer in layers:
            layer.reset_parameters()
            _all_differ(layer.weight)
        model(torch.ones(2, 6)).square().mean().backward()
        for layer in layers:
            assert torch.linalg.matrix_rank(layer.weight.full_tensor().detach()) == min(layer.weight.shape)
            assert layer.weight.grad is not None
            noise = torch.randn_like(layer.weight.grad)
            _all_differ(noise)
            layer.weight.grad.add_(noise)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(4)
def test_replicas_are_drawn_alike_and_every_axis_of_shards_counts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 4), mesh=mesh)
    model.reset_parameters()
    assert isinstance(model.weight, DTensor)
    mine = model.weight.to_local().detach()
    every = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(every, mine)
    assert torch.equal(every[0], every[2])
    assert torch.equal(every[1], every[3])
    assert not torch.equal(every[0], every[1])
    both = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)]).normal_().full_tensor()
    parts = [part for rows in both.chunk(2) for part in rows.chunk(2, 1)]
    assert not any(torch.equal(parts[i], parts[j]) for i in range(4) for j in range(i))
    whole = replicate(nn.Linear(6, 4)).weight
    for generator in (None, _generator()):
        torch.manual_seed(1)
        with torch.no_grad():
            whole.normal_(generator=generator)
        torch.manual_seed(1)
        plain = torch.empty(4, 6).normal_(generator=None if generator is None else _generator())
        assert isinstance(whole, DTensor)
        assert torch.equal(whole.to_local(), plain)


@on_ranks(2)
def test_ranks_with_seeds_of_their_own_draw_unlike_and_a_failed_draw_changes_nothing() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 4))
    torch.manual_seed(dist.get_rank())
    model.reset_parameters()
    _all_differ(model.weight)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), torch.no_grad():
        model.weight.uniform_(1, -1)
    assert torch.equal(before, torch.get_rng_state())

"""Random operations on shards after sharding: the values of one process, with one seed on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.models import Block
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, init_device_mesh, rand

from shardwise import fully_shard, replicate, shard_model


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(3)


DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda param: param.normal_(),
    "uniform_": lambda param: param.uniform_(-1, 1),
    "bernoulli_": lambda param: param.bernoulli_(0.5),
    "log_normal_": lambda param: param.log_normal_(),
    "exponential_": lambda param: param.exponential_(2.0),
    "geometric_": lambda param: param.geometric_(0.3),
    "cauchy_": lambda param: param.cauchy_(),
    "random_": lambda param: (param.random_(), param.random_(7), param.random_(3, 9)),
    # Wider limits would be a limit: DTensor answers `mask.any()` per rank, so ranks would draw again unlike.
    "trunc_normal_": lambda param: nn.init.trunc_normal_(param, std=0.02),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "generator": lambda param: param.normal_(generator=_generator()),
    "exponential_ of a generator": lambda param: param.exponential_(generator=_generator()),
    "data": lambda param: param.data.normal_(),
    "noise": lambda param: param.add_(torch.randn_like(param)),
    "rand_like": lambda param: param.copy_(torch.rand_like(param)),
    "randint_like": lambda param: param.copy_(torch.randint_like(param, 1000)),
    "bernoulli": lambda param: param.copy_(torch.bernoulli(param.abs().clamp(0, 1))),
    "dropout": lambda param: param.copy_(nn.functional.dropout(param, 0.5)),
}


def _layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 9, dtype=dtype)  # uneven shards, and with 4 ranks an empty one


def _draw(what: str, layer: nn.Linear) -> torch.Tensor:
    """Draw twice; return the state of the generator afterwards."""
    torch.manual_seed(5)
    with torch.no_grad():
        for _ in range(2):
            for param in layer.parameters():
                if param.ndim > 1 or what not in ("kaiming_uniform_", "xavier_normal_"):
                    DRAWS[what](param)
    return torch.get_rng_state()


def _same(sharded: nn.Module, plain: nn.Module) -> None:
    for (name, param), expected in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        whole = full(param)
        assert torch.equal(whole, expected), name


@pytest.mark.parametrize(("what", "num_ranks"), checkered(DRAWS, [4, 2]))
@on_ranks()
def test_a_random_operation_gives_the_values_of_one_process(what: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain, sharded = _layer(dtype), fully_shard(_layer(dtype))
        assert torch.equal(_draw(what, sharded), _draw(what, plain))  # what is drawn next is the same, too
        _same(sharded, plain)


@pytest.mark.parametrize("api", [fully_shard, shard_model])
@on_ranks(2)
def test_layers_are_initialized_again_before_and_between_steps(api: Callable[..., Any]) -> None:
    models: list[nn.Module] = []
    for sharded in (True, False):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(Block(6, 6), Block(6, 6), nn.Linear(6, 6))
        if sharded:
            model = api(model)
        layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            for layer in layers:
                layer.reset_parameters()
            model(torch.ones(2, 6)).square().mean().backward()
            for layer in layers:
                assert layer.weight.grad is not None
                layer.weight.grad.add_(torch.randn_like(layer.weight.grad))
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    for param, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert isinstance(param, DTensor)
        torch.testing.assert_close(param.full_tensor(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(1), Replicate()],
        [Replicate(), Shard(0)],
    ],
    ids=str,
)
@on_ranks(4)
def test_a_tensor_on_several_axes_is_drawn_as_one(placements: list[Placement]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for shape in ((9, 7), (3, 5, 2)):
        torch.manual_seed(1)
        drawn = distribute_tensor(torch.zeros(shape), mesh, placements).normal_()
        made = rand(shape, device_mesh=mesh, placements=placements)
        torch.manual_seed(1)
        assert torch.equal(drawn.full_tensor(), torch.empty(shape).normal_())
        assert torch.equal(made.full_tensor(), torch.rand(shape))


@on_ranks(4)
def test_replicas_of_every_kind_are_drawn_alike() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = _layer()
    for sharded in (fully_shard(_layer(), mesh=mesh), replicate(_layer())):
        assert torch.equal(_draw("normal_", sharded), _draw("normal_", plain))
        _same(sharded, plain)


@on_ranks(2)
def test_ranks_with_seeds_of_their_own_draw_unlike_and_a_failed_draw_changes_nothing() -> None:
    model = fully_shard(_layer())
    torch.manual_seed(dist.get_rank())
    model.reset_parameters()
    assert isinstance(model.weight, DTensor)
    rows = model.weight.full_tensor()
    assert not torch.equal(rows[:4], rows[5:])
    kept, before = model.weight.full_tensor().clone(), torch.get_rng_state()
    with pytest.raises(RuntimeError), torch.no_grad():
        model.weight.uniform_(1, -1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(model.weight.full_tensor(), kept)

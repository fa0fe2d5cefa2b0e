"""``torch.func``'s transforms over the inputs of a sharded module: what they say of the module before sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import comparable
from helpers.ranks import on_ranks
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from shardwise import MixedPrecisionPolicy, fully_shard, replicate, shard_model


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Sequential(nn.Linear(7, 3, bias=False), nn.Tanh())
    )


def _per_block(model: nn.Sequential, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


APIS: dict[str, Callable[[nn.Sequential], Any]] = {
    "fully_shard": _per_block,
    "resharded": lambda model: _per_block(model, reshard_after_forward=True),
    "full": lambda model: _per_block(model, reshard_after_forward=False),
    "smaller mesh": lambda model: _per_block(model, reshard_after_forward=2),
    "mixed": lambda model: _per_block(model, mp_policy=MixedPrecisionPolicy(torch.float64, torch.float64)),
    "shard_model": shard_model,
    "replicate": replicate,
    "replicate, older": lambda model: replicate(model, device_ids=None),
}

START = {api: place % 2 for place, api in enumerate(APIS)}  # an API runs every second program

ALIKE = ("resharded", "full", "smaller mesh")  # what sharding after forward changes, other tests check
CASES = [pytest.param(api, marks=[pytest.mark.exhaustive] * (api in ALIKE)) for api in APIS]

Program = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]
PROGRAMS: dict[str, Program] = {
    "jacrev": lambda run, x: jacrev(run)(x),
    "jacfwd": lambda run, x: jacfwd(run)(x),
    "jvp": lambda run, x: jvp(run, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda run, x: vmap(run)(x),
    "grad": lambda run, x: grad(lambda rows: run(rows).square().sum())(x),
    "grad per sample": lambda run, x: vmap(grad(lambda row: run(row).square().sum()))(x),
    "hessian": lambda run, x: hessian(lambda rows: run(rows).square().sum())(x),
}


def _first_and_later(api: Callable[[nn.Sequential], Any], program: Program) -> None:
    """Transform a model in its first forward, train it, and transform it again."""
    x, plain, model = torch.linspace(-1, 1, 10).view(2, 5), _model(), _model()
    model = api(model) or model
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (plain, model)]
    for _ in range(2):
        for run, expected in (
            (model, program(plain, x)),
            (lambda rows: functional_call(model, {}, (rows,)), program(plain, x)),
        ):
            torch.testing.assert_close(program(run, x).to(x.dtype), expected, rtol=1e-5, atol=1e-6)
        for trained, optimizer in zip((plain, model), optimizers, strict=True):
            trained(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(*comparable(mine, expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("api", CASES)
@on_ranks(2)
def test_a_transform_over_the_inputs_of_a_model_is_that_of_one_process(api: str) -> None:
    for name, program in list(PROGRAMS.items())[START[api] :: 2]:
        try:
            _first_and_later(APIS[api], program)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "jvp": lambda net, x: sum(part.square().mean() for part in jvp(net, (x,), (torch.ones_like(x),))),
    "the value of a jvp": lambda net, x: jvp(net, (x,), (torch.ones_like(x),))[0].square().mean(),
    "the tangent of a jvp": lambda net, x: jvp(net, (x,), (torch.ones_like(x),))[1].square().mean(),
    "a jvp before a forward": lambda net, x: (
        jvp(net, (x,), (torch.ones_like(x),))[1].square().mean() + net(x).square().mean()
    ),
    "a jvp after a forward": lambda net, x: (
        net(x).square().mean() + jvp(net, (x,), (torch.ones_like(x),))[1].square().mean()
    ),
    "vmap": lambda net, x: vmap(lambda row: net(row).square().sum())(x).mean(),
    "vmap after a forward": lambda net, x: net(x).square().mean() + vmap(lambda row: net(row).square().sum())(x).mean(),
    "the vjp of a value": lambda net, x: _with_vjp(net, x),
}


def _with_vjp(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, pull_back = vjp(net, x)
    return y.square().mean() + pull_back(torch.ones_like(y))[0].square().mean()


@pytest.mark.parametrize("api", CASES)
@on_ranks(2)
def test_a_loss_over_transformed_outputs_trains_as_on_one_process(api: str) -> None:
    x = torch.linspace(-1, 1, 10).view(2, 5)
    for name, loss in list(LOSSES.items())[START[api] :: 2]:
        plain, model = _model(), _model()
        model = APIS[api](model) or model
        for step in range(3):
            for net in (plain, model):
                net.zero_grad()
                loss(net, x).backward()
            for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None, f"{name}, step {step}"
                assert torch.allclose(*comparable(mine.grad, expected.grad), 1e-5, 1e-6), f"{name}, step {step}"

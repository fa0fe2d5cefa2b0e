"""Parameters on the smaller mesh of ``reshard_after_forward``: what is done to them reaches the shards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.compare import average_gradients, full
from helpers.ranks import on_ranks
from helpers.trains_alike import batch
from torch import nn

from shardwise import StateError, fully_shard


def _freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def _zero(model: nn.Module) -> None:
    model.zero_grad()


def _zero_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def _nothing(model: nn.Module) -> None:
    pass


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1))


def _sharded() -> nn.Sequential:
    model = _model()
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, reshard_after_forward=2)
    return model


@on_ranks(4)
@pytest.mark.parametrize("change", [_nothing, _freeze, _zero, _zero_in_place])
def test_changes_between_forward_and_backward_reach_the_shards(change: Callable[[nn.Module], None]) -> None:
    model, plain = _sharded(), _model()
    sharded = list(model.parameters())
    for each in (model, plain):
        each(batch(0)).square().mean().backward()
    average_gradients(plain)
    for each in (model, plain):
        loss = each(batch(1)).square().mean()
        if each is model:
            registered = list(model.parameters())
            assert all(now is not shard for now, shard in zip(registered[:-2], sharded[:-2], strict=True))
            assert isinstance(copy.deepcopy(registered[0]), nn.Parameter)
        change(each)
        if each is plain:
            kept = [param.grad for param in plain.parameters()]
            before = [None if gradient is None else gradient.clone() for gradient in kept]
            for param in plain.parameters():
                param.grad = None
            loss.backward()
            average_gradients(plain)
            for param, gradient in zip(plain.parameters(), before, strict=True):
                param.grad = (
                    gradient if param.grad is None else param.grad if gradient is None else param.grad + gradient
                )
        else:
            loss.backward()
    for param, other in zip(sharded, plain.parameters(), strict=True):
        assert param.requires_grad is other.requires_grad
        assert (param.grad is None) is (other.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(full(param.grad), other.grad)


@on_ranks(4)
def test_hooks_on_them_are_named() -> None:
    model = _sharded()
    loss = model(batch(0)).square().mean()
    model[0].weight.register_hook(lambda gradient: gradient * 3)
    with pytest.raises(StateError, match=r"0\.weight .*or given a hook"):
        loss.backward()


@on_ranks(4)
def test_optimizers_are_not_built_of_them() -> None:
    model = _sharded()
    model(batch(0))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(StateError, match="was given the full form of 0.weight, or its form on a smaller mesh"):
        optimizer.step()


@on_ranks(4)
def test_parameters_after_a_forward_and_a_step_are_those_of_the_step() -> None:
    model, plain = _sharded(), _model()
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(batch(0)).square().mean().backward()
        if each is plain:
            average_gradients(plain)
        each(batch(1))  # no backward follows, so the parameters of the smaller mesh stay registered
        optimizer.step()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.detach()), other.detach())


@on_ranks(4)
@pytest.mark.parametrize("when", ["backward", "optimizer step"])
def test_writes_to_their_memory_are_named(when: str) -> None:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(batch(0)).square().mean()
    with torch.no_grad():
        model[0].weight.to_local().mul_(0.5)  # type: ignore[operator]
    with pytest.raises(StateError, match=r"0\.weight .*was written to, used in a loss or given a hook"):
        if when == "backward":
            loss.backward()
        else:
            optimizer.step()
    model.reset_iter_state()  # type: ignore[operator]
    model(batch(0)).square().mean().backward()


@on_ranks(4)
def test_losses_of_them_are_named() -> None:
    model = _sharded()
    loss = model(batch(0)).square().mean()
    weight: nn.Parameter = model[0].weight  # type: ignore[assignment]
    with pytest.raises(StateError, match="used in a loss or given a hook between forward"):
        (loss + full(weight.square().sum())).backward()

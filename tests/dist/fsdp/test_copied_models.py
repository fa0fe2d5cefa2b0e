"""A deep copy of a sharded model: what it takes along, and what it begins without."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_same, average_gradients, gradient_of
from helpers.ranks import FOUR, on_ranks
from torch import nn

from shardwise import fully_shard, replicate, shard_model


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _sharded() -> nn.Sequential:
    model = _model()
    for block in (model[0], model[2]):
        fully_shard(block)
    return fully_shard(model)


def _batch(number: int) -> torch.Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    return torch.randn(2 * size, 5, generator=torch.Generator().manual_seed(number)).chunk(size)[rank]


def _backward(model: nn.Module, number: int) -> None:
    model(_batch(number)).square().sum().backward()


def _reference(*numbers: int) -> nn.Sequential:
    model = _model()
    for number in numbers:
        _backward(model, number)
    average_gradients(model)
    return model


@on_ranks(2, FOUR)
def test_gradients_held_back_stay_with_the_model_and_its_copy_begins_without() -> None:
    model = _sharded()
    model.set_requires_gradient_sync(False)
    _backward(model, 0)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.set_requires_gradient_sync(True)
        _backward(each, 1)
    assert_same(model, _reference(0, 1))
    assert_same(copied, _reference(1))


@on_ranks(2)
def test_a_copy_reduces_by_the_users_rule() -> None:
    model = _sharded()
    model.set_requires_gradient_sync(False)
    copied = copy.deepcopy(model)
    _backward(copied, 0)
    assert all(gradient_of(param) is None for param in copied.parameters())
    copied.set_requires_gradient_sync(True)
    _backward(copied, 1)
    assert_same(copied, _reference(0, 1))


@on_ranks(1, 2)
def test_a_copy_begins_without_gradients_of_weights_that_another_unit_lends() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[0].weight = model[1].weight
    fully_shard(model[1])  # owns the weight, which is met in the other module first
    fully_shard(model)
    _backward(model, 0)
    copied = copy.deepcopy(model)
    assert all(param.grad is not None for param in model.parameters())
    assert all(param.grad is None for param in copied.parameters())


@pytest.mark.parametrize("shard", [fully_shard, shard_model, replicate])
@on_ranks(2)
def test_a_copy_ignores_the_parameters_that_the_model_ignores(shard: Callable[..., Any]) -> None:
    model = _model()
    shard(model, ignored_params=set(model[2].parameters()))
    for number in range(2):
        copied = copy.deepcopy(model)
        for net in (model, copied):
            _backward(net, number)
        assert_same(copied[0], _reference(number)[0])
        plain = _model()
        _backward(plain, number)
        for mine, expected in zip(copied[2].parameters(), plain[2].parameters(), strict=True):
            assert type(mine) is nn.Parameter
            torch.testing.assert_close(mine.grad, expected.grad)

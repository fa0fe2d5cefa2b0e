"""Averages of weights over sharded models, as torch and timm keep them, equal those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwise import fully_shard, replicate, shard_model


def make() -> nn.Sequential:
    """Return a model with uneven shards (5 rows), empty ones (1 row), and buffers of floats and of a count."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def per_layer(model: nn.Sequential) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


APIS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "fully_shard": per_layer,
    "shard_model": shard_model,
    "hsdp": lambda model: fully_shard(
        model, mesh=init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    ),
    "replicate": replicate,
    "replicate as ddp": lambda model: replicate(model, process_group=None),
    "tensor parallel": tensor_parallel,
}
SIZES = {api: 4 if api in ("hsdp", "tensor parallel") else 2 for api in APIS}  # two axes need four ranks


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))  # the same on all ranks: alike buffers


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_hand(average: nn.Module, model: nn.Module) -> None:
    for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mean.lerp_(value, 0.1) if mean.is_floating_point() else mean.copy_(value)


def evaluate(average: nn.Module) -> torch.Tensor:
    average.eval()
    with torch.no_grad():
        return average(batch(99))


def assert_average_is_that_of_one_process(
    wrap: Callable[[nn.Sequential], nn.Module],
    start: Callable[[nn.Module], nn.Module],
    update: Callable[[Any, nn.Module], None],
) -> None:
    plain = make()
    model = wrap(make())
    for each in (plain, model):
        each(batch(98))  # no backward follows, so parameters are unsharded when the average is made
    averages = start(plain), start(model)
    optimizers = [
        torch.optim.SGD([{"params": each} for each in module.parameters()], lr=0.1) for module in (plain, model)
    ]
    for step in range(3):
        for each, optimizer, average in zip((plain, model), optimizers, averages, strict=True):
            train(each, optimizer, step)
            with torch.no_grad():
                update(average, each)
    torch.testing.assert_close(full(evaluate(averages[1])), evaluate(averages[0]))
    found: Iterable[torch.Tensor] = averages[1].state_dict().values()
    for one, other in zip(found, averages[0].state_dict().values(), strict=True):
        torch.testing.assert_close(full(one), other)


@pytest.mark.parametrize(
    ("api", "num_ranks"),
    [
        *SIZES.items(),
        *(pytest.param(api, 6 - size, marks=pytest.mark.exhaustive) for api, size in SIZES.items()),
    ],
)
@on_ranks()
def test_averaged_model_of_torch(api: str) -> None:
    def start(model: nn.Module) -> nn.Module:
        return AveragedModel(model, avg_fn=lambda mean, value, _: mean.lerp(value, 0.1))

    assert_average_is_that_of_one_process(APIS[api], start, AveragedModel.update_parameters)


@pytest.mark.parametrize(
    ("api", "num_ranks"), [each for each in SIZES.items() if each[0] != "tensor parallel"]
)  # foreach takes tensors of one mesh
@on_ranks()
def test_averaged_model_of_torch_with_one_call_for_all_parameters(api: str) -> None:
    def start(model: nn.Module) -> nn.Module:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    assert_average_is_that_of_one_process(APIS[api], start, AveragedModel.update_parameters)


@pytest.mark.parametrize(("api", "num_ranks"), SIZES.items())
@on_ranks()
def test_lerp_of_each_entry_of_the_state(api: str) -> None:
    assert_average_is_that_of_one_process(APIS[api], copy.deepcopy, by_hand)

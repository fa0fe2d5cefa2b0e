"""Small models sharded in the usual way, and what this rank feeds them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from helpers.models import batch_for, build, units_of
from shardwise import fully_shard


def share(batch: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a batch that all ranks have drawn."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def batch(seed: int = 0, name: str = "plain") -> torch.Tensor:
    """Return this rank's four inputs for the model called ``name``."""
    return share(batch_for(name, seed, 4 * dist.get_world_size()))


def noise(seed: int, width: int) -> torch.Tensor:
    """Return this rank's four rows of ``width`` random numbers."""
    rows = 4 * dist.get_world_size()
    return share(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)))


def loss_of(model: nn.Module, seed: int = 0, name: str = "plain") -> torch.Tensor:
    return model(batch(seed, name)).square().mean()


def shard_units(model: nn.Module, name: str = "plain", **arguments: Any) -> Any:
    """Make a unit of each block of the model called ``name``, and one of the rest."""
    for module in units_of(name, model):
        fully_shard(module, **arguments)
    return fully_shard(model, **arguments)


def build_sharded(name: str = "plain", seed: int = 0, **arguments: Any) -> Any:
    return shard_units(build(name, seed), name, **arguments)


def step_on_drawn_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, unused: torch.Tensor | None = None
) -> None:
    """Step with gradients of places and seed alone, so that runs on any number of ranks are equal to the bit."""
    for index, param in enumerate(model.parameters()):
        if param is unused:
            continue
        gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * seed + index))
        if isinstance(param, DTensor):
            gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = gradient
    optimizer.step()
    optimizer.zero_grad()

"""A model whose parameters are of every kind, and a ZeRO optimizer for it."""

from typing import Any

import torch
import torch.distributed as dist

from shardwise import ZeroRedundancyOptimizer


def mixed_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 5, 3), torch.nn.Flatten(), torch.nn.Linear(180, 7), Scale())
    model[0].to(memory_format=torch.channels_last)
    return model


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor(0.5))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def loss_of_rank(model: torch.nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    noise = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return model(torch.randn(3, 2, 8, 8, generator=noise)).square().mean()


def zero_of(model: torch.nn.Module, partition: str, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition=partition, lr=0.05, **options)


class AnyOrder(torch.nn.Module):
    """Convolutions in channels_last (one with a single channel), a transposed matrix, sizes that divide by nothing, 0-d.

    torch's fused optimizers pair a parameter with its gradient and state by memory alone, whatever their strides say.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Conv2d(1, 7, 3).to(memory_format=torch.channels_last)
        self.second = torch.nn.Conv2d(7, 5, 3).to(memory_format=torch.channels_last)
        self.turned = torch.nn.Parameter(torch.rand(11, 80).t())
        self.cube = torch.nn.Parameter(torch.rand(3, 11, 2).permute(1, 2, 0))
        self.plain = torch.nn.Linear(6, 3)
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.wide = torch.nn.Parameter(torch.zeros(512, 513).t())  # fills DDP's first bucket, which holds 1 MiB

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x)))).flatten(1) @ self.turned
        x = torch.einsum("ni,ijk->njk", x, self.cube).flatten(1)
        return self.plain(x) * self.scale + self.wide[:3, :3].sum()


def images(seed: int) -> torch.Tensor:
    """Return a batch for :class:`AnyOrder`."""
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(seed))

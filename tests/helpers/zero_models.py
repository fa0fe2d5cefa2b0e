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


def average_gradients(model: torch.nn.Module) -> None:
    """Average the gradients over all ranks, as DistributedDataParallel does."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)


def zero_of(model: torch.nn.Module, partition: str, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition=partition, lr=0.05, **options)

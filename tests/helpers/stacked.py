"""Models of repeated blocks that hold what breaks sharding, for the tests of shard_model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from helpers.models import Block, Mixed, TiedModel
from shardwise import describe_units

BLOCK = 4 * sum(p.numel() for p in Block(7, 9).parameters())
HUGE = 10**9


class Stacked(nn.Module):
    """Blocks between an embedding-like and a head layer; ``order`` is the order in which they run."""

    def __init__(self, make: Callable[[], nn.Module], count: int, order: list[int] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(7, 3)
        self.order = list(range(count)) if order is None else order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def uneven() -> nn.Module:
    return Stacked(lambda: Block(7, 9), 5)


def mixed() -> nn.Module:
    return Stacked(lambda: nn.Sequential(Block(7, 3), Mixed(7)), 4)


def half_frozen() -> nn.Module:
    model = Stacked(lambda: Block(7, 9), 5)
    for block in model.blocks:
        block.up.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    model.stem.requires_grad_(False)
    return model


def larger_first() -> nn.Module:
    model = Stacked(lambda: Block(7, 9), 4)
    model.blocks[0] = Block(7, 15)
    return model


def tied() -> nn.Module:
    model = Stacked(lambda: Block(7, 9), 4)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[3].down.weight = model.blocks[0].down.weight
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def left_out() -> nn.Module:
    """One block is never used, one is used twice, and they run backwards."""
    return Stacked(lambda: Block(7, 9), 5, [4, 3, 1, 0, 3])


def checkpointed() -> nn.Module:
    model = Stacked(lambda: Block(7, 9), 4)
    for index in (0, 2, 3):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    return model


def checkpointed_and_frozen() -> nn.Module:
    model = half_frozen()
    for index in range(5):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    return model


def compiled() -> nn.Module:
    model = Stacked(lambda: Block(7, 9), 4)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.blocks[2].compile(backend="eager")
    return model


def tokens() -> nn.Module:
    return TiedModel(num_blocks=3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "uneven": uneven, "mixed": mixed, "larger-first": larger_first, "half-frozen": half_frozen, "tied": tied,
    "left-out": left_out, "checkpointed": checkpointed, "checkpointed-and-frozen": checkpointed_and_frozen,
    "tokens": tokens, "compiled": compiled,
}  # fmt: skip


def inputs(name: str, step: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    if name == "tokens":
        return torch.randint(0, 11, (4 * size,), generator=generator)
    return torch.randn(4 * size, 7, generator=generator)


def units(model: nn.Module) -> list[str]:
    return [row.name for row in describe_units(model).rows]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()

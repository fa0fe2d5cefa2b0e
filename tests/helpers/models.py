"""Small models with what breaks sharding: uneven, empty, tied, frozen, unused, scalar and mixed-dtype parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual MLP block; rows that no world size but 1 divides."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mixed(nn.Module):
    """One module whose parameters differ in dtype, size, layout and requires_grad."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tiny = nn.Parameter(torch.randn(1, width) * 0.1)
        self.strided = nn.Parameter((torch.randn(width, width) * 0.1).t())
        self.other_dtype = nn.Parameter((torch.randn(3, width) * 0.1).to(torch.float64))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5, 3))
        self.empty = nn.Parameter(torch.randn(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        x = self.scale * x + self.tiny + self.frozen
        return x @ self.strided + self.other_dtype.sum(0).to(x.dtype)


class TiedModel(nn.Module):
    """Token model whose embedding weight is its head's weight."""

    def __init__(self, width: int = 6, vocabulary: int = 11, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 2 * width + 1) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape: (batch,) tokens -> (batch, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain() -> nn.Module:
    """Return three uneven blocks."""
    return nn.Sequential(Block(7, 15), Block(7, 9), Block(7, 3))


def mixed() -> nn.Module:
    """Return blocks around a module of mixed parameters."""
    return nn.Sequential(Block(7, 15), Mixed(7), Block(7, 3))


def frozen() -> nn.Module:
    """Return blocks of which one is frozen and one half frozen."""
    model = nn.Sequential(Block(7, 15), Block(7, 9), Block(7, 3))
    model[1].requires_grad_(False)
    model[2].up.requires_grad_(False)
    return model


def matrices() -> nn.Module:
    """Return four uneven matrices: units of one parameter."""
    widths = (7, 61, 29, 31, 9)
    return nn.Sequential(*(nn.Linear(width, rows, bias=False) for width, rows in itertools.pairwise(widths)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain, "mixed": mixed, "frozen": frozen, "tied": TiedModel, "matrices": matrices,
}  # fmt: skip


def build(name: str, seed: int = 0) -> nn.Module:
    """Return the model called ``name`` with the same values on every rank."""
    torch.manual_seed(seed)
    return MODELS[name]()


def batch_for(name: str, seed: int, size: int) -> torch.Tensor:
    """Return ``size`` inputs, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + seed)
    if name == "tied":
        return torch.randint(0, 11, (size,), generator=generator)
    return torch.randn(size, 7, generator=generator)


def units_of(name: str, model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard before the root."""
    if name == "tied":
        assert isinstance(model, TiedModel)
        return list(model.blocks)
    return list(model.children())

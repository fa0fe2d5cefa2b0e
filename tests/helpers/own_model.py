"""A model that a user brings along, for ``--model-from``, and functions that return something else."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Bigram(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocabulary), by the last token alone."""

    def __init__(self, vocabulary: int = 256, width: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(vocabulary: int) -> nn.Module:
    return Bigram(vocabulary)


def build_with_dropout(vocabulary: int) -> nn.Module:
    model = Bigram(vocabulary)
    model.layers.append(nn.Dropout(0.3))
    return model


def build_narrow() -> nn.Module:
    return Bigram(100)


def build_differently_on_every_rank() -> nn.Module:
    model = Bigram()
    with torch.no_grad():
        model.head.bias.fill_(os.getpid())
    return model


def build_nothing() -> int:
    return 3


def build_with(size: int) -> nn.Module:
    return Bigram(size)


NO_FUNCTION = 1

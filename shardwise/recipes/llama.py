"""Llama shapes for plans: RMSNorm, rotary positions, grouped-query attention, SwiGLU; never trained here.

Source: Llama 3, arXiv 2407.21783, table 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes: ``layers`` blocks, ``width`` features, ``heads`` query and ``kv_heads`` key-value heads, ``hidden`` of the MLP."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128_256


LLAMAS: Mapping[str, LlamaShape] = MappingProxyType(
    {
        "llama-8b": LlamaShape(32, 4096, 32, 8, 14336),
        "llama-70b": LlamaShape(80, 8192, 64, 8, 28672),
        "llama-405b": LlamaShape(126, 16384, 128, 8, 53248),
    }
)


class _Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        narrow = shape.kv_heads * self.head_width
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, narrow, bias=False)
        self.value = nn.Linear(shape.width, narrow, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Shape: ``x`` (batch, time, width), ``turns`` (time, head_width) -> (batch, time, width)."""
        batch, time, _ = x.shape
        query, key, value = (
            layer(x).view(batch, time, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            _turned(query, turns), _turned(key, turns), value, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class _Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = _Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Shape: ``x`` (batch, time, width) -> the same."""
        x = x + self.attention(self.attention_norm(x), turns)
        inner = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    """Tokens in, logits of the next token out.

    Shape: (batch, time) int64 -> (batch, time, vocabulary).
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        exponents = torch.arange(0, self.head_width, 2, device=tokens.device, dtype=torch.float32) / self.head_width
        turns = torch.outer(positions, 500_000.0**-exponents)
        turns = torch.cat((turns, turns), dim=-1)
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))

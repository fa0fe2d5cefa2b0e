"""A small byte-level GPT in one file: pre-norm blocks, learned positions, causal attention, 256 outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.recipes.config import NUM_BYTES, ModelShape

# ---- Llama shapes for plans: RMSNorm, rotary positions, grouped-query attention, SwiGLU; never trained here.
# Source: Llama 3, arXiv 2407.21783, table 3.


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


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width).

    Query, key and value of a head are adjacent in the outputs of ``qkv``, so that any cut between heads is a cut
    between rows: with tensor parallelism each rank computes the heads of its rows.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        qkv = self.qkv(x).view(batch, time, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        query, key, value = qkv.unbind(0)  # each (batch, heads here, time, head_width)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    """Two linear layers with GELU, four times as wide in between."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Experts(nn.Module):
    """A mixture of MLPs: a router sends each position to ``top_k`` of them, and weights their outputs.

    Shape: (batch, time, width) -> the same.  Source: Switch Transformer, arXiv 2101.03961, without its auxiliary loss.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(MLP(shape) for _ in range(shape.experts))

    def forward(self, x: Tensor) -> Tensor:
        inputs = x.flatten(0, 1)
        weights, chosen = self.router(inputs).float().softmax(-1).topk(self.top_k)
        output = torch.zeros_like(inputs)
        for number in chosen.unique().tolist():  # ranks have different text, and so different experts
            position, place = (chosen == number).nonzero(as_tuple=True)
            weighted = self.experts[number](inputs[position]) * weights[position, place, None]
            output = output.index_add(0, position, weighted.to(output.dtype))
        return output.view_as(x)


class GPTBlock(nn.Module):
    """Attention and MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = Experts(shape) if shape.experts else MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes or tokens in, logits of the next one out.

    Shape: ``tokens`` (batch, time <= context) int64 in [0, vocabulary) -> (batch, time, vocabulary).
    """

    def __init__(self, shape: ModelShape, *, vocabulary: int = NUM_BYTES) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(GPTBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_gpt(shape: ModelShape, seed: int, *, vocabulary: int = NUM_BYTES) -> GPT:
    """Return a GPT whose weights depend only on ``shape`` and ``seed``, so that every rank builds the same one.

    Source: GPT-2 initialisation: normal(0, 0.02), outputs of residual branches scaled by 1/sqrt(2 * layers).
    """
    model = GPT(shape, vocabulary=vocabulary)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            nn.init.constant_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        is_residual = name.endswith(("attention.out.weight", "down.weight"))
        std = 0.02 / math.sqrt(2 * shape.layers) if is_residual else 0.02
        nn.init.normal_(parameter, std=std, generator=generator)
    return model


def next_byte_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte (or token), computed in fp32.  Shape: both (batch, time) int64 -> ()."""
    logits = logits_of(model(tokens), tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def logits_of(output: object, tokens: Tensor) -> Tensor:
    """Return the logits of a model for ``tokens``: its output, or the output's ``logits``.

    Raises: ConfigError for another shape than (batch, time, vocabulary).
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(output).__name__}"
        expected = ", ".join(map(str, tokens.shape))
        raise ConfigError(
            f"--model-from: the model returned {found} for tokens of shape ({expected}), expected logits of shape ({expected}, "
            "vocabulary), or something with such logits."
        )
    return logits


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Sequence[int], length: int, context: int, seed: int, device: torch.device
) -> list[int]:
    """Return ``prompt``, of one number or more, and ``length`` bytes or tokens sampled after it.

    All ranks must call it together, because each forward unshards parameters.  The number of forwards does not depend
    on the samples, so ranks stay in step even if their last bits differ.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    was_training = model.training
    model.eval()
    for _ in range(length):
        window = torch.tensor([text[-context:]], device=device)
        logits = logits_of(model(window), window)[0, -1].float().cpu() / 0.8
        text.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
    model.train(was_training)
    return text

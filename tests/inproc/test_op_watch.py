"""What the planner counts of operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.planner.hardware import flops_of


class Flops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found += [flops for flops in [flops_of(func, args, kwargs or {}, out)] if flops]
        return out


@pytest.mark.parametrize("num_key_heads", [4, 2, 1])
def test_attention_whose_heads_share_keys_counts_as_if_each_had_its_own(num_key_heads: int) -> None:
    batch, heads, length, size = 2, 4, 32, 16
    query = torch.randn(batch, heads, length, size, requires_grad=True)
    key, value = (torch.randn(batch, num_key_heads, length, size, requires_grad=True) for _ in range(2))
    with Flops() as flops:
        scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
    forward = 2 * 2 * batch * heads * length * length * size / 2  # two products, half of them masked
    assert flops.found == [forward, 2.5 * forward]

"""Units under reentrant checkpoints are resharded as soon as their recomputation's own backward has ended, in every step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.compare import assert_gradients, average_gradients
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard, shard_model

NUM_BLOCKS = 6
Counted = Callable[[], None]


class Block(nn.Module):
    """Two layers; ``kind`` says which of them have no gradient.  ``counted`` is called wherever a layer runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.kind = kind
        if kind in ("partly frozen", "frozen"):
            self.first.requires_grad_(False)
        if kind == "frozen":
            self.second.requires_grad_(False)
        self.counted: Counted = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counted()
        x = torch.tanh(self.first(x))
        return x if self.kind == "unused" else self.second(x)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(kind if number % 2 else "") for number in range(NUM_BLOCKS)])
        self.twice = kind == "twice"
        self.num_recomputed = 2 if kind == "others are not recomputed" else NUM_BLOCKS

    def forward(self, x: torch.Tensor, num_more_nodes: int) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=True) if number < self.num_recomputed else block(x)
        if self.twice:
            x = checkpoint(self.blocks[1], x, use_reentrant=True)
        for _ in range(num_more_nodes):  # another graph, as of another length
            x = x * 1.0
        return x.square().mean()


def num_full(model: Net) -> int:
    weights = [block.first.weight for block in model.blocks]
    return sum(not isinstance(weight, DTensor) and weight.untyped_storage().size() > 0 for weight in weights)


@pytest.mark.parametrize(
    ("kind", "order"),
    checkered(
        ["", "unused", "partly frozen", "frozen", "twice", "pairs", "others are not recomputed"],
        [(0, 0, 0, 1, 2), (3, 0, 3)],
    ),
)
@on_ranks(2)
def test_one_unit_is_full_at_a_time_in_every_backward(kind: str, order: tuple[int, ...]) -> None:
    model = Net(kind)
    plain = copy.deepcopy(model)
    if kind == "pairs":
        for start in range(0, NUM_BLOCKS, 2):
            fully_shard([*model.blocks[start : start + 2]])
        fully_shard(model)
    elif kind:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        shard_model(model, min_unit_bytes=0)
    most = 0

    def counted() -> None:
        nonlocal most
        most = max(most, num_full(model))

    for block in model.blocks:
        block.counted = counted
    for step, num_more_nodes in enumerate(order):
        torch.manual_seed(step)
        x = torch.randn(3, 6)
        for each in (model, plain):
            each.zero_grad()
            each(x.clone().requires_grad_(), num_more_nodes).backward()
        average_gradients(plain)
        assert_gradients(model, plain)
    assert most <= (2 if kind in ("pairs", "twice") else 1)

"""NF4 of torchao under LoRA: a frozen quantized base beside fp32 adapters, beside torch's own class and one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from helpers.compare import CLOSE, EXACT, assert_equal, full
from helpers.folders import folder_of_all
from helpers.ranks import on_ranks
from torch import nn

from shardwise import checkpoint, fully_shard

pytestmark = pytest.mark.clients
WIDTH = 128


class QLoraLinear(nn.Module):
    def __init__(self) -> None:
        from torchao.quantization import to_nf4

        super().__init__()
        base = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        self.weight = nn.Parameter(to_nf4(base, 64, 4), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return torch.relu(linear_nf4(x, self.weight) + self.up(self.down(x)))


class Adapters:
    """The trainable part of a model, as a checkpoint asks for it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        trained = {name for name, param in self.model.named_parameters() if param.requires_grad}
        return {name: value for name, value in self.model.state_dict().items() if name in trained}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.model.load_state_dict(values, strict=False)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[QLoraLinear() for _ in range(3)])


def train(model: nn.Module, rank: int, size: int, steps: int = 3) -> list[torch.Tensor]:
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        model(x).square().mean().backward()
        optimizer.step()
    return [full(param).detach().clone() for param in adapters]


def shard(model: nn.Sequential, api: Callable[..., Any]) -> Any:
    for block in model:
        api(block)
    return api(model)


@on_ranks(1, 2, 4)
def test_adapters_train_as_with_torchs_class_and_one_process() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ours = train(shard(make(), fully_shard), rank, size)
    # torch's own class cannot gather NF4 over one rank.
    theirs = train(shard(make(), torchs.fully_shard), rank, size) if size > 1 else ours
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **(EXACT if size < 4 else CLOSE))
    for mine, alone in zip(ours, train(make(), 0, 1), strict=True):
        torch.testing.assert_close(mine, alone, **CLOSE)


@on_ranks(2)
def test_adapters_are_saved_and_loaded() -> None:
    model = shard(make(), fully_shard)
    trained = train(model, dist.get_rank(), 2)
    other = shard(make(), fully_shard)
    with folder_of_all() as folder:
        checkpoint.save(folder / "saved", {"adapters": Adapters(model)}, step=1)
        checkpoint.load(folder / "saved", {"adapters": Adapters(other)})
    assert_equal([full(p) for p in other.parameters() if p.requires_grad], trained)

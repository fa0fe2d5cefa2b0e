"""Of alike blocks a dry run runs four, and says of all what it says when it runs all."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.planner.dry_run import DryRun, dry_run
from shardwise.planner.profile import Profile
from shardwise.recipes.config import ModelShape
from shardwise.recipes.gpt import GPT, Llama, LlamaShape

COUNT = 5
counted: list[str] = []


class Layer(nn.Module):
    """Keeps count of its calls; ``settings`` make it like others or not."""

    def __init__(self, width: int = 16, inner: int = 32, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = scale

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        counted.append("layer")
        x = x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        return x if memory is None else x + torch.sigmoid(memory)


class Stack(nn.Module):
    """Layers in a list, and how they are called."""

    def __init__(self, layers: list[nn.Module], way: str = "chain") -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(16, 16), nn.ModuleList(layers), nn.Linear(16, 16)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        memory = self.last(x) if self.way == "memory" else None
        kept: list[Tensor] = []
        for number, layer in enumerate([*self.layers, *(self.layers if self.way == "twice" else ())]):
            if self.way == "scaled":
                x = layer(x * number)
            elif self.way == "once":
                x = layer(x) * 2.0 if number == 3 else layer(x)
            elif self.way == "lists":
                kept.append(x)
                x = layer(x)
            else:
                x = layer(x) if memory is None else layer(x, memory)
        return self.last(x) + sum(kept)


def stack(way: str = "chain", **settings: float) -> nn.Module:
    return Stack([Layer(**settings) for _ in range(COUNT)], way)  # pyright: ignore[reportArgumentType]


def frozen_half() -> nn.Module:
    model = Stack([Layer() for _ in range(2 * COUNT)])
    for module in (model.first, *list(model.layers)[:COUNT]):
        module.requires_grad_(False)
    return model


def uneven() -> nn.Module:
    return Stack([*[Layer() for _ in range(COUNT)], *[Layer(inner=48) for _ in range(COUNT)]])


def tied() -> nn.Module:
    model = Stack([Layer() for _ in range(COUNT)])
    model.layers[2].get_submodule("up").register_parameter("weight", model.layers[3].get_parameter("up.weight"))
    return model


def in_one_setting() -> nn.Module:
    return Stack([Layer(scale=2.0 if number == 3 else 1.0) for number in range(COUNT)])


def borrowed_by_root() -> nn.Module:
    model = Stack([Layer() for _ in range(COUNT)])
    model.last.register_parameter("weight", nn.Parameter(torch.empty(16, 16)))
    model.first.register_parameter("bias", model.layers[3].get_parameter("down.bias"))
    return model


# Name: a model, and how many calls of layers a dry run makes.
CASES: dict[str, Callable[[], nn.Module]] = {
    "chain": stack,
    "memory that all read": lambda: stack("memory"),
    "frozen below": frozen_half,
    "two widths": uneven,
    "tied to each other": tied,
    "one is set otherwise": in_one_setting,
    "a parameter that the root has too": borrowed_by_root,
    "called twice": lambda: stack("twice"),
    "work between them": lambda: stack("scaled"),
    "work after one of them": lambda: stack("once"),
    "outputs that are kept": lambda: stack("lists"),
}
CALLS = {"chain": 4, "memory that all read": 4, "frozen below": 8, "two widths": 8}


def both(model: nn.Module, inputs: Tensor, **how: str | bool) -> tuple[DryRun, Profile]:
    quick = dry_run(model, [inputs], **how)  # pyright: ignore[reportArgumentType]
    with mock.patch("shardwise.planner.dry_run.alike_runs", return_value=()):
        return quick, dry_run(model, [inputs], **how).profile  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", list(CASES))
def test_a_dry_run_of_four_alike_blocks_is_that_of_all(name: str) -> None:
    for recompute in (False, True):
        quick, whole = both(CASES[name](), torch.empty(8, 16), recompute=recompute)
        assert quick.profile == whole, (name, recompute)


class Alternating(Layer):
    """Does something else at every third call of any of its kind, which nothing that it holds shows."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = super().forward(x, memory)
        return x * 2.0 if len(counted) % 3 == 2 else x


def test_blocks_that_look_alike_and_do_not_do_the_same_all_run() -> None:
    model = Stack([Alternating() for _ in range(COUNT + 1)])
    counted.clear()
    found = dry_run(model, [torch.empty(8, 16)]).profile
    assert len(counted) == 4 + COUNT + 1
    del counted[4:]  # all ran after four had
    with mock.patch("shardwise.planner.dry_run.alike_runs", return_value=()):
        assert dry_run(model, [torch.empty(8, 16)]).profile == found


@pytest.mark.parametrize("name", list(CALLS))
def test_of_alike_blocks_four_run(name: str) -> None:
    model = CASES[name]()
    counted.clear()
    dry_run(model, [torch.empty(8, 16)])
    assert len(counted) == CALLS[name]


def test_transformers_are_planned_from_four_blocks_to_the_byte() -> None:
    tokens = torch.empty(2, 32, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        llama, gpt = Llama(LlamaShape(5, 64, 4, 2, 96, 256)), GPT(ModelShape(5, 48, 4, 32), recompute=True)
    for model, precision, recompute in ((llama, "bf16", True), (llama, "fp32", False), (gpt, "autocast", False)):
        quick, whole = both(model, tokens, precision=precision, recompute=recompute)
        assert quick.profile == whole, (type(model).__name__, precision)

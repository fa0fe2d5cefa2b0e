"""Parity with one process: optimizers, implementations, bucket views and partitions, over some steps."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import share

from shardwise import ZeroRedundancyOptimizer

NUM_STEPS = 4
ELEMENTWISE: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 1e-2, "foreach": True, "maximize": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (torch.optim.Adagrad, {"lr": 1e-2, "maximize": True}),
    (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.Adamax, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.RAdam, {"lr": 1e-2}),
    (torch.optim.Rprop, {"lr": 1e-3}),
    (torch.optim.ASGD, {"lr": 1e-2}),
]
WHOLE_ONLY: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Muon, {"lr": 1e-2}),
    (torch.optim.Adafactor, {"lr": 1e-2}),
]


class Net(torch.nn.Module):
    """Odd sizes, a scalar, a tied weight and an empty tensor; matrices only for Muon."""

    def __init__(self, matrices_only: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 7)
        self.up, self.down = torch.nn.Linear(7, 13, bias=False), torch.nn.Linear(13, 7, bias=False)
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        if not matrices_only:
            self.scale, self.empty = torch.nn.Parameter(torch.tensor(0.5)), torch.nn.Parameter(torch.zeros(0, 3))
            self.shift = torch.nn.Parameter(torch.zeros(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.tanh(self.up(self.embed(tokens))))
        if hasattr(self, "scale"):
            x = x * self.scale + self.shift + self.empty.sum()
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def parity(optimizer_class, options: dict[str, Any], partitions: tuple[str, ...], views: tuple[bool, ...]) -> None:
    matrices_only = "even" not in partitions
    tokens = torch.randint(0, 11, (NUM_STEPS, 4 * dist.get_world_size(), 3), generator=torch.Generator().manual_seed(1))
    plain = Net(matrices_only)
    runs = [(plain, optimizer_class(plain.parameters(), **options))]
    for partition, bucket_view in zip(partitions, views, strict=True):
        model = copy.deepcopy(Net(matrices_only))
        zero = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class, parameters_as_bucket_view=bucket_view, partition=partition, **options
        )
        runs.append((model, zero))
    for batch in tokens:
        for model, optim in runs:
            optim.zero_grad()
            if model is plain:
                model(batch).backward()
            else:
                model(share(batch)).backward()
                average_gradients(model)
            optim.step()
    for model, _ in runs[1:]:
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")
    for model, _ in runs[2:]:  # between our own ways the arithmetic of an element is the same
        for a, b in zip(model.parameters(), runs[1][0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@on_ranks(2, FOUR)
def test_elementwise_optimizers_equal_one_process() -> None:
    for number, (optimizer_class, options) in enumerate(ELEMENTWISE[:: 1 if dist.get_world_size() == 2 else 4]):
        parity(optimizer_class, options, ("whole", "even"), (number % 2 == 0, number % 2 == 1))


@on_ranks(2, FOUR)
def test_optimizers_of_whole_matrices_equal_one_process() -> None:
    for optimizer_class, options in WHOLE_ONLY:
        parity(optimizer_class, options, ("whole", "whole"), (False, True))
        params = list(Net(matrices_only=True).parameters())
        with pytest.raises(ValueError, match=r"partition='even' .*use partition='whole'"):
            ZeroRedundancyOptimizer(params, optimizer_class, partition="even", **options)

"""What the tests under torch's own names share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.testing._internal.common_utils import TestCase

check = TestCase()
Reshard = bool | int


def same_losses(losses: list[torch.Tensor]) -> None:
    check.assertEqual(losses[0], losses[1])


def train_beside(
    reference: nn.Module, model: nn.Module, inputs: Callable[[], torch.Tensor], steps: int = 10, **adam: object
) -> None:
    optims = [torch.optim.Adam(each.parameters(), lr=1e-2, **adam) for each in (reference, model)]
    for iter_idx in range(steps):
        inp = inputs()
        losses: list[torch.Tensor] = []
        for each, optim in zip((reference, model), optims, strict=True):
            optim.zero_grad(set_to_none=iter_idx % 2 == 0)
            losses.append(each(inp).sum())
            losses[-1].backward()
            optim.step()
        same_losses(losses)

"""Two models trained with the same batches, compared after every step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from helpers.compare import REORDERED, average_gradients, comparable
from helpers.sharded import noise

batch = functools.partial(noise, width=6)


def assert_trains_alike(
    model: nn.Module, plain: nn.Module, steps: int = 3, make_batch: Callable[[int], torch.Tensor] = batch
) -> None:
    """Train both with the same batches and compare all parameters after every step."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for number in range(steps):
        for each in (model, plain):
            each(make_batch(number)).square().mean().backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, left), right in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(*comparable(right, left), **REORDERED, msg=lambda text, name=name: name + text)

"""The backward of a unit ends where autograd leaves it: graphs that pass inputs on, or run inside of another backward."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import REORDERED, assert_averaged
from helpers.ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard

WIDTH = 6


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class PassesLeafOn(nn.Module):
    """Its block gets a leaf in a container and returns it in one: the leaf's gradient is there before the root has ended."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = layer()

        def forward(self, both: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"h": self.own(both["h"]), "leaf": both["leaf"]}

    def __init__(self) -> None:
        super().__init__()
        self.before, self.unit, self.after = Two(), self.Block(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.unit({"h": self.before(x), "leaf": torch.ones(3, WIDTH, requires_grad=True)})
        return self.after(both["h"] + both["leaf"])


class ReturnsItsInput(nn.Module):
    """A unit that is used twice returns in its second use what its first one has made."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.unit, self.aux, self.after = Two(), layer(), layer(), layer()

        def forward(self, x: torch.Tensor, aux: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.unit(torch.tanh(self.before(x)))
            aux = self.aux(h) if aux is None else aux
            return self.after(h) + aux, aux

    def __init__(self) -> None:
        super().__init__()
        self.before, self.unit, self.after = layer(), self.Block(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, aux = self.unit(self.before(x))
        return self.after(self.unit(h, aux)[0])


class DifferentiatesAnOlderGraph(nn.Module):
    """A hook inside of the root computes gradients of a graph that was made before it."""

    def __init__(self) -> None:
        super().__init__()
        self.older, self.before, self.unit, self.after = Two(), Two(), layer(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.clone().requires_grad_() * 1.0
        old = self.older(q).square().sum()
        return self.rest(x, lambda: torch.autograd.grad(old, q, retain_graph=True)[0].mean())

    def rest(self, x: torch.Tensor, older: Callable[[], torch.Tensor]) -> torch.Tensor:
        y = self.unit(self.before(x)) * 1.0
        y.register_hook(lambda gradient: gradient + older())
        return self.after(y)


class Recurses(nn.Module):
    """A unit calls itself through a reentrant checkpoint."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.unit, self.after = layer(), layer(), layer()

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            h = torch.tanh(self.unit(torch.tanh(self.before(x))))
            return self.after(checkpoint(self, h, depth - 1, use_reentrant=True) if depth else h)

    def __init__(self) -> None:
        super().__init__()
        self.before, self.unit, self.after = layer(), self.Block(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.unit(self.before(x)))


class Recomputes(nn.Module):
    """A reentrant checkpoint recomputes a unit, on the thread of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.unit, self.after = Two(), Two(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(checkpoint(self.unit, self.before(x), use_reentrant=True))


def backward_on_another_thread(loss: torch.Tensor) -> None:
    """Run backward as autograd runs that of an accelerator's graphs."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize(
    "kind",
    [PassesLeafOn, ReturnsItsInput, DifferentiatesAnOlderGraph, Recurses, Recomputes],
    ids=lambda each: each.__name__,
)
@on_ranks(2)
def test_a_unit_ends_where_autograd_leaves_it(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    for unit in (model.unit.unit, model.unit) if hasattr(model.unit, "unit") else (model.unit,):
        fully_shard(unit)
    if kind is DifferentiatesAnOlderGraph:
        fully_shard(model.older, reshard_after_forward=False)
    fully_shard(model)
    for step in range(3):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for each in (model, plain):
            each.zero_grad()
            loss = each(x).square().sum()
            backward_on_another_thread(loss) if kind is Recomputes else loss.backward()
        assert_averaged(model, plain, **REORDERED)

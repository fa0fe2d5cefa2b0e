"""The backward of a unit ends where autograd leaves it: graphs that pass inputs on, or run inside of another backward."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import REORDERED, assert_averaged
from helpers.layers import WIDTH, Layers, layer
from helpers.ranks import on_ranks
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard


def two() -> Layers:
    return Layers(lambda it, x: it.second(torch.tanh(it.first(x))), first=layer(), second=layer())


def passes_leaf_on() -> Layers:
    """Its block gets a leaf in a container and returns it in one: the leaf's gradient is there before the root has ended."""
    block = Layers(lambda it, both: {"h": it.own(both["h"]), "leaf": both["leaf"]}, own=layer())

    def way(it: Any, x: torch.Tensor) -> torch.Tensor:
        both = it.unit({"h": it.before(x), "leaf": torch.ones(3, WIDTH, requires_grad=True)})
        return it.after(both["h"] + both["leaf"])

    return Layers(way, before=two(), unit=block, after=layer())


def returns_its_input() -> Layers:
    """A unit that is used twice returns in its second use what its first one has made."""

    def inside(it: Any, x: torch.Tensor, aux: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        h = it.unit(torch.tanh(it.before(x)))
        aux = it.aux(h) if aux is None else aux
        return it.after(h) + aux, aux

    def way(it: Any, x: torch.Tensor) -> torch.Tensor:
        h, aux = it.unit(it.before(x))
        return it.after(it.unit(h, aux)[0])

    block = Layers(inside, before=two(), unit=layer(), aux=layer(), after=layer())
    return Layers(way, before=layer(), unit=block, after=layer())


def differentiates_an_older_graph() -> Layers:
    """A hook inside of the root computes gradients of a graph that was made before it."""

    def way(it: Any, x: torch.Tensor) -> torch.Tensor:
        q = x.clone().requires_grad_() * 1.0
        old = it.older(q).square().sum()
        y = it.unit(it.before(x)) * 1.0
        y.register_hook(lambda gradient: gradient + torch.autograd.grad(old, q, retain_graph=True)[0].mean())
        return it.after(y)

    return Layers(way, older=two(), before=two(), unit=layer(), after=layer())


def recurses() -> Layers:
    """A unit calls itself through a reentrant checkpoint."""

    def inside(it: Any, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        h = torch.tanh(it.unit(torch.tanh(it.before(x))))
        return it.after(checkpoint(it, h, depth - 1, use_reentrant=True) if depth else h)

    block = Layers(inside, before=layer(), unit=layer(), after=layer())
    return Layers(lambda it, x: it.after(it.unit(it.before(x))), before=layer(), unit=block, after=layer())


def recomputes() -> Layers:
    """A reentrant checkpoint recomputes a unit, on the thread of backward."""

    def way(it: Any, x: torch.Tensor) -> torch.Tensor:
        return it.after(checkpoint(it.unit, it.before(x), use_reentrant=True))

    return Layers(way, before=two(), unit=two(), after=layer())


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
    [passes_leaf_on, returns_its_input, differentiates_an_older_graph, recurses, recomputes],
    ids=lambda each: each.__name__,
)
@on_ranks(2)
def test_a_unit_ends_where_autograd_leaves_it(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    for unit in (model.unit.unit, model.unit) if hasattr(model.unit, "unit") else (model.unit,):
        fully_shard(unit)
    if kind is differentiates_an_older_graph:
        fully_shard(model.older, reshard_after_forward=False)
    fully_shard(model)
    for step in range(3):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for each in (model, plain):
            each.zero_grad()
            loss = each(x).square().sum()
            backward_on_another_thread(loss) if kind is recomputes else loss.backward()
        assert_averaged(model, plain, **REORDERED)

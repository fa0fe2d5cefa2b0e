"""The fuzzer's model whose ranks take different ways, and the same steps on one process.

Numbers are whole, or halves of whole numbers, so that sums are exact in any order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fuzz.divergence.case import Call, Case, LayerSpec, Way
from fuzz.divergence.program import WIDTH, Model, Signs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from helpers.compare import comparable
from shardwise import fully_shard

NUM_LAYERS = 4
NEVER = 2**40 + 1  # numbers stay below it, so that nothing is taken modulo it


def divergent() -> Model:
    """Return a model of four layers, a tied and a plain parameter of the root, alike in every call."""
    model = Model(Case(0, 2, (LayerSpec(),) * NUM_LAYERS, ()), torch.float64)
    for module in (model, *model.layers):
        module.modulus = NEVER
    return model


def way(*layers: int) -> Way:
    """Return the way through ``layers``, in this order."""
    return Way(tuple(Call(layer) for layer in layers))


ALL = way(*range(NUM_LAYERS))
Steps = Sequence[Sequence[Sequence[Way]]]  # [step][rank][microbatch]


def inputs(step: int, rank: int, micro: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(-1, 2, (2, WIDTH), generator=draw).double()


def loss_of(model: nn.Module, way: Way, x: torch.Tensor) -> torch.Tensor:
    return model(x, way).sum() * 2**-6


@dataclass
class Outcome:
    """Gradients of every step, and parameters after the last one."""

    gradients: list[torch.Tensor | None] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)


def alone(steps: Steps, model: nn.Module) -> Outcome:
    """Run the ways of all ranks on one process."""
    model = copy.deepcopy(model)
    optimizer = Signs(model.parameters())
    outcome = Outcome()
    for number, ranks in enumerate(steps):
        optimizer.zero_grad()
        for rank, micros in enumerate(ranks):
            for micro, way in enumerate(micros):
                (loss_of(model, way, inputs(number, rank, micro)) / len(ranks)).backward()
        outcome.gradients += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    outcome.params = [p.detach().clone() for p in model.parameters()]
    return outcome


def on_all(
    steps: Steps,
    model: nn.Module,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    before_micro: Callable[[int, int, int], None] = lambda *_: None,
) -> Outcome:
    """Run the way of this rank on the sharded ``model``; its gradients and parameters stay sharded."""
    optimizer = Signs(model.parameters())
    outcome, rank = Outcome(), dist.get_rank()
    for number, ranks in enumerate(steps):
        optimizer.zero_grad()
        with around():
            for micro, way in enumerate(ranks[rank]):
                before_micro(number, micro, len(ranks[rank]))
                loss_of(model, way, inputs(number, rank, micro)).backward()
        optimizer.step()
        outcome.gradients += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    outcome.params = [p.detach().clone() for p in model.parameters()]
    return outcome


def assert_same(found: Outcome, expected: Outcome, names: Sequence[str]) -> None:
    """Compare what this rank holds: nothing is sent."""
    for number, (mine, its) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        name = f"step {number // len(names)}: {names[number % len(names)]}"
        assert (mine is None) == (its is None), (name, mine, its)
        if mine is not None and its is not None:
            assert torch.equal(*comparable(mine, its)), (name, mine, its)
    for name, mine, its in zip(names, found.params, expected.params, strict=True):
        assert torch.equal(*comparable(mine, its)), (name, mine, its)


def sharded(transport: str = "auto", **options: Any) -> Any:
    """Return :func:`divergent` with a unit for each layer, whose ranks may take different ways."""
    model: Any = divergent()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.set_transport(transport)
    model.set_allow_rank_divergence(True)
    return model


def over_replicas() -> Any:
    """Return :func:`sharded` on two replicas of two shards."""
    return sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def check(steps: Steps, model: nn.Module, plain: nn.Module | None = None, **options: Any) -> None:
    """Train ``model`` on all ranks, and ``plain`` (None: :func:`divergent`) on one process; compare to the bit."""
    plain = divergent() if plain is None else plain
    assert_same(on_all(steps, model, **options), alone(steps, plain), [name for name, _ in plain.named_parameters()])

"""A model whose ranks take different ways, and the same steps on one process.

Numbers are whole, or halves of whole numbers, so that sums are exact in any order.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.compare import comparable

WIDTH, NUM_LAYERS = 5, 4


class Layer(nn.Module):
    """Parameters of uneven, empty, frozen and non-contiguous kinds, and one that only some calls use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def whole(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 2, shape, generator=draw).double()

        self.weight = nn.Parameter(whole(WIDTH, WIDTH))
        self.turned = nn.Parameter(whole(WIDTH, 2 * WIDTH).t())
        self.bias = nn.Parameter(whole(WIDTH))
        self.scale = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, WIDTH, dtype=torch.float64))
        self.seldom = nn.Parameter(whole(3))
        self.never = nn.Parameter(whole(3))

    def forward(self, x: torch.Tensor, is_seldom: bool = False) -> torch.Tensor:
        x = torch.relu(x @ self.weight + self.bias) * self.scale
        x = x + (x @ self.turned.t())[:, :WIDTH] + self.nothing.sum()
        return x + self.seldom.sum() if is_seldom else x


@dataclass(frozen=True)
class Way:
    """What one forward does.

    Attributes:
        layers: numbers of the layers, in the order in which they run.
        seldom: those of them that use ``seldom``.
        checkpoints: recompute layers in backward: None, "reentrant" or "not reentrant".
        has_graph: the loss depends on the output; else there is no backward.
        is_evaluation: runs under ``no_grad``.
    """

    layers: tuple[int, ...] = (0, 1, 2, 3)
    seldom: tuple[int, ...] = ()
    checkpoints: str | None = None
    has_graph: bool = True
    is_evaluation: bool = False


class Divergent(nn.Module):
    """Layers that run as a :class:`Way` says, and a tied and a plain parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(seed) for seed in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(WIDTH))
        self.tied = self.head.weight

    def forward(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        x = x @ self.tied
        for number in way.layers:
            layer, is_seldom = self.layers[number], number in way.seldom
            if way.checkpoints is None:
                x = layer(x, is_seldom)
            else:
                x = checkpoint(layer, x, is_seldom, use_reentrant=way.checkpoints == "reentrant")
        return self.head(x)


class Signs(torch.optim.Optimizer):
    """Subtracts the signs of gradients; parameters stay in -1, 0, 1."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for param in (each for group in self.param_groups for each in group["params"]):
            if param.grad is not None:
                param.sub_(param.grad.sign()).clamp_(-1, 1)


Steps = Sequence[Sequence[Sequence[Way]]]  # [step][rank][microbatch]


def inputs(step: int, rank: int, micro: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(-1, 2, (2, WIDTH), generator=draw).double()


def run_forward(model: nn.Module, way: Way, x: torch.Tensor) -> torch.Tensor | None:
    """Return the loss; None if it has no graph."""
    if way.is_evaluation:
        with torch.no_grad():
            model(x, way)
        return None
    if way.checkpoints == "reentrant":
        x.requires_grad_()
    loss = model(x, way).sum() * 2**-6
    return loss if way.has_graph else None


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
                loss = run_forward(model, way, inputs(number, rank, micro))
                if loss is not None:
                    (loss / len(ranks)).backward()
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
                loss = run_forward(model, way, inputs(number, rank, micro))
                if loss is not None:
                    loss.backward()
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


def drawn(seed: int, num_ranks: int, num_steps: int) -> Steps:
    """Return ways drawn at random: which layers, in which order, how often, and how many microbatches."""
    draw = random.Random(seed)

    def way() -> Way:
        count = draw.choice([0, 1, 2, 3, 4, 5])
        layers = tuple(draw.randrange(NUM_LAYERS) for _ in range(count))
        if draw.random() < 0.5:
            layers = tuple(sorted(set(layers)))
        seldom = tuple(number for number in set(layers) if draw.random() < 0.3)
        kinds = [None, None, "reentrant", "not reentrant"]
        return Way(layers, seldom, draw.choice(kinds), draw.random() < 0.8, draw.random() < 0.15)

    return [
        [[way() for _ in range(draw.choice([0, 1, 1, 1, 2, 3]))] for _ in range(num_ranks)] for _ in range(num_steps)
    ]

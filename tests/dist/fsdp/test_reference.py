"""The engine against ``shardwise/reference.py``, to the bit.

Two numbers have one sum, so of four ranks only two, others in every step, have gradients other than zero.  Four ranks at
once are compared with whole numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import EXACT, REORDERED, assert_same, full
from helpers.models import MODELS, Block, build, units_of
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import batch, shard_units
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import MixedPrecisionPolicy, fully_shard, reference

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
HALF = torch.bfloat16
POLICIES = {
    "own": MixedPrecisionPolicy(),
    "half": MixedPrecisionPolicy(param_dtype=HALF),
    "half, reduced in float32": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32),
    "double, half out": MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=HALF),
    "uncast": MixedPrecisionPolicy(reduce_dtype=torch.float64, cast_forward_inputs=False),
}


def shard_alike(model: nn.Module, units: list[nn.Module], policy: MixedPrecisionPolicy) -> nn.Module:
    for module in (*units, model):
        reference.fully_shard(module, mp_policy=policy)
    return model


def both(name: str, policy: MixedPrecisionPolicy) -> list[Any]:
    """Return the model called ``name`` twice: sharded by the engine and by the reference."""
    simple = build(name)
    return [shard_units(build(name), name, mp_policy=policy), shard_alike(simple, units_of(name, simple), policy)]


def weight_of(step: int) -> float:
    """Return 1.0 on two ranks, others in every step, 0.0 on the rest: their gradients have one sum in any order."""
    pairs = list(itertools.combinations(range(dist.get_world_size()), 2))
    return float(dist.get_rank() in pairs[step % len(pairs)])


def assert_train_alike(
    models: list[Any],
    make_batch: Callable[[int], torch.Tensor],
    optimizer: str = "sgd",
    steps: int = 2,
    microbatches: int = 1,
    tolerance: dict[str, float] = EXACT,
) -> None:
    """Train both models and compare losses, gradients and parameters, to the bit unless there is a ``tolerance``."""
    optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in models]
    for step in range(steps):
        for number in range(microbatches):
            is_last = number == microbatches - 1
            models[0].set_requires_gradient_sync(is_last)
            losses: list[torch.Tensor] = []
            for model, context in zip(models, (None, None if is_last else reference.no_sync(models[1])), strict=True):
                with context or contextlib.nullcontext():
                    output = model(make_batch(step * microbatches + number))
                    losses.append(output.float().square().mean() * weight_of(step))
                    losses[-1].backward()
            torch.testing.assert_close(losses[0], losses[1], **tolerance)
            if is_last:  # before, .grad of the engine shows that gradients wait
                assert_same(models[0], models[1], tolerance, f"step {step}, microbatch {number}")
        for each in optimizers:
            each.step()
            each.zero_grad()
        assert_same(models[0], models[1], tolerance, f"after step {step}")


@pytest.mark.parametrize(
    ("policy", "optimizer", "num_ranks"),
    [
        pytest.param("own", "adamw", 4, marks=pytest.mark.exhaustive),  # whole numbers have four ranks, below
        ("own", "sgd", 2),
        pytest.param("half", "sgd", 2, marks=pytest.mark.exhaustive),
        ("half, reduced in float32", "adamw", 2),
        pytest.param("half, reduced in float32", "sgd", 4, marks=pytest.mark.exhaustive),
        ("double, half out", "adamw", 2),
        ("uncast", "sgd", 2),
    ],
)
@on_ranks()
def test_engine_and_reference_train_alike(policy: str, optimizer: str) -> None:
    for name in MODELS:
        if name == "tied" and policy == "double, half out":
            continue  # what a block returns meets the head's weight without a cast
        assert_train_alike(both(name, POLICIES[policy]), lambda step, name=name: batch(step, name), optimizer)


@pytest.mark.parametrize("policy", [pytest.param("own", marks=pytest.mark.exhaustive), "half, reduced in float32"])
@on_ranks(2)
def test_engine_and_reference_accumulate_alike(policy: str) -> None:
    for name in MODELS:
        models = both(name, POLICIES[policy])
        assert_train_alike(models, lambda step, name=name: batch(step, name), steps=2, microbatches=3)


@on_ranks(2, 4)
def test_whole_numbers_of_all_ranks_have_one_sum() -> None:
    models: list[Any] = []
    for shard in (fully_shard, reference.fully_shard):
        model: Any = build("matrices")
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param.mul(8).round())
        for module in (*model, model):
            shard(module)
        model(batch(0).mul(4).round()).sum().backward()
        models.append(model)
    assert_same(models[0], models[1], EXACT)
    sums = [full(each.grad) * dist.get_world_size() for each in models[0].parameters()]
    assert all(torch.equal(each, each.round()) and each.count_nonzero() for each in sums)


class Awkward(nn.Module):
    """A weight tied across units, a block that runs twice, an LSTM, a checkpointed block, an output of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 7, bias=False)
        self.twice = Block(7, 9)
        self.memory = nn.LSTM(7, 7)
        self.again = Block(7, 5)
        self.tail = nn.ModuleList([nn.Linear(7, 7, bias=False), nn.LayerNorm(7)])
        self.tail[0].weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, 7) -> (batch, 7)."""
        x = self.twice(self.twice(self.embed(x)))
        x, (state, _) = self.memory(x)
        x = checkpoint(self.again, x + state, use_reentrant=False)
        return self.tail[1](self.tail[0](x))


@on_ranks(2, FOUR)
def test_ties_across_units_and_modules_that_run_twice_are_alike() -> None:
    models: list[Any] = []
    for shard in (fully_shard, reference.fully_shard):
        torch.manual_seed(3)
        model = Awkward()
        for module in (model.twice, model.memory, model.again, model.tail[0], model):
            shard(module)
        models.append(model)
    assert models[1].tail[0].weight is models[1].embed.weight
    assert_train_alike(
        models, batch, tolerance=REORDERED
    )  # it averages the gradients of each use, the engine their sum


@on_ranks(2)
def test_the_reference_frees_full_parameters_after_forward_and_after_backward() -> None:
    model = build("plain")
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    for module in units_of("plain", model):
        reference.fully_shard(module)
    reference.fully_shard(model)
    gathered = reference.SimpleUnit.gather
    with pytest.MonkeyPatch.context() as patch:

        def gather(unit: reference.SimpleUnit) -> list[torch.Tensor]:
            full = gathered(unit)
            alive.extend(weakref.ref(each.untyped_storage()) for each in full)
            return full

        patch.setattr(reference.SimpleUnit, "gather", gather)
        loss = model(batch()).square().mean()
        assert len(alive) == len(list(model.parameters()))
        assert [each for each in alive if each() is not None] == []
        num_of_forward = len(alive)
        loss.backward()
    assert len(alive) > num_of_forward
    assert [each for each in alive if each() is not None] == []

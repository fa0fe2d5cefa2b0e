"""Optimizer steps and clipping inside of ``Join``: a rank that has left makes them on its shards, too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.divergent import Divergent, Way, inputs, run_forward
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import ConfigError, ShardedOptimizer, StateError, fully_shard, replicate

KINDS = ("sharded", "kept", "hsdp", "replicate")
Step = Callable[[nn.Module, Any, int], None]  # after the backward of a batch with this number


def sharded(kind: str = "sharded", transport: str = "auto") -> Any:
    model, size = cast(Any, Divergent()), dist.get_world_size()
    if kind == "replicate":
        for module in (*model.layers, model):
            replicate(module)
    else:
        shape = (2, size // 2) if kind == "hsdp" else (size,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=None if kind == "sharded" else kind == "hsdp")
    model.set_transport(transport)
    return model


def num_batches(rank: int, epoch: int) -> int:
    """Ranks leave at different times; the first epoch of the last rank is empty."""
    return (3, 1, 2, 0)[rank if dist.get_world_size() == 4 else rank * 3] if epoch == 0 else 1 + rank % 2


def way_of(rank: int, batch: int) -> Way:
    return Way((0, 1, 3) if (rank + batch) % 2 else (0, 1, 2, 3), seldom=(0,) if rank == 1 else ())


def step_plainly(model: nn.Module, optimizer: Any, batch: int) -> None:
    optimizer.step()
    optimizer.zero_grad()


def step_with(clip: Callable[..., Any], sets_to_none: bool, model: nn.Module, optimizer: Any, batch: int) -> None:
    clip(model.parameters(), 0.5)
    optimizer.param_groups[0]["lr"] = 0.1 / (batch + 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=sets_to_none)


def step_every_second(model: nn.Module, optimizer: Any, batch: int) -> None:
    if batch % 2:
        optimizer.step()
        optimizer.zero_grad()


def step_and_keep(model: nn.Module, optimizer: Any, batch: int) -> None:
    optimizer.step()


STEPS: dict[str, Step] = {
    "plain": step_plainly,
    "clip": partial(step_with, shardwise.clip_grad_norm_, True),
    "torch's clip": partial(step_with, nn.utils.clip_grad.clip_grad_norm_, False),
    "accumulates": step_every_second,
    "never clears": step_and_keep,
}


def train(model: Any, optimizer: Any, step: Step, epochs: int = 2) -> None:
    for epoch in range(epochs):
        with Join([model], optimizer=optimizer):
            for batch in range(num_batches(dist.get_rank(), epoch)):
                loss = run_forward(model, way_of(dist.get_rank(), batch), inputs(epoch, dist.get_rank(), batch))
                assert loss is not None
                loss.backward()
                step(model, optimizer, batch)


def train_alone(model: nn.Module, optimizer: Any, step: Step, epochs: int = 2) -> None:
    size = dist.get_world_size()
    for epoch in range(epochs):
        counts = [num_batches(rank, epoch) for rank in range(size)]
        for batch in range(max(counts)):
            for rank in (rank for rank, count in enumerate(counts) if batch < count):
                loss = run_forward(model, way_of(rank, batch), inputs(epoch, rank, batch))
                assert loss is not None
                (loss / size).backward()
            step(model, optimizer, batch)


def assert_alike(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.detach()), other.detach(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 4)
def test_steps_are_those_of_one_process(kind: str, step: str, num_ranks: int) -> None:
    if step == "torch's clip":  # shardwise replaces the function, when the first model is sharded
        sharded()
        STEPS[step] = partial(step_with, nn.utils.clip_grad_norm_, False)
    model, plain = sharded(kind), Divergent()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1), STEPS[step])
    train_alone(plain, torch.optim.AdamW(plain.parameters(), lr=0.1, eps=0.1), STEPS[step])
    assert_alike(model, plain)


@pytest.mark.parametrize("transport", ["gloo", "collective"])
@on_ranks(2)
def test_steps_over_other_transports(transport: str) -> None:
    model, plain = sharded(transport=transport), Divergent()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), STEPS["clip"])
    train_alone(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), STEPS["clip"])
    assert_alike(model, plain)


@on_ranks(2)
def test_an_optimizer_on_shards_and_two_optimizers() -> None:
    def split(model: nn.Module, make: Callable[..., Any]) -> list[Any]:
        named = [*model.named_parameters()]
        own = [param for name, param in named if name.startswith("layers.0")]
        return [
            make(own, lr=0.1, eps=0.1),
            make([param for name, param in named if not name.startswith("layers.0")], lr=0.01, eps=0.1),
        ]

    def step(model: nn.Module, optimizers: Any, batch: int) -> None:
        for each in reversed(optimizers):
            each.step()
            each.zero_grad()

    model, plain = sharded(), Divergent()
    train(model, split(model, torch.optim.Adam), step)
    train_alone(plain, split(plain, torch.optim.Adam), step)
    assert_alike(model, plain)
    model, plain = sharded(), Divergent()
    train(model, ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1, eps=0.1), STEPS["plain"])
    train_alone(plain, torch.optim.AdamW(plain.parameters(), lr=0.1, eps=0.1), STEPS["plain"])
    assert_alike(model, plain)


@on_ranks(2)
def test_a_learning_rate_in_a_tensor_is_that_of_the_ranks_that_step() -> None:
    def step(model: nn.Module, optimizer: Any, batch: int) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.1 / (batch + 1))
        step_plainly(model, optimizer, batch)

    model, plain = sharded(), Divergent()
    train(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), eps=0.1, foreach=False), step)
    train_alone(plain, torch.optim.Adam(plain.parameters(), lr=torch.tensor(0.1), eps=0.1, foreach=False), step)
    assert_alike(model, plain)


def _scaled(model: Any, optimizer: Any, batch: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad *= 0.5
    optimizer.step()


def _clamped(model: Any, optimizer: Any, batch: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    shardwise.clip_grad_norm_(model.parameters(), 1.0)


def _with_closure(model: Any, optimizer: Any, batch: int) -> None:
    optimizer.step(lambda: torch.ones(()))


def _with_another(model: Any, optimizer: Any, batch: int) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _with_others(model: Any, optimizer: Any, batch: int) -> None:
    shardwise.clip_grad_norm_([*model.parameters(), nn.Parameter(torch.ones(2))], 1.0)


def _differently(model: Any, optimizer: Any, batch: int) -> None:
    if dist.get_rank():
        optimizer.step()
    else:
        shardwise.clip_grad_norm_(model.parameters(), 1.0)


def _noisy_after_clip(model: Any, optimizer: Any, batch: int) -> None:
    shardwise.clip_grad_norm_(model.parameters(), 0.5)
    for param in (each for each in model.parameters() if each.grad is not None):
        param.grad += 0.1
    optimizer.step()


def _turned(model: Any, optimizer: Any, batch: int) -> None:
    for param in (each for each in model.parameters() if each.grad is not None):
        param.grad.neg_()
    optimizer.step()


def _grown(model: Any, optimizer: Any, batch: int) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.step()


MISTAKES: Sequence[tuple[Step, str]] = (
    (_scaled, "has changed gradients after backward"),
    (_clamped, "has changed gradients after backward"),
    (_noisy_after_clip, "has changed gradients after backward"),
    (_turned, "has changed gradients after backward"),
    (_grown, "has other parameters than when the Join began"),
    (_with_closure, "step has a closure"),
    (_with_another, "this SGD is not the optimizer of Join"),
    (_with_others, "parameters that are not sharded are clipped, too"),
    (_differently, "differ in what they clip or step"),
)


@pytest.mark.parametrize(("step", "text"), MISTAKES, ids=[step.__name__ for step, _ in MISTAKES])
@on_ranks(4)
def test_what_a_rank_that_has_left_cannot_repeat_is_refused_on_every_rank(step: Step, text: str) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy([full(param.detach()) for param in model.parameters()])
    with (
        pytest.raises(StateError, match=f"inside of a Join that rank.* left: .*{text}"),
        Join([model], optimizer=optimizer),
    ):
        for batch in range(0 if dist.get_rank() == 3 else 1):
            loss = run_forward(model, way_of(0, batch), inputs(0, dist.get_rank(), batch))
            assert loss is not None
            loss.backward()
            step(model, optimizer, batch)
    for param, value in zip(model.parameters(), before, strict=True):
        assert full(param.detach()).equal(value)


@on_ranks(2)
def test_an_optimizer_of_other_parameters_and_one_on_some_ranks_are_refused() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ConfigError, match="given SGD with 1 parameters that the model has not sharded"):
        Join([model], optimizer=others if dist.get_rank() else optimizer)
    with pytest.raises(ConfigError, match=r"ranks differ in the optimizer of Join.*\[\[\], \['SGD'\]\]"):
        Join([model], optimizer=optimizer if dist.get_rank() else None)
    train(model, optimizer, STEPS["plain"])


@on_ranks(2)
def test_a_scheduler_that_steps_in_the_body_is_refused_once_ranks_differ() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(model: nn.Module, optimizer: Any, batch: int) -> None:
        step_plainly(model, optimizer, batch)
        scheduler.step()

    with pytest.raises(StateError, match="ranks step an optimizer with different options, such as the learning rate"):
        train(model, optimizer, step, epochs=3)


@on_ranks(2)
def test_gradients_cleared_without_a_backward_and_in_part_are_so_on_ranks_that_have_left() -> None:
    def step(model: nn.Module, optimizer: Any, batch: int) -> None:
        if batch == 1:
            optimizer.zero_grad(set_to_none=False)  # a bad batch
        optimizer.step()
        first = next(iter(model.parameters()))
        assert first.grad is not None
        first.grad.zero_()

    model, plain = sharded(), Divergent()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), step)
    train_alone(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), step)
    assert_alike(model, plain)


@on_ranks(2)
def test_an_evaluation_in_a_join_leaves_ranks_alike() -> None:
    model = sharded()
    with Join([model]), torch.no_grad():
        if dist.get_rank():
            model(inputs(0, 0, 0), Way())
    kinds: list[Any] = [None, None]
    dist.all_gather_object(kinds, [type(param).__name__ for param in model.parameters()])
    assert kinds[0] == kinds[1]


@on_ranks(2)
def test_clipping_after_an_evaluation_in_the_body_takes_the_full_parameters_of_the_root() -> None:
    def step(model: nn.Module, optimizer: Any, batch: int) -> None:
        with torch.no_grad():
            model(inputs(9, 0, 0), Way())
        shardwise.clip_grad_norm_(model.parameters(), 0.5)
        step_plainly(model, optimizer, batch)

    model, plain = sharded(), Divergent()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), step)
    train_alone(plain, torch.optim.SGD(plain.parameters(), lr=0.1), step)
    assert_alike(model, plain)


@on_ranks(2)
def test_gradients_may_be_changed_in_a_join_that_no_rank_leaves_early() -> None:
    model, plain = sharded(), Divergent()
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        with Join([cast(Any, each)], optimizer=optimizer) if each is model else nullcontext():
            for batch in range(2):
                optimizer.zero_grad()
                loss = run_forward(each, Way(), inputs(0, 0, batch))
                assert loss is not None
                loss.backward()
                nn.utils.clip_grad_value_(each.parameters(), 0.5)
                optimizer.step()
    assert_alike(model, plain)


@on_ranks(4)
def test_a_rank_of_empty_shards_that_clears_in_place_alone_is_refused() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for batch in range(2 if dist.get_rank() == 3 else 0):  # 5 rows on 4 ranks: it has none
            loss = run_forward(model, Way(), inputs(0, 0, batch))
            assert loss is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    with pytest.raises(StateError, match="zeros or empty, so these cannot tell"), Join([model], optimizer=optimizer):
        step()

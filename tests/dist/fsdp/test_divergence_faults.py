"""Ranks that may take different ways: a failing rank is named, and other features train as one process."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fuzz.divergence.case import Way
from fuzz.divergence.program import Model, Signs
from helpers.divergent import (
    ALL,
    Steps,
    alone,
    assert_same,
    check,
    divergent,
    inputs,
    loss_of,
    on_all,
    over_replicas,
    sharded,
    way,
)
from helpers.jobs import Job
from helpers.live_bytes import LiveBytes
from helpers.ranks import FOUR, on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join

import shardwise
from shardwise import CPUOffloadPolicy, DesyncError, StateError, fully_shard, register_fsdp_forward_method
from shardwise.checkpoint import load, save
from shardwise.testing import faults


def towers(num_ranks: int, num_micros: int = 1) -> Steps:
    """Each rank skips another layer in each step; in the last two steps, some run them in the opposite order."""
    skipped = [
        [way(*(each for each in range(4) if each != (step + rank) % 4)) for rank in range(num_ranks)]
        for step in range(4)
    ]
    turned = [
        [replace(each, calls=each.calls[::-1]) if rank % 2 else each for rank, each in enumerate(ways)]
        for ways in skipped[2:]
    ]
    return [
        [[ways[rank]] * (num_micros - 1) + [ALL] * (num_micros > 1) or [ways[rank]] for rank in range(num_ranks)]
        for ways in [*skipped[:2], *turned]
    ]


# ---- A rank that is killed, raises, or is late.


def step_of(model: Any, way: Way, number: int = 0, during: Callable[[], object] = lambda: None) -> None:
    """Run a forward and backward of ``way``, with ``during`` called in the first layer."""
    hook = model.layers[0].register_forward_pre_hook(lambda *_: cast(None, during()))
    try:
        loss_of(model, way, inputs(number, dist.get_rank(), 0)).backward()
    finally:
        hook.remove()


def fails(where: str, transport: str, fault: Any) -> str:
    model, rank = sharded(transport), dist.get_rank()
    optimizer = Signs(model.parameters())
    for number in range(3):
        step_of(model, ALL, number)
        optimizer.step()
        optimizer.zero_grad()

    def strike() -> None:
        time.sleep(0.5)  # the other ranks wait in the exchange
        faults.reach("own forward")

    if where == "waits" and rank == 1:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    place = {"own forward": where, "all-gather": where, "reduction": where}.get(where, "nowhere")
    with faults.inject(fault, at=place, rank=1, call=2 if place == "reduction" else 1, error=KeyError):
        while True:
            own = where in ("own forward",)
            if (rank == 1) == own:
                step_of(
                    model,
                    ALL,
                    during=strike if own else (lambda: time.sleep(1.0)) if where == "waits" else lambda: None,
                )
            else:
                step_of(model, way())
            optimizer.step()


@pytest.mark.parametrize(
    ("where", "transport", "fault", "num_ranks"),
    [
        pytest.param("own forward", "auto", "kill", 4, marks=pytest.mark.exhaustive),
        ("own forward", "auto", "raise", 2),
        pytest.param("own forward", "collective", "kill", 2, marks=pytest.mark.exhaustive),
        ("waits", "auto", "kill", 2),
        ("waits", "collective", "kill", 4),
        ("all-gather", "collective", "kill", 2),
        pytest.param("all-gather", "collective", "raise", 4, marks=pytest.mark.exhaustive),
        ("reduction", "auto", "kill", 4),
        pytest.param("reduction", "collective", "kill", 2, marks=pytest.mark.exhaustive),
        pytest.param("reduction", "collective", "kill", 4, marks=pytest.mark.exhaustive),
        ("reduction", "collective", "raise", 2),
    ],
)
def test_a_rank_that_ends_while_it_serves_or_is_served_is_named_on_all_others(
    where: str, transport: str, fault: str, num_ranks: int
) -> None:
    with Job(fails, where, transport, fault, num_ranks=num_ranks, group_timeout_s=600) as job:
        for rank in set(range(num_ranks)) - {1}:
            error = job.outcome(rank, limit_s=60).error
            assert error is not None
            assert issubclass(error[0], DesyncError), error
            assert re.search(r"\brank 1\b", error[1]), error[1]


@on_ranks(2, group_timeout_s=6)
def test_without_the_switch_the_error_of_ranks_that_differ_names_it() -> None:
    model = sharded()
    model.set_allow_rank_divergence(False)
    with pytest.raises(DesyncError, match=r"unless the root has\s+set_allow_rank_divergence\(True\)"):
        for number in range(3):
            step_of(model, ALL if number == 0 else way(dist.get_rank(), 3))


# ---- What is refused is refused on all ranks, and later steps work.


def refused(model: Any, mistake: Callable[[], object], text: str) -> None:
    with pytest.raises(StateError, match=text):
        mistake()
    dist.barrier()
    model.zero_grad()
    check(towers(dist.get_world_size()), model)


@on_ranks(2, FOUR)
def test_a_backward_inside_of_a_forward_is_refused() -> None:
    model = sharded()
    plain = copy.deepcopy(model.state_dict())
    step_of(model, ALL)

    def inner() -> None:
        model.head.weight.sum().backward()

    with pytest.raises(StateError, match="a backward began inside of a forward"):
        step_of(model, ALL if dist.get_rank() else way(0), during=inner)
    dist.barrier()
    model.zero_grad()
    step_of(model, way(dist.get_rank()))
    assert plain.keys() == model.state_dict().keys()


@on_ranks(2)
def test_a_forward_that_writes_to_parameters_is_refused() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(8, 4, max_norm=0.1), nn.Linear(4, 4)

        def forward(self, is_used: bool) -> torch.Tensor:
            return self.head(self.table(torch.tensor([1, 5])) if is_used else torch.ones(2, 4)).sum()

    model = Table()
    fully_shard(model.table)
    fully_shard(model).set_allow_rank_divergence(True)
    for uses_table in (False, True, False):
        with (
            pytest.raises(StateError, match=r"has written to parameters of unit 'table'")
            if uses_table
            else contextlib.nullcontext()
        ):
            model(uses_table).backward()


@pytest.mark.parametrize(("what", "num_ranks"), [("step", 2), ("clip", 2), ("torch's clip", 2)])
@on_ranks()
def test_a_step_and_a_clip_inside_of_a_join_that_a_rank_has_left_are_refused(what: str) -> None:
    model, rank = sharded(), dist.get_rank()
    optimizer = Signs(model.parameters())

    def mistake() -> None:
        with Join([model]):
            for _ in range(1 if rank == 0 else 2):
                step_of(model, ALL)
            if rank:
                {
                    "step": optimizer.step,
                    "clip": lambda: shardwise.clip_grad_norm_(model.parameters(), 1.0),
                    "torch's clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                }[what]()

    refused(model, mistake, "inside of a Join that rank 0 has left")


# ---- Beside other features training is that of one process.


class Called(nn.Module):
    """Calls a method of a sharded root that is registered as a forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.run = lambda x, way: Model.forward(model, x, way)
        register_fsdp_forward_method(model, "run")

    def forward(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        return self.model.run(x, way)


def compiled(model: Any) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


def clipped_after_join(model: Any) -> nn.Module:
    with Join([model]):
        if dist.get_rank() == 0:
            step_of(model, ALL)
    model.zero_grad()
    return model


CHANGES: dict[str, Callable[[Any], nn.Module]] = {
    "compiled": compiled,
    "method": Called,
    "after a join": clipped_after_join,
}


@pytest.mark.parametrize(
    ("change", "transport", "num_ranks"),
    [
        ("compiled", "collective", 2),
        ("method", "collective", 2),
        ("after a join", "auto", 2),
    ],
)
@on_ranks()
def test_other_features_train_as_one_process(change: str, transport: str) -> None:
    model = CHANGES[change](sharded(transport))
    check(towers(dist.get_world_size()), model)


@on_ranks(2)
def test_offloaded_parameters_train_as_one_process() -> None:
    check(towers(2), sharded("collective", offload_policy=CPUOffloadPolicy()))


@pytest.mark.parametrize(("setting", "num_ranks"), [("sync", 2), ("sync of some ranks", 2), ("last backward", 2)])
@on_ranks()
def test_accumulation_over_backwards_trains_as_one_process(setting: str) -> None:
    model = sharded("collective")

    def before_micro(_: int, micro: int, num_micros: int) -> None:
        is_last = micro == num_micros - 1
        if setting == "last backward":
            model.set_is_last_backward(is_last)
        else:
            model.set_requires_gradient_sync(is_last or (setting != "sync" and dist.get_rank() == 0))

    check(towers(dist.get_world_size(), 3), model, before_micro=before_micro)


@pytest.mark.parametrize(
    "middle",
    [
        pytest.param([way(0)] * 4, marks=pytest.mark.exhaustive),
        pytest.param([ALL, way(3, 2, 1, 0)] * 2, marks=pytest.mark.exhaustive),
        [way(rank) for rank in range(4)],
    ],
)
@on_ranks(4)
def test_sums_over_the_shard_axis_are_kept_until_replicas_are_summed(middle: list[Way]) -> None:
    model = over_replicas()
    steps = [[[ALL, ALL, ALL]] * 4, *[[[ALL, middle[rank], ALL] for rank in range(4)]] * 2]
    check(
        steps, model, before_micro=lambda _, micro, num_micros: model.set_requires_all_reduce(micro == num_micros - 1)
    )


@on_ranks(2, FOUR)
def test_optimizers_in_hooks_of_gradients_step_on_ranks_that_only_serve() -> None:
    model, plain, rank, size = sharded(), divergent(), dist.get_rank(), dist.get_world_size()
    for each in (model, plain):
        for param in each.parameters():
            if param.requires_grad:
                optimizer = Signs([param])

                def step(param: torch.Tensor, optimizer: Signs = optimizer) -> None:
                    optimizer.step()
                    param.grad = None

                param.register_post_accumulate_grad_hook(step)
    for number in range(4):
        loss = loss_of(model, way(rank % 4), inputs(number, rank, 0))
        owner = number % size
        if rank == owner:
            loss.backward()
        with torch.no_grad():
            model(inputs(number, rank, 0), ALL)  # serves the backward
        (loss_of(plain, way(owner % 4), inputs(number, owner, 0)) / size).backward()
    for (name, param), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(param.full_tensor(), expected), name


@on_ranks(2, FOUR)
def test_a_gradient_scaler_takes_the_steps_of_one_process() -> None:
    steps, rank, plain = towers(dist.get_world_size()), dist.get_rank(), divergent()
    expected, model = alone(steps, plain), sharded()
    optimizer = Signs(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for number, ways in enumerate(steps):
        scaler.scale(loss_of(model, ways[rank][0], inputs(number, rank, 0))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for param, value in zip(model.parameters(), expected.params, strict=True):
        assert torch.equal(param.full_tensor(), value)


@on_ranks(2, FOUR)
def test_checkpoints_are_saved_and_loaded_between_such_steps(tmp_path: Path) -> None:
    steps, model = towers(dist.get_world_size()), sharded("collective")
    on_all(steps[:2], model)
    save(tmp_path, {"model": model}, step=2)
    first = on_all(steps[2:], model)
    load(tmp_path, {"model": model})
    assert_same(on_all(steps[2:], model), first, [name for name, _ in model.named_parameters()])


# ---- Join.


@pytest.mark.parametrize(("size_divides", "num_ranks"), [(True, 4), (False, 2), (True, 1)])
@on_ranks()
def test_a_disabled_join_and_one_of_equal_numbers_change_nothing(size_divides: bool) -> None:
    model, size = sharded(), dist.get_world_size()
    steps, places = towers(size), iter(range(100))

    def around() -> Any:
        is_enabled = next(places) % 2 == 0
        return Join([model], divide_by_initial_world_size=size_divides, enable=is_enabled)

    check(steps, model, around=around)


@pytest.mark.parametrize("is_first", [True, False])
@on_ranks(2, FOUR)
def test_a_join_of_a_sharded_model_and_another_object_is_refused_by_torch(is_first: bool) -> None:
    model, other = sharded(), sharded()
    for another in (other, shardwise.ZeroRedundancyOptimizer(divergent().parameters(), torch.optim.SGD, lr=0.1)):
        with pytest.raises(ValueError, match="multiple process groups"):
            Join([model, another] if is_first else [another, model])
    check(towers(dist.get_world_size()), model)


@on_ranks(2, FOUR)
def test_a_join_that_throws_on_early_termination_throws_on_every_rank_and_later_steps_work() -> None:
    model, rank = sharded(), dist.get_rank()
    with pytest.raises(RuntimeError, match="exhausted"), Join([model], throw_on_early_termination=True):
        for _ in range(1 if rank == 0 else 2):
            step_of(model, ALL)
    dist.barrier()
    model.zero_grad()
    check(towers(dist.get_world_size()), model)


@on_ranks(2, FOUR)
def test_an_exception_of_all_ranks_in_a_join_leaves_nothing_behind() -> None:
    model = sharded()
    with pytest.raises(KeyError), Join([model]):
        step_of(model, ALL)
        raise KeyError
    model.zero_grad()
    check(towers(dist.get_world_size()), model)


@pytest.mark.parametrize("late", [0, 1])
@on_ranks(2)
def test_one_model_may_diverge_beside_one_that_does_not(late: int) -> None:
    model, other, rank = sharded(), fully_shard(nn.Linear(5, 5).double()), dist.get_rank()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.5)
    for number in range(3):
        out = model(inputs(number, rank, 0), way(rank, 3))
        # The other rank is through with its own nodes, and must serve this one before it waits for it.
        out.register_hook(lambda _: time.sleep(0.3 * (rank == late)))
        other(out).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- Memory.


@on_ranks(2)
def test_a_rank_that_skips_units_has_at_most_two_of_them_in_memory_beside_its_own() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(12)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, runs: bool) -> torch.Tensor:
            y = x
            for layer in self.layers if runs else ():
                y = layer(y)
            return y.sum() + self.head(x[:, :4]).sum()

    model, rank, peaks = Wide(), dist.get_rank(), list[int]()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.set_transport("collective")  # pyright: ignore
    model.set_allow_rank_divergence(True)  # pyright: ignore
    for _ in range(4):
        with LiveBytes() as live:
            loss = model(torch.ones(2, 256), rank == 0)
        loss.backward()
        model.zero_grad()
        peaks.append(live.peak)
    assert rank == 0 or peaks[-1] <= 3 * 256 * 256 * 4 + 2**14, peaks

"""``OptimizerOffload``: updates that run while backward runs, equal to the bit to those of the plain optimizer."""

from __future__ import annotations

import _thread
import copy
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import local
from helpers.models import batch_for, build, units_of
from helpers.ranks import FOUR, on_ranks
from torch import nn

import shardwise
from shardwise import (
    ConfigError,
    OptimizerOffload,
    ShardedOptimizer,
    fully_shard,
    offload_report,
    replicate,
    transaction,
)


class Lion(torch.optim.Optimizer):
    """A user's optimizer, which also counts its calls in its groups."""

    sharded_update = "elementwise"

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                update = state["momentum"].lerp(param.grad, 0.1).sign_()
                param.add_(update, alpha=-group["lr"] * group["calls"] / (1 + group["calls"]))
                state["momentum"].lerp_(param.grad, 0.01)


class InterruptedLion(Lion):
    """One whose user interrupts the process while it updates from gradients that are 7, once, which lasts."""

    is_interrupted, num_updates = True, 0

    def step(self, closure: Any = None) -> None:
        InterruptedLion.num_updates += 1
        if not self.is_interrupted and self.param_groups[0]["params"][0].grad.max() == 7:
            InterruptedLion.is_interrupted = True
            _thread.interrupt_main()
            time.sleep(0.2)
        super().step(closure)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-3}),
    "Lion": (Lion, {"lr": 1e-3}),
}
GROUPS = [{"names": ["*bias", "*norm*"], "lr": 5e-3}]


def sharded(name: str, api: str = "fully_shard", dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build(name).to(dtype) if dtype != torch.float32 else build(name)
    for module in units_of(name, model):
        (fully_shard if api == "fully_shard" else replicate)(module)
    return (fully_shard if api == "fully_shard" else replicate)(model)


def optimizer_for(model: nn.Module, name: str = "AdamW", offload: Any = None, groups: Any = ()) -> ShardedOptimizer:
    made, options = OPTIMIZERS[name]
    return ShardedOptimizer(dict(model.named_parameters()), made, groups=groups, offload=offload, **options)


Between = Callable[[int, nn.Module, ShardedOptimizer], Any]


def clips(number: int, model: nn.Module, optimizer: ShardedOptimizer) -> torch.Tensor:
    """Clip with ours in even steps and with torch's in odd ones, so that half of the steps are clipped."""
    clip = shardwise.clip_grad_norm_ if number % 2 else torch.nn.utils.clip_grad_norm_
    return clip([p for p in model.parameters() if p.grad is not None], 0.05 if number % 4 < 2 else 1e6)


def train(
    name: str,
    model: nn.Module,
    optimizer: ShardedOptimizer,
    steps: range,
    between: Between = clips,
    num_backwards: int = 1,
) -> list[float]:
    losses: list[float] = []
    for number in steps:
        for part in range(num_backwards):
            batch = batch_for(name, 100 * number + 10 * part + dist.get_rank(), 4)
            loss = (
                model(batch.to(next(model.parameters()).dtype) if batch.is_floating_point() else batch)
                .float()
                .square()
                .mean()
            )
            loss.backward()
            losses.append(loss.item())
        if between(number, model, optimizer) != "skip":
            optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for mine, other in zip(left, right, strict=True):
            assert_equal(mine, other)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def assert_alike(
    one: tuple[nn.Module, ShardedOptimizer, list[float]], other: tuple[nn.Module, ShardedOptimizer, list[float]]
) -> None:
    assert one[2] == other[2]
    assert_equal(
        {
            name: param.full_tensor() if hasattr(param, "full_tensor") else param
            for name, param in one[0].named_parameters()
        },
        {
            name: param.full_tensor() if hasattr(param, "full_tensor") else param
            for name, param in other[0].named_parameters()
        },
    )
    assert_equal(one[1].full_state_dict(), other[1].full_state_dict())


def both(name: str, optimizer: str, offload: OptimizerOffload, steps: int = 8, **how: Any) -> Any:
    """Train with and without offloading, compare, and return the report."""
    options = {key: how.pop(key) for key in ("api", "dtype") if key in how}
    groups = how.pop("groups", ())
    found: list[Any] = []
    for each in (None, offload):
        model = sharded(name, **options)
        stepped = optimizer_for(model, optimizer, each, groups)
        found.append((model, stepped, train(name, model, stepped, range(steps), **how)))
    assert_alike(*found)
    return offload_report(found[1][1])


STEPS = [8, pytest.param(50, marks=pytest.mark.exhaustive)]
IN_CASES = ("AdamW", "SGD", "Adagrad", "RMSprop", "NAdam")  # CASES train with these, too


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(each, marks=pytest.mark.exhaustive) if each in IN_CASES else each for each in OPTIMIZERS],
)
@on_ranks(2)
def test_steps_of_which_half_are_clipped_equal_the_plain_optimizer(optimizer: str, steps: int) -> None:
    report = both("plain", optimizer, OptimizerOffload(undo=True), steps)
    assert report.num_updates == steps * report.num_units == report.num_early + report.num_redone
    assert report.num_early >= (steps // 2 - 1) * report.num_units


CASES: list[tuple[str, str, OptimizerOffload, dict[str, Any]]] = [
    ("plain", "AdamW", OptimizerOffload(undo=True), {"dtype": torch.bfloat16, "groups": GROUPS}),
    ("plain", "Lion", OptimizerOffload(num_threads=2, undo=True), {"dtype": torch.bfloat16}),
    ("plain", "AdamW, fused", OptimizerOffload(fraction=0.4, undo=True), {"num_backwards": 2, "groups": GROUPS}),
    ("plain", "SGD", OptimizerOffload(undo=False), {"num_backwards": 2}),
    ("mixed", "NAdam", OptimizerOffload(num_threads=2, undo=True), {}),
    ("frozen", "Adagrad", OptimizerOffload(undo=True), {"groups": GROUPS}),
    ("tied", "AdamW, fused", OptimizerOffload(undo=True), {"api": "replicate"}),
    ("tied", "RMSprop", OptimizerOffload(fraction=0.5, undo=True), {"num_backwards": 2}),
    ("mixed", "AdamW", OptimizerOffload(undo=True), {"api": "replicate", "num_backwards": 2}),
]


@pytest.mark.parametrize(("model", "optimizer", "offload", "how"), CASES)
@on_ranks(2)
def test_other_models_dtypes_and_numbers_of_backwards_equal_the_plain_optimizer(
    model: str, optimizer: str, offload: OptimizerOffload, how: dict[str, Any]
) -> None:
    report = both(model, optimizer, offload, **how)
    assert (report.resident_bytes > 0) == (offload.fraction < 1.0)
    assert report.num_early + report.num_redone <= report.num_updates == 8 * report.num_units
    assert offload.undo or not report.num_early + report.num_redone


@pytest.mark.parametrize("steps", STEPS)
@on_ranks(1, FOUR)
def test_any_number_of_ranks_equals_the_plain_optimizer(steps: int) -> None:
    report = both("mixed", "AdamW", OptimizerOffload(undo=True), steps, groups=GROUPS)
    assert report.num_updates == steps * report.num_units
    assert min(report.num_early, report.num_redone)


@on_ranks(2)
def test_updates_are_early_where_a_rank_has_more_than_one_core() -> None:
    report = both("plain", "SGD", OptimizerOffload(num_threads=1))
    assert not report.num_early + report.num_redone
    report = both("plain", "SGD", OptimizerOffload(num_threads=2))
    assert report.num_early + report.num_redone == report.num_updates


@on_ranks(2)
def test_accumulation_is_updated_early_from_the_second_step_on() -> None:
    report = both("plain", "SGD", OptimizerOffload(undo=True), between=lambda *_: None, num_backwards=2)
    assert report.num_early == 7 * report.num_units
    assert report.num_redone == 0


# ---- What users do between backward and step.


@torch.no_grad()
def acts(number: int, model: nn.Module, optimizer: ShardedOptimizer) -> str | None:
    """Change something else in every step."""
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    if number == 1:
        torch._foreach_mul_(grads, -1.0)  # no version counter of a DTensor shows it
    elif number == 2:
        torch._foreach_mul_(params, 0.9)
    elif number == 3:
        optimizer.param_groups[0]["lr"] *= 0.5
    elif number == 4:
        params[0].grad = None
    elif number == 5:
        return "skip"
    elif number == 6:
        local(params[1]).add_(1.0)
    elif number == 7:
        next(iter(optimizer.state.values()))["exp_avg"].mul_(0.5)
    elif number == 8:
        for param in params:
            param.grad = None if param.grad is None else param.grad.clone()
    elif number == 9:
        local(grads[1]).view(-1)[:1] += 1e-3
    return None


@on_ranks(2)
def test_what_users_change_before_step_counts() -> None:
    report = both("plain", "AdamW", OptimizerOffload(undo=True), 12, between=acts, groups=GROUPS)
    assert report.num_early
    assert report.num_redone


@on_ranks(2)
def test_nobody_sees_an_update_before_step() -> None:
    seen: list[list[Any]] = []

    def look(number: int, model: nn.Module, optimizer: ShardedOptimizer) -> None:
        with torch.no_grad():
            output = model(batch_for("plain", number, 2))
        found = {name: param.detach().full_tensor().clone() for name, param in model.named_parameters()}
        state = copy.deepcopy(optimizer.full_state_dict()) if number % 2 else None
        seen[-1].append((found, output, state))

    models = [sharded("plain"), sharded("plain")]
    for model, offload in zip(models, (None, OptimizerOffload(undo=True)), strict=True):
        seen.append([])
        train("plain", model, optimizer_for(model, "AdamW", offload), range(4), look)
    for one, other in zip(*seen, strict=True):
        assert_equal(list(one), list(other))


@on_ranks(2)
def test_a_transaction_that_fails_is_undone_and_tried_again() -> None:
    found: list[Any] = []
    for offload in (None, OptimizerOffload(undo=True)):
        model = sharded("plain")
        optimizer = optimizer_for(model, "AdamW", offload)
        losses: list[float] = []
        for number in range(6):
            is_again = False
            while True:
                with transaction(model, optimizer, retry=ValueError) as step:
                    losses += train("plain", model, optimizer, range(number, number + 1))
                    if number % 3 == 1 and not is_again and dist.get_rank() == 1:
                        raise ValueError("a broken batch")
                if not step.again:
                    break
                is_again = True
        found.append((model, optimizer, losses))
    assert len(found[0][2]) == 8
    assert_alike(*found)


@on_ranks(2)
def test_saved_with_offloading_and_resumed_without_and_the_reverse() -> None:
    found: list[Any] = []
    for first, second in ((None, None), (OptimizerOffload(undo=True), None), (None, OptimizerOffload(undo=True))):
        model = sharded("plain")
        optimizer = optimizer_for(model, "AdamW", first, GROUPS)
        losses = train("plain", model, optimizer, range(3))
        resumed = optimizer_for(model, "AdamW", second, GROUPS)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        losses += train("plain", model, resumed, range(3, 6))
        found.append((model, resumed, losses))
    assert_alike(found[0], found[1])
    assert_alike(found[0], found[2])


@pytest.mark.parametrize("undo", [True, False])
@on_ranks(2)
def test_an_interrupted_step_ends_before_the_error_and_is_not_undone_later(undo: bool) -> None:
    found: list[Any] = []
    for offload in (None, OptimizerOffload(undo=undo)):
        model = sharded("plain")
        optimizer = ShardedOptimizer(dict(model.named_parameters()), InterruptedLion, offload=offload)

        def step(number: int, model: Any, optimizer: ShardedOptimizer) -> str | None:
            if number != 1:
                return None
            while undo and found and InterruptedLion.num_updates < 6:  # a guess of three units, and one that was kept
                time.sleep(0.01)
            next(model.parameters()).grad.fill_(7)  # of the unit that is updated last
            if not found:
                return None
            InterruptedLion.is_interrupted = False
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            signal.signal(signal.SIGINT, before)
            return "skip"

        InterruptedLion.num_updates = 0
        found.append((model, optimizer, train("plain", model, optimizer, range(3), step)))
    assert_alike(*found)


class UnrestorableLion(Lion):
    """Its state is of another size after the second step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for entry in self.state.values() if self.param_groups[0]["calls"] == 2 else ():
            entry["momentum"].resize_(1)


@on_ranks(2)
def test_an_early_update_that_cannot_be_undone_is_an_error_of_step() -> None:
    model = sharded("plain")
    params = dict(model.named_parameters())
    optimizer = ShardedOptimizer(params, UnrestorableLion, offload=OptimizerOffload(undo=True))
    train("plain", model, optimizer, range(2), lambda number, *_: "skip" if number else None)
    model(batch_for("plain", 1, 4)).sum().backward()  # drops the update of the step that was skipped
    with pytest.raises(RuntimeError, match="output with shape .1. doesn't match"):
        optimizer.step()


@on_ranks(2)
def test_added_groups_and_closures_are_updated() -> None:
    found: list[Any] = []
    for offload in (None, OptimizerOffload(undo=True)):
        model = sharded("plain")
        params = dict(model.named_parameters())
        first = {name: param for name, param in params.items() if name.startswith("0")}
        optimizer = ShardedOptimizer(first, torch.optim.AdamW, lr=1e-2, offload=offload)
        losses = train("plain", model, optimizer, range(2))
        rest = {name: param for name, param in params.items() if name not in first}
        optimizer.add_param_group({"params": rest, "lr": 1e-3})

        def closure(model: Any = model) -> torch.Tensor:
            loss = model(batch_for("plain", 5, 4)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            losses.append(float(optimizer.step(closure)))
            optimizer.zero_grad()
        found.append((model, optimizer, losses))
    assert_alike(*found)


@on_ranks(2)
def test_a_trace_shows_updates_in_backward_and_those_made_again() -> None:
    model = sharded("plain")
    optimizer = optimizer_for(model, "SGD", OptimizerOffload(undo=True))

    def between(number: int, model: nn.Module, optimizer: ShardedOptimizer) -> None:
        optimizer.state_dict()  # waits for the updates
        clips(0, model, optimizer)

    with shardwise.trace() as trace:
        train(
            "plain",
            model,
            optimizer,
            range(2),
            lambda *_: optimizer.param_groups[0].update(lr=optimizer.param_groups[0]["lr"] / 2),
        )
    whats = [span.what for span in trace.spans if span.what in ("update", "redo")]
    assert whats.count("update") == whats.count("redo") == 6


@on_ranks(2)
def test_what_cannot_be_offloaded_is_named() -> None:
    with pytest.raises(ConfigError, match=r"fraction=1.5\); expected a number from 0 to 1"):
        OptimizerOffload(fraction=1.5)
    with pytest.raises(ConfigError, match="num_threads=0"):
        OptimizerOffload(num_threads=0)
    with pytest.raises(ConfigError, match="leave out undo= or folder="):
        OptimizerOffload(undo=True, folder="/tmp")
    model = sharded("matrices")
    params = dict(model.named_parameters())
    with pytest.raises(ConfigError, match="Muon needs more than the elements of one unit"):
        ShardedOptimizer(params, torch.optim.Muon, offload=OptimizerOffload(undo=True))
    optimizer = ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match="made without offload="):
        offload_report(optimizer)

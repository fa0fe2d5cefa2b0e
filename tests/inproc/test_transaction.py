"""What a transaction keeps and puts back on one rank, and which of several exceptions was the first cause."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from helpers.one_process import alone
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import ConfigError, DesyncError, RejectedStep, StateError, StepError, TransportError, transaction
from shardwise import ZeroRedundancyOptimizer as Zero
from shardwise.consistency import store as alarm
from shardwise.transaction import Report, first_cause, make_report


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, fails: bool, **options: Any) -> str:
    with transaction(model, optimizer, skip=KeyError, **options) as step:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step(lambda: model(torch.ones(3, 4)).sum()) if isinstance(
            optimizer, torch.optim.LBFGS
        ) else optimizer.step()
        if fails:
            raise KeyError
    return step.outcome


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adadelta", "LBFGS"])
def test_state_that_was_not_there_is_gone_and_state_that_was_is_the_same_object(name: str) -> None:
    model = nn.Linear(4, 2)
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert step_of(model, optimizer, fails=True) == "skipped"
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert not optimizer.state
    assert step_of(model, optimizer, fails=False) == "committed"
    held = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    values = [value.clone() for value in held]
    weight = model.weight.detach().clone()
    assert step_of(model, optimizer, fails=True) == "skipped"
    again = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    assert all(now is then for now, then in zip(again, held, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(held, values, strict=True))
    assert torch.equal(model.weight, weight)


def test_options_and_gradients_are_those_before() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    with transaction(model, optimizer, skip=KeyError):
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.param_groups[0]["new"] = 1
        model(torch.ones(1, 4)).sum().backward()
        model.bias.grad = None
        raise KeyError
    assert (optimizer.param_groups[0]["lr"], "new" in optimizer.param_groups[0]) == (0.1, False)
    assert model.weight.grad is gradient
    assert gradient.tolist() == [[1.0] * 4] * 2
    assert model.bias.grad is not None


def test_nothing_of_a_step_is_held_when_it_is_over() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    step_of(model, optimizer, fails=False)
    step_of(model, optimizer, fails=False)  # with gradients and state from before it
    held = [weakref.ref(model.weight.grad), weakref.ref(optimizer.state[model.weight]["exp_avg"])]
    optimizer.zero_grad()
    optimizer.state.clear()
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_a_transaction_in_a_transaction_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateError, match="runs already"), transaction(model, optimizer):  # noqa: SIM117
        with transaction(model, optimizer):
            pass
    assert step_of(model, optimizer, fails=False) == "committed"


def test_arguments_that_cannot_be_are_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="also= takes objects with state_dict"):
        transaction(model, optimizer, also=[3])
    with pytest.raises(ConfigError, match="retry= takes classes"):
        transaction(model, optimizer, retry=(KeyError("a"),))  # type: ignore[arg-type]


def test_an_optimizer_that_steps_in_backward_is_refused() -> None:
    with alone():
        model = DistributedDataParallel(nn.Linear(4, 2))
        optimizer = Zero(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        with pytest.raises(ConfigError, match="steps inside backward"):
            transaction(model, optimizer)


def test_random_numbers_are_put_back_if_asked() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn: list[float] = []
    for also in (["rng"], ["rng"], []):
        with transaction(model, optimizer, skip=KeyError, also=also):
            drawn.append(torch.rand(()).item())
            raise KeyError
    drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]


# ---- the first cause ----


def report(rank: int, order: int, error: BaseException) -> Report:
    return make_report(error, rank, order, "raise")


def test_an_error_of_ours_and_a_closed_connection_are_not_the_first_cause() -> None:
    closed = RuntimeError("[third_party/gloo/pair.cc:553] Connection closed by peer")
    consequences = [TransportError("rank 2 left"), DesyncError("ranks differ"), StepError("rank 2 has failed")]
    reports = [report(rank, rank + 1, error) for rank, error in enumerate([*consequences, closed])]
    assert first_cause([*reports, report(5, 9, KeyError("a"))]).rank == 5
    assert first_cause(reports).rank == 0


def test_of_two_causes_the_first_that_came_is_taken() -> None:
    assert first_cause([report(0, 2, KeyError("a")), report(1, 1, MemoryError())]).rank == 1


def test_a_report_has_the_first_line() -> None:
    assert report(3, 1, RejectedStep("the loss is NaN\nsecond line")).text == "the loss is NaN"


# ---- the alarm ----


def test_only_the_thread_of_the_step_hears_the_alarm() -> None:
    def ring() -> None:
        raise StepError("rank 1 has failed")

    heard: list[str] = []

    def other() -> None:
        try:
            alarm.look()
        except StepError:
            heard.append("other")

    alarm.listen(ring)
    try:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(StepError):
            alarm.look()
    finally:
        alarm.leave()
    alarm.look()
    assert heard == []


def test_an_optimizer_keeps_no_hook_of_transactions_that_are_gone() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for also in ([], [other], []):
        with transaction(model, optimizer, also=also) as step:
            optimizer.step()
        del step
    gc.collect()
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_buffers_of_a_module_that_was_added_later_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert step_of(model, optimizer, fails=False) == "committed"
    model.append(nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert step_of(model, optimizer, fails=True) == "skipped"
    assert before
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_a_check_of_a_block_around_another_is_called_in_it_and_after_it() -> None:
    calls: list[str] = []
    assert alarm.listen(lambda: calls.append("outer")) is None
    outer = alarm.listen(lambda: calls.append("inner"))
    alarm.look()
    assert calls == ["inner", "outer"]
    for _ in range(2):
        alarm.leave(outer)
        alarm.look()
    assert calls == ["inner", "outer", "outer", "outer"]
    alarm.leave()
    alarm.look()
    assert len(calls) == 4

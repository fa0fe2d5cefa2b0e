"""Faults on purpose: each strikes at the place, the step and the rank that it names, once, and nowhere else."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.program import APIS, Program
from chaos.rank_program import train
from helpers.jobs import Job, tell
from torch import nn
from torch.nn.modules import module as hooks

from shardwise import fully_shard, observe
from shardwise.errors import ConfigError
from shardwise.testing import WorkerPool, faults
from shardwise.testing.faults import PLACES, Fault

EVERYWHERE = ("init", "between steps", "forward", "evaluation", "backward", "optimizer step")
OF_API = {
    "fully_shard": ("all-gather", "reduction"),
    "hsdp": ("reduction",),
    "replicate": ("reduction",),
    "zero1": ("all-gather", "consolidation"),
    "zero2": ("all-gather", "reduction"),
    "whole_matrix": ("all-gather", "reduction", "exchange"),
}


@pytest.mark.parametrize("api", APIS)
def test_every_place_of_an_api_is_come_to(pool: WorkerPool, api: Any, tmp_path: Path) -> None:
    program = Program(api, "auto")
    seen = pool.run(places_seen, num_ranks=2, program=program, folder=str(tmp_path))
    assert set(EVERYWHERE) | set(OF_API[api]) | {"checkpoint save", "checkpoint load"} <= set(seen[0])
    assert set(seen[0]) <= set(PLACES)


def places_seen(program: Program, folder: str) -> list[str]:
    with faults.inject("delay", at="nowhere") as injected:
        seen: Counter[str] = Counter()
        reach = injected.reach
        injected.reach = lambda place, *args, **more: (seen.update([place]), reach(place, *args, **more))[1]  # type: ignore[method-assign]
        train(program, Path(folder))
    return [place for place in seen if place in PLACES]


def small() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return fully_shard(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def steps_until_struck(at: str, step_number: int, call: int) -> tuple[int, int]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)  # before the fault is set: not counted
    done = 0
    with faults.raise_at(at, step=step_number, call=call, error=MemoryError) as injected:
        with suppress(MemoryError):
            for _ in range(6):
                step(model, optimizer)
                done += 1
        for _ in range(3):  # it strikes once
            step(model, optimizer)
    return done, injected.num_struck


@pytest.mark.parametrize("at", ["forward", "backward", "between steps", "optimizer step", "reduction", "all-gather"])
def test_steps_are_counted_from_when_the_fault_is_set(pool: WorkerPool, at: str) -> None:
    assert pool.run(steps_until_struck, num_ranks=2, at=at, step_number=3, call=1) == [(2, 1), (2, 1)]


def test_a_later_occasion_of_a_step_can_be_named(pool: WorkerPool) -> None:
    assert pool.run(steps_until_struck, num_ranks=1, at="forward", step_number=2, call=3) == [(1, 1)]
    assert pool.run(steps_until_struck, num_ranks=1, at="forward", step_number=2, call=4) == [(6, 0)]


def gradients_with(kind: Any, at: str) -> tuple[bool, bool]:
    """Return whether ``kind`` on rank 1 has changed this rank's gradients, and whether the run ended at all."""
    model = small()
    model.set_transport("collective")
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    before = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    with faults.inject(kind, at=at, rank=1):
        model(torch.ones(2, 4)).square().sum().backward()
    same = all(torch.equal(x, p.grad.to_local()) for x, p in zip(before, model.parameters(), strict=True))
    return not same, True


@pytest.mark.parametrize("at", ["backward", "reduction"])
def test_what_one_rank_brings_can_be_corrupted_and_reaches_the_others(pool: WorkerPool, at: str) -> None:
    changed = pool.run(gradients_with, num_ranks=2, kind="corrupt", at=at)
    assert any(is_changed for is_changed, _ in changed)


def waits_for_what_was_dropped() -> str:
    model = small()
    model.set_transport("collective")
    with faults.drop_at("reduction", rank=1, call=1):
        try:
            model(torch.ones(2, 4)).square().sum().backward()
        except RuntimeError as error:
            return type(error).__name__
    return "went on"


def test_a_collective_that_one_rank_drops_is_missed_by_the_others(pool: WorkerPool) -> None:
    assert pool.run(waits_for_what_was_dropped, num_ranks=2, group_timeout_s=2)[0] == "DesyncError"


def ends_by(kind: Any) -> str:
    with faults.inject(kind, at="here", rank=1):
        tell("ready")
        faults.reach("here")
        time.sleep(0.1)
        return "went on"


@pytest.mark.parametrize(("kind", "code"), [("kill", -signal.SIGKILL), ("terminate", -signal.SIGTERM)])
def test_a_rank_can_be_ended_by_a_signal_and_the_other_is_left_alone(kind: Any, code: int) -> None:
    with Job(ends_by, kind, num_ranks=2) as job:
        assert job.outcome(0).value == "went on"
        assert job.message(1) == "ready"
        job.processes[1].join(10)
        assert job.processes[1].exitcode == code


def test_a_rank_can_be_stopped_and_goes_on_when_it_is_told_to() -> None:
    with Job(ends_by, "stop", num_ranks=2) as job:
        assert job.message(1) == "ready"
        assert not job.pipes[1].poll(0.5)
        os.kill(job.pids[1], signal.SIGCONT)
        assert job.outcome(1).value == "went on"


def test_an_interrupt_is_that_of_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt), faults.interrupt_at("here"):
            faults.reach("here")
            time.sleep(1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_the_process_ignores_is_refused_as_a_fault() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with (
            pytest.raises(ConfigError, match="ignores SIGINT, so the fault would do nothing"),
            faults.interrupt_at("here"),
        ):
            faults.reach("here")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_fault_strikes_in_whatever_thread_comes_to_the_place() -> None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            faults.reach("here")
        except KeyError as error:
            found.append(error)

    with faults.raise_at("here", error=KeyError("a")):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(found) == 1


def test_nothing_is_left_behind_when_a_fault_is_taken_back() -> None:
    before = len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks), len(observe.listeners)
    with faults.raise_at("forward"), faults.delay_at("backward"):
        assert len(observe.listeners) == before[2] + 2
    assert before == (len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks), len(observe.listeners))
    nn.Linear(2, 2)(torch.ones(1, 2))  # not struck


def test_a_fault_that_there_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no fault 'burn'"):
        Fault("burn", at="forward")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="drop cannot be at 'forward'; expected one of all-gather, reduction"):
        Fault("drop", at="forward")
    with pytest.raises(ConfigError, match="counted from 1"):
        Fault("kill", at="forward", step=0)
    with pytest.raises(ConfigError, match="found both"), faults.inject(Fault("kill", at="forward"), at="backward"):
        pass

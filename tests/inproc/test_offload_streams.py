"""``OptimizerOffload`` on the fake accelerator: the bits of the plain step, and every order that its copies need.

The thread of the updates is a thread of the fake's host, which does its jobs at once or as late as it may.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_accelerator.accelerator import FakeAccelerator
from fake_accelerator.threads import FakeThread
from fake_accelerator.timeline import Mark
from helpers.compare import local
from helpers.models import batch_for, build, units_of
from helpers.one_process import standing_for

import shardwise
from shardwise import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OptimizerOffload,
    ShardedOptimizer,
    fully_shard,
    offload_report,
)
from shardwise.collectives.streams import SideStream
from shardwise.fsdp.gradients import early_readers
from shardwise.offload import optimizer as updates
from shardwise.offload.optimizer import OffloadReport
from shardwise.offload.staging import Staging

HOST = {"offload_policy": CPUOffloadPolicy()}
BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
Between = Callable[[int, Any], None]


@dataclass
class Run:
    """What a run has shown: ``values`` are losses, and at last parameters and state.  The waits are those of each step."""

    fake: FakeAccelerator
    values: list[torch.Tensor] = field(default_factory=list)
    waits: list[list[str]] = field(default_factory=list)
    thread_waits: list[list[str]] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)
    report: OffloadReport | None = None

    @property
    def violations(self) -> list[str]:
        return [str(each) for each in self.fake.violations]


def clips(number: int, model: Any) -> None:
    shardwise.clip_grad_norm_(model.parameters(), 0.05 if number % 2 else 1e6)


def run(
    offload: OptimizerOffload | None,
    options: dict[str, Any],
    is_late: bool = False,
    between: Between | None = None,
    world: int = 1,
    steps: int = 4,
    keeps_works: bool = False,
) -> Run:
    fake = FakeAccelerator(keeps_works)
    found, timeline = Run(fake), fake.timeline
    thread = mock.patch.object(updates, "ThreadPoolExecutor", return_value=FakeThread(timeline, is_late))
    with standing_for(world // 2, world), fake.in_use(), thread:
        model: Any = build("plain")
        for module in (*units_of("plain", model), model):
            fully_shard(module, **options)
        # Its state has no numbers from torch.tensor(), whose memory the fake cannot follow in another thread.
        optimizer = ShardedOptimizer(
            dict(model.named_parameters()), torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False, offload=offload
        )
        loss: Any = None
        for number in range(steps):
            before = len(timeline.host_waits), len(timeline.thread_waits)
            loss = model(batch_for("plain", number, 4)).float().square().mean()
            loss.backward()
            if between is not None:
                between(number, model)
            optimizer.step()
            optimizer.zero_grad()
            found.waits.append(timeline.host_waits[before[0] :])
            found.thread_waits.append(timeline.thread_waits[before[1] :])
            found.values.append(loss.detach().clone())
            found.live_bytes.append(fake.live_bytes - 4 * len(found.values))
        found.values += [local(each).detach().clone() for each in model.parameters()]
        for entry in optimizer.state_dict()["state"].values():
            found.values += [local(each).detach().clone() for each in entry.values() if isinstance(each, torch.Tensor)]
        found.report = None if offload is None else offload_report(optimizer)
        del model, optimizer, loss
        gc.collect()
        assert not early_readers
    return found


@functools.cache
def plain(is_on_host: bool, clip: bool, precision: bool) -> list[torch.Tensor]:
    options = {**(HOST if is_on_host else {}), **(BF16 if precision else {})}
    return run(None, options, between=clips if clip else None).values


def are_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


WAYS = [  # every pair of values; the other half are exhaustive
    pytest.param(*way, marks=[pytest.mark.exhaustive] * (sum(way) % 2)) for way in product((False, True), repeat=3)
]


@pytest.mark.parametrize(("on_host", "on_disk", "late"), WAYS)
def test_updates_have_the_bits_of_the_plain_step_and_no_memory_is_used_early(
    on_host: bool, on_disk: bool, late: bool, tmp_path: Path
) -> None:
    options, folder = HOST if on_host else {}, str(tmp_path) if on_disk else None
    for undo, world in ((not on_disk, 1), (False, 1), (not on_disk, 8)):
        found = run(OptimizerOffload(undo=undo, folder=folder), options, late, world=world)
        assert not found.violations, (undo, world)
        assert world > 1 or are_equal(found.values, plain(on_host, False, False)), undo
        assert found.report is not None
        assert found.report.num_early == (found.report.num_updates if undo else 0), (undo, world)


@pytest.mark.parametrize(
    ("on_host", "late"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.exhaustive),
        pytest.param(True, False, marks=pytest.mark.exhaustive),
    ],
)
def test_clipped_steps_and_gradients_that_are_cast_have_the_bits_of_the_plain_step(on_host: bool, late: bool) -> None:
    options = HOST if on_host else {}
    for precision in ({}, BF16):
        found = run(OptimizerOffload(undo=True), {**options, **precision}, late, clips)
        assert are_equal(found.values, plain(on_host, True, bool(precision)))
        assert found.report is not None
        # A thread that is late finds gradients that are clipped already.
        assert (found.report.num_redone > 0) != late


def test_the_user_s_thread_waits_for_the_other_one_alone_and_this_one_once_per_copy_of_a_unit() -> None:
    for late in (False, True):
        resident, stored = run(OptimizerOffload(undo=True), {}, late), run(OptimizerOffload(undo=True), HOST, late)
        assert resident.waits == [[]] * 4
        assert resident.thread_waits == [["Event.synchronize (of offload down)"] * 2 * 3] * 4
        assert stored.waits == [["Event.synchronize (of store)"]] * 4
        assert stored.thread_waits == [["Event.synchronize (of store)"] * 3] * 4
        only_in_step = run(OptimizerOffload(undo=False), {}, late)
        assert only_in_step.waits == [[]] * 4
        assert only_in_step.thread_waits == [["Event.synchronize (of offload down)"] * 3] * 4


def test_a_step_leaves_no_memory_of_the_device_behind() -> None:
    offloaded, resident = run(OptimizerOffload(undo=True), {}), run(None, {})
    assert offloaded.live_bytes[1:] == offloaded.live_bytes[1:2] * 3
    num_bytes = sum(each.numel() * 4 for each in build("plain").parameters())
    assert offloaded.live_bytes[-1] <= resident.live_bytes[-1] - num_bytes  # the momentum


def test_gradients_of_the_next_unit_arrive_while_one_is_updated() -> None:
    for undo in (True, False):
        works = run(OptimizerOffload(undo=undo), {}, True, keeps_works=True).fake.timeline
        down = [each for each in works.works if each.what == "copy_" and works.names[each.at.lane] == "offload down"]
        update = [each for each in works.works if each.what == "add_" and works.names[each.at.lane] == "updates"]
        beside = [
            each for each in update if any(not one.comes_after(each) and not each.comes_after(one) for one in down)
        ]
        assert len(beside) >= len(update) * 2 // 3  # of three units, the last one has no next


# ---- what happens without each order ----


@contextmanager
def without(order: str, name: str) -> Generator[None]:
    """Leave ``order`` of the stream ``name`` out."""
    owner: Any = Mark if order == "synchronize" else SideStream
    real = getattr(owner, order)

    def left_out(self: Any, *args: Any) -> None:
        if getattr(self, "lane" if owner is Mark else "_name") != name:
            real(self, *args)

    with mock.patch.object(owner, order, left_out):
        yield


ORDERS = [
    ("wait_event", "offload down", {}, "race: copy_"),
    ("synchronize", "offload down", {}, "race: "),
    ("current_waits", "offload up", {}, "race: "),
    ("synchronize", "store", HOST, "race: "),
]


@pytest.mark.parametrize(("order", "name", "options", "rule"), ORDERS, ids=[f"{each[0]}-{each[1]}" for each in ORDERS])
def test_an_order_that_is_left_out_is_missed(order: str, name: str, options: Any, rule: str) -> None:
    with without(order, name):
        found = run(OptimizerOffload(undo=True), options).violations
    assert found, "the tests above find none with it"
    assert found[0].startswith(rule), found[0]


def test_memory_that_two_units_have_at_once_is_missed() -> None:
    def keeps_it(real: Any) -> Any:
        @contextmanager
        def staged(self: Any, copies: Any, load: Any) -> Generator[None]:
            self._free[:] = self._free[:1] * 2
            with real(self, copies, load):
                yield

        return staged

    with mock.patch.object(Staging, "staged", keeps_it(Staging.staged)):
        assert run(OptimizerOffload(undo=True), {}, True).violations

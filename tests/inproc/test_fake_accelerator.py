"""The fake accelerator's own rules: what it takes for an error, and what not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from fake_accelerator.accelerator import FakeAccelerator
from helpers.one_process import standing_for

from shardwise.collectives.streams import SideStream
from shardwise.errors import StateError
from shardwise.torch_private import swap_storage

NUMEL = 16


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    with FakeAccelerator().in_use() as found:
        yield found


@pytest.fixture
def lane(fake: FakeAccelerator) -> SideStream:
    return SideStream(fake, "side")


def rules(fake: FakeAccelerator) -> list[str]:
    return [violation.kind for violation in fake.violations]


def test_parts_of_one_block_do_not_meet(fake: FakeAccelerator, lane: SideStream) -> None:
    values = torch.ones(NUMEL)
    lane.wait_current()
    with lane.run():
        values[:8].add_(1)
    values[8:].add_(1)
    assert not fake.violations


def test_the_allocator_waits_for_streams_recorded_on_a_tensor(fake: FakeAccelerator, lane: SideStream) -> None:
    values, stream = torch.ones(NUMEL), fake.new_stream("recorded", 0)
    stream.wait_stream(fake.current_stream())
    with stream:
        values.sum()
    fake.record_stream(values, stream)
    del values
    torch.empty(NUMEL)
    assert not fake.violations


def test_memory_that_was_given_back_cannot_be_read(fake: FakeAccelerator) -> None:
    values = torch.ones(NUMEL)
    empty = torch.empty(0, dtype=torch.float32).untyped_storage()
    swap_storage(values.untyped_storage(), empty)
    with pytest.raises(StateError, match="memory was given back"):
        values.add_(1)


def test_the_host_reads_a_copy_only_when_it_has_waited(fake: FakeAccelerator, lane: SideStream) -> None:
    values, host = torch.ones(NUMEL), fake.host_memory(NUMEL, torch.float32, pins=True)
    lane.wait_current()
    with lane.run():
        host.copy_(values, non_blocking=True)
    mark = lane.mark()
    host.sum()
    assert rules(fake) == ["race"]
    mark.synchronize()
    host.sum()
    assert rules(fake) == ["race"]


def test_blocking_copies_and_answers_make_the_host_wait(fake: FakeAccelerator) -> None:
    values, host = torch.ones(NUMEL), fake.host_memory(NUMEL, torch.float32, pins=True)
    host.copy_(values)
    host.sum()
    assert not fake.violations
    assert bool(values.sum() > 0)
    waits = fake.timeline.host_waits
    assert ["copy_" in waits[0], "_local_scalar_dense" in waits[1], len(waits)] == [True, True, 2]


def test_copies_to_memory_that_is_not_page_locked_make_the_host_wait(fake: FakeAccelerator) -> None:
    host = fake.host_memory(NUMEL, torch.float32, pins=False)
    host.copy_(torch.ones(NUMEL), non_blocking=True)
    assert len(fake.timeline.host_waits) == 1


def test_a_collective_that_it_does_not_know_is_refused() -> None:
    with standing_for(0, 2), FakeAccelerator().in_use(), pytest.raises(StateError, match="c10d::alltoall_"):
        dist.all_to_all([torch.empty(1)] * 2, [torch.ones(1)] * 2)

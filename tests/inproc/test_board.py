"""What a rank says when a collective that its board is about has failed on it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from helpers.posts import announce_as, announce_elsewhere, make_exchange

from shardwise.consistency import failure_report
from shardwise.consistency.agreement import GroupAgreement
from shardwise.consistency.failure_report import put


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_ranks_on_a_host_that_does_not_answer_are_named_and_not_waited_for(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_report, "_SAY_S", 1e6)
    store = dist.HashStore()
    first = make_exchange(store)[0]
    announce_as(store, 5, os.getpid())
    announce_elsewhere(store, 9)
    found = GroupAgreement(group, first, has_peers=True).explain(
        "step() number 3", RuntimeError("Connection timed out")
    )
    assert str(found).startswith("step() number 3: rank 9 is on another host, from which no answer has come for 5 s: ")


def test_a_rank_that_reports_why_it_failed_is_cited(group: dist.ProcessGroup) -> None:
    store = dist.HashStore()
    for rank in (5, 9):
        put(store, rank, f"DesyncError: rank {rank} is in consolidate_state_dict(to=0)")
    found = GroupAgreement(group, make_exchange(store)[0], has_peers=True).explain(
        "step() number 3", RuntimeError("Timed out waiting 20000ms")
    )
    assert str(found).startswith(
        "step() number 3: all ranks have failed; the last error of rank 5: DesyncError: rank 5 is in"
    )
    assert "the last error of rank 9" in str(found)

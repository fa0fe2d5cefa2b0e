"""What a rank says when a collective that its board is about has failed on it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from helpers.posts import announce_as, announce_elsewhere, make_exchange

from shardwise.consistency import agreement
from shardwise.consistency.agreement import GroupAgreement


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_ranks_on_a_host_that_does_not_answer_are_named_and_not_waited_for(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "GRACE_S", 1e6)
    store = dist.HashStore()
    first, second, _ = make_exchange(store)
    announce_as(store, 5, os.getpid())
    announce_elsewhere(store, 9)
    second.post("stuck", "step() number 3")
    found = GroupAgreement(group, first, has_peers=True).explain(
        "step() number 3", RuntimeError("Connection timed out")
    )
    assert str(found).startswith("step() number 3: rank 9 is on another host, from which no answer has come for 5 s: ")


def test_a_rank_that_was_elsewhere_is_named_with_its_place(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "GRACE_S", 0.1)
    first, second, last = make_exchange()
    second.post("stuck", "step() number 3")
    last.post("stuck", "consolidate_state_dict(to=0)")
    found = GroupAgreement(group, first, has_peers=True).explain(
        "step() number 3", RuntimeError("Timed out waiting 20000ms")
    )
    assert str(found).startswith("step() number 3: rank 9 was in consolidate_state_dict(to=0) (timeout 20 s).")

"""How a process leaves its job by an error: it counts as gone, lets nobody wait, and keeps the store for the others."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from helpers.store_exchanges import announce_as, announce_elsewhere, on_host

from shardwise.consistency import failure_report
from shardwise.consistency.failure_report import ASKS, leave_job, put, watch_end
from shardwise.consistency.process_groups import is_gone, mark_left
from shardwise.consistency.store import default_store
from shardwise.observe import explain_end


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """A job of two ranks, of which this process is the first and the other is only in the store."""
    monkeypatch.setattr(failure_report, "_watched", set())
    monkeypatch.setattr(failure_report, "_is_leaving", [])
    monkeypatch.setattr(failure_report, "abort_all_connections", lambda members: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.delattr("sys.last_value", raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = default_store()
    assert store is not None
    yield store
    monkeypatch.undo()
    dist.destroy_process_group()


def test_a_rank_that_ends_by_an_error_is_gone_for_every_host_while_its_process_lives() -> None:
    store = dist.HashStore()
    announce_as(store, 1, os.getpid())
    assert not is_gone(store, 1)
    mark_left(store, 1)
    assert is_gone(store, 1)


def test_a_process_that_has_ended_is_gone_for_other_hosts_once_its_own_has_seen_it() -> None:
    store, ended = dist.HashStore(), subprocess.Popen(["true"])
    ended.wait()
    announce_as(store, 1, ended.pid)
    with on_host("elsewhere"):
        assert not is_gone(store, 1)
    assert is_gone(store, 1)
    with on_host("elsewhere"):
        assert is_gone(store, 1)


def test_a_program_that_ends_well_leaves_no_mark(job: dist.Store) -> None:
    watch_end()
    leave_job()
    assert not is_gone(job, 0)


def test_an_error_that_leaves_the_program_marks_its_rank_at_the_end_of_the_process_and_not_before(
    job: dist.Store,
) -> None:
    explain_end(KeyError("sample 7"))
    assert not is_gone(job, 0)
    leave_job()
    assert is_gone(job, 0)


def test_who_keeps_the_store_stays_until_the_others_have_ended(
    job: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_report, "keeps_store", lambda store: True)
    announce_as(job, 1, os.getpid())
    failure_report.will_leave()
    left = threading.Thread(target=leave_job, daemon=True)
    left.start()
    time.sleep(0.3)
    assert left.is_alive()
    mark_left(job, 1)
    left.join(timeout=30)
    assert not left.is_alive()


def test_who_keeps_the_store_stays_for_ranks_that_live_on_only_until_they_have_said_why(
    job: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while they ask there for the reason."""
    monkeypatch.setattr(failure_report, "keeps_store", lambda store: True)
    monkeypatch.setattr(failure_report, "_STAY_S", 600.0)
    monkeypatch.setattr(failure_report, "_LINGER_S", 0.1)
    announce_as(job, 1, os.getpid())
    put(job, 1, f"rank 1 failed{ASKS}")
    failure_report.will_leave()
    left = threading.Thread(target=leave_job, daemon=True)
    left.start()
    time.sleep(0.5)
    assert left.is_alive()
    put(job, 1, "DesyncError: rank 0 is gone")
    left.join(timeout=30)
    assert not left.is_alive()


def test_who_keeps_the_store_does_not_stay_for_ranks_of_a_host_that_does_not_answer(
    job: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_report, "keeps_store", lambda store: True)
    monkeypatch.setattr(failure_report, "_STAY_S", 1e6)
    monkeypatch.setattr("sys.last_value", RuntimeError("Read error: Connection timed out"), raising=False)
    announce_elsewhere(job, 1)
    failure_report.will_leave()
    leave_job()  # ends


def test_nobody_waits_in_a_collective_for_a_rank_that_has_left(
    job: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    monkeypatch.setattr(failure_report, "abort_all_connections", lambda members: called.append(list(members)))
    monkeypatch.setattr(failure_report, "exit_hooks", [lambda: called.append("words")])
    failure_report.will_leave()
    leave_job()
    leave_job()  # once
    assert called == ["words", [0, 1]]

"""Whoever is found gone, or does not come, is cited with its last error: the first cause is named, not who followed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.one_process import alone
from helpers.store_exchanges import announce_as, announce_elsewhere

from shardwise import DesyncError, TransportError, record
from shardwise.consistency import failure_report
from shardwise.consistency.agreement import begin_generation
from shardwise.consistency.failure_report import (
    ASKS,
    cited,
    found_among,
    gone_in_words,
    out_of_reach,
    put,
    report_of,
)
from shardwise.consistency.process_groups import patience_s
from shardwise.consistency.recorder import read_record
from shardwise.consistency.store import SILENCE, default_store


@pytest.fixture
def job() -> Iterator[dist.Store]:
    """A job of this process alone, whose group has a timeout of 20 s."""
    with alone(timeout_s=20) as store:
        yield store


def _words() -> str:
    return report_of(default_store(), 0)


@pytest.mark.usefixtures("job")
def test_what_has_been_said_is_taken_back_when_a_step_is_undone() -> None:
    DesyncError("rank 3 has another plan")
    begin_generation([0])
    assert _words() == ""


@pytest.mark.usefixtures("job")
def test_that_the_store_is_silent_is_not_said_to_the_store() -> None:
    TransportError(f"{SILENCE}: no answer for 30 s")
    assert _words() == ""


@pytest.mark.usefixtures("job")
def test_an_error_of_users_that_leaves_a_recorded_run_is_left_too(tmp_path: Path) -> None:
    with pytest.raises(KeyError), record(tmp_path):
        raise KeyError("sample 7")
    assert _words() == "KeyError: 'sample 7'"


def test_a_rank_that_is_gone_is_cited_and_one_that_said_nothing_is_not_blamed_on_others() -> None:
    store = dist.HashStore()
    put(store, 5, "TransportError: rank 9 is gone")
    assert gone_in_words(store, [5]) == "rank 5 is gone; the last error of rank 5: TransportError: rank 9 is gone"
    assert gone_in_words(store, [4]).startswith("rank 4 is gone (it reported no exception")


def test_each_rank_is_cited_once_with_its_own_reason_and_whom_it_cites_after_it() -> None:
    store = dist.HashStore()
    lines = [
        "rank 5 failed at call 3: wait of unit 'a', after unshard of unit 'a' (waiting for a): closed",
        "rank 9 is gone; the last error of rank 9: KeyError: 7; rank 5 waited for it. ",
        "rank 4 was at call 2: no call",
        "Ranks must run the same units",
    ]
    put(store, 5, "\n".join(lines))
    put(store, 4, "rank 5 left; the last error of rank 5: rank 5 failed; the last error of rank 9: Key")
    assert cited(store, [4, 5]) == (
        "; the last error of rank 4: rank 5 left"
        "; the last error of rank 5: rank 5 failed at call 3: wait of unit 'a' (waiting for a): closed; rank 9 is gone"
        "; the last error of rank 9: KeyError: 7"
    )


def test_ranks_that_say_the_same_are_cited_together() -> None:
    store = dist.HashStore()
    for rank in (1, 2):
        put(store, rank, "RuntimeError: Wait timeout; the last error of rank 3: DesyncError: rank 3 is late")
    assert cited(store, [1, 2]) == (
        "; the last error of ranks 1, 2: RuntimeError: Wait timeout; the last error of rank 3: DesyncError: rank 3 is late"
    )


def test_a_rank_that_asks_the_others_is_waited_for_until_it_knows_the_reason() -> None:
    store = dist.HashStore()
    put(store, 5, f"DesyncError: rank 5 failed{ASKS}")
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(report_of, store, 5, 60.0)
        time.sleep(0.1)
        put(store, 5, "DesyncError: rank 9 is gone")
        assert found.result() == "DesyncError: rank 9 is gone"


@pytest.mark.parametrize(
    ("own", "left", "far"),
    [
        ("Read error [10.0.0.2]:47776: Connection timed out", "", [2]),
        ("No route to host", "", [2]),
        ("Connection closed by peer", "Read error [10.0.0.2]:47776: Connection timed out", [2]),
        ("Connection closed by peer", "", []),
        ("Timed out waiting 20000ms for recv operation to complete", "RuntimeError: Timed out waiting", []),
    ],
)
def test_ranks_of_other_hosts_are_out_of_reach_once_the_kernel_says_that_a_host_does_not_answer(
    own: str, left: str, far: list[int]
) -> None:
    store = dist.HashStore()
    announce_as(store, 1, os.getpid())
    announce_elsewhere(store, 2)
    put(store, 1, left)
    assert out_of_reach(store, [1, 2, 3], own) == far  # of rank 3 nothing is known


def test_a_host_that_does_not_answer_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "_SAY_S", 1e6)
    store = dist.HashStore()
    announce_elsewhere(store, 2)
    found = found_among([2], store, "Connection timed out")
    assert found.startswith("rank 2 is on another host, from which no answer has come for 5 s")


def test_of_a_backends_own_error_the_rank_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "_SAY_S", 0.2)
    store = dist.HashStore()
    put(store, 1, "RuntimeError: Timed out")
    found = found_among([1, 2], store)
    assert found == "rank 2 reported nothing: stopped, in another call, or it caught its exception"


@pytest.mark.usefixtures("job")
def test_a_backends_own_error_carries_what_is_known_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_report, "found_among", lambda *_: "rank 1 is gone")
    with pytest.raises(RuntimeError) as raised, record(tmp_path):
        raise RuntimeError("Connection closed by peer")
    assert getattr(raised.value, "__notes__", ["shardwise: rank 1 is gone"]) == ["shardwise: rank 1 is gone"]
    written = read_record(tmp_path / "rank-00000.jsonl")
    assert written is not None
    assert "rank 1 is gone" in written.reasons[-1].text
    assert _words().endswith("Connection closed by peer; rank 1 is gone")


@pytest.mark.usefixtures("job")
def test_a_group_that_was_given_no_timeout_waits_as_long_as_the_job() -> None:
    group = dist.new_group([0])
    given = dist.new_group([0], timeout=timedelta(seconds=70))
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(given, dist.ProcessGroup)
    assert [patience_s(each) for each in (group, given)] == [20.0, 70.0]
    assert patience_s(group) == 20.0

"""The store of a job whose keeper has ended is an error with a name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch.distributed as dist
from helpers.one_process import alone

from shardwise import TransportError
from shardwise.consistency import process_groups
from shardwise.consistency.store import JobStore


class Gone:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise dist.DistNetworkError("Failed to recv, got 0 bytes\nframe #0")

        return fail


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.set("key", "text"),
        lambda store: store.check(["key"]),
        lambda store: store.add("key", 1),
    ],
)
def test_a_store_that_is_gone_is_named(ask: Callable[[JobStore], Any]) -> None:
    with pytest.raises(
        TransportError, match="the process that keeps it .* has ended, is stopped or cannot be reached: Failed to recv"
    ):
        ask(JobStore(cast(Any, Gone())))


def test_it_is_a_store() -> None:
    store = JobStore(dist.HashStore())
    store.set("key", "text")
    assert store.check(["key"])
    assert not store.check(["key", "other"])
    assert store.peek("key") == "text"
    assert store.add("number", 2) == 2


# ---- a keeper that is stopped ----


_KEEPER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def keeper() -> Iterator[tuple[int, int]]:
    """The number of a process that keeps a store, and the store's port."""
    with subprocess.Popen([sys.executable, "-c", _KEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


@pytest.fixture
def stopped(keeper: tuple[int, int]) -> Iterator[dist.TCPStore]:
    """A client of a store whose keeper is stopped until the test has ended."""
    pid, port = keeper
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    yield client
    os.kill(pid, signal.SIGCONT)


def test_a_keeper_that_is_stopped_is_waited_for_no_longer_than_said(stopped: dist.TCPStore) -> None:
    store = JobStore(dist.PrefixStore("mine", stopped), patience_s=0.2)
    with pytest.raises(TransportError, match="is stopped or cannot be reached: no answer for"):
        store.check(["key"])
    with pytest.raises(TransportError, match="an earlier request got no answer"):
        JobStore(stopped, patience_s=600.0).add("number", 1)


def test_a_silence_is_remembered_of_a_store_inside_another_of_which_torch_returns_another_object_each_time(
    stopped: dist.TCPStore,
) -> None:
    job = dist.PrefixStore("job", stopped)
    with pytest.raises(TransportError, match="no answer for"):
        JobStore(job, patience_s=0.2).check(["key"])
    for store in (job, dist.PrefixStore("other", job)):
        with pytest.raises(TransportError, match="an earlier request got no answer"):
            JobStore(store, patience_s=600.0).check(["key"])


def test_a_store_is_waited_for_no_longer_than_the_job_waits_for_a_rank(stopped: dist.TCPStore) -> None:
    with alone(timeout_s=1), pytest.raises(TransportError, match="no answer for 1 s"):
        JobStore(stopped).check(["key"])


def test_nobody_is_known_to_be_gone_while_the_store_is_silent(
    stopped: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups, "BRIEF_S", 0.2)
    assert not process_groups.is_gone(stopped, 0)


def test_the_thread_of_a_store_ends_with_it() -> None:
    before = set(threading.enumerate())
    store = JobStore(dist.TCPStore("127.0.0.1", 0, is_master=True))
    assert store.add("number", 2) == 2
    (mine,) = set(threading.enumerate()) - before
    del store
    mine.join(10.0)
    assert not mine.is_alive()

"""What waits in a kernel is told who will not come: by a thread beside, which asks nobody while anything moves."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from shardwise import TransportError, observe
from shardwise.collectives import streams
from shardwise.collectives.streams import DeviceWatch, StreamProgress, raise_in
from shardwise.consistency.failure_report import put
from shardwise.consistency.process_groups import announce, mark_left


class Child:
    """A process that stands for a rank."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        announce(store, rank)
        key = f"shardwise/process/{rank}"
        note = json.loads(store.get(key))
        store.set(key, json.dumps([*note[:-1], self._process.pid]))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def child(store: dist.Store) -> Iterator[Child]:
    found = Child(store, 1)
    yield found
    found.kill()


def watch_of(store: dist.Store, limit_s: float = 60.0, rank: int = 0, size: int = 2) -> DeviceWatch:
    return DeviceWatch(store, rank, range(size), limit_s, lambda: 100.0, lambda: None)


def test_a_process_that_has_ended_is_named(store: dist.Store, child: Child) -> None:
    watch = watch_of(store)
    assert watch.reason(store, 3.0) == ""
    child.kill()
    assert watch.reason(store, 3.0).startswith(
        "rank 1 is gone (it reported no exception: killed, or its program ended); rank 0 waits in a kernel"
    )


def test_its_last_error_is_cited(store: dist.Store, child: Child) -> None:
    put(store, 1, "KeyError: 7")
    child.kill()
    assert "rank 1 is gone; the last error of rank 1: KeyError: 7; rank 0 waits" in watch_of(store).reason(store, 3.0)


def test_ranks_that_cannot_see_it_hear_of_it(store: dist.Store) -> None:
    far = watch_of(store, rank=100, size=200)
    mark_left(store, 1)
    assert far.reason(store, 3.0) == ""  # no neighbour
    assert watch_of(store, size=200).reason(store, 3.0)
    assert "rank 1 is gone" in far.reason(store, 3.0)


def test_a_rank_that_is_there_has_the_timeout_of_the_group(store: dist.Store, child: Child) -> None:
    watch = watch_of(store, limit_s=9.0)
    assert watch.reason(store, 8.9) == ""
    found = watch.reason(store, 9.0)
    assert "rank 0 has waited in a kernel for 9 s: rank 1 reported nothing" in found


def test_who_waits_raises_before_it_sees_what_it_has_waited_for() -> None:
    is_over, seen = threading.Lock(), list[bool]()
    is_over.acquire()
    main = threading.get_ident()

    def end() -> None:
        time.sleep(0.2)
        raise_in(main, "rank 1 is gone")
        is_over.release()

    threading.Thread(target=end).start()
    with pytest.raises(TransportError, match="rank 1 is gone"):
        seen.append(is_over.acquire())
    assert not seen


class FakeStream:
    """A stream whose events are over when all that was given before them is."""

    device = torch.device("cuda", 1)

    def __init__(self) -> None:
        self.given = self.done = 0

    def record_event(self) -> Any:
        number = self.given
        return SimpleNamespace(query=lambda: self.done >= number)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams that were made current, in place of calls that need an accelerator."""
    made = list[Any]()
    monkeypatch.setattr(torch.accelerator, "set_stream", made.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_a_stream_is_asked_on_its_device_and_not_while_it_is_captured(
    current: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = FakeStream()
    stuck_s = StreamProgress(cast(Any, stream))
    assert stuck_s() < 0.1
    assert current == [stream]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(stream, "record_event", None)  # would become part of the graph
    assert stuck_s() == 0.0


@pytest.mark.usefixtures("current")
def test_a_stream_that_goes_on_is_not_stuck_however_much_it_is_given() -> None:
    stream = FakeStream()
    stuck_s = StreamProgress(cast(Any, stream))
    for _ in range(6):
        stream.given += 2
        assert stuck_s() < 0.1
        time.sleep(0.05)
        stream.done += 1  # it never catches up
        stuck_s()
        stream.done = max(stream.done, stream.given - 1)
    stream.given += 1
    before = stuck_s()
    time.sleep(0.2)
    assert stuck_s() >= before + 0.2


@pytest.mark.parametrize(("is_stuck", "moves"), [(True, False), (False, False), (True, True)])
def test_nobody_is_asked_while_anything_moves(
    is_stuck: bool, moves: bool, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, told = list[float](), threading.Event()
    job: list[dist.Store | None] = [store]
    monkeypatch.setattr(streams, "default_store", lambda: job[0])
    monkeypatch.setattr(streams, "_LOOK_S", 0.02)
    monkeypatch.setattr(streams, "_STILL_S", 0.1)

    class Listening(DeviceWatch):
        def reason(self, store: dist.Store, waited_s: float) -> str:
            asked.append(waited_s)
            return "somebody is gone"

        def tell(self, reason: str) -> None:
            told.set()

    Listening(store, 0, range(2), 60.0, lambda: 100.0 * is_stuck, lambda: None).start()
    end = time.monotonic() + 0.6
    while time.monotonic() < end and not told.is_set():
        if moves:
            observe.note("all-gather")
        time.sleep(0.01)
    job[0] = None  # ends the thread
    assert told.is_set() == (is_stuck and not moves) == bool(asked)


def test_who_has_waited_goes_on_once_the_collectives_have_ended(store: dist.Store) -> None:
    is_over, ended = threading.Lock(), list[bool]()
    is_over.acquire()

    def abort() -> None:
        is_over.release()
        time.sleep(0.2)  # a kernel ends before its communicator does, which would be torn down twice
        ended.append(True)

    watch = DeviceWatch(store, 0, range(2), 60.0, lambda: 100.0, abort)
    threading.Timer(0.1, watch.tell, ["rank 1 is gone"]).start()
    with pytest.raises(TransportError, match="rank 1 is gone"):
        is_over.acquire()
    assert ended

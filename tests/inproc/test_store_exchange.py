"""What ranks post for each other: the rules that agreements, the bulletin, roll calls and meetings of links rest on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.one_process import alone
from helpers.store_exchanges import MEMBERS, announce_as, gone_process, make_exchange, on_threads

from shardwise.consistency.agreement import StoreExchange, open_numbered_exchange
from shardwise.consistency.store import JobStore

LATE = "late"


@pytest.fixture(params=["memory", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    return dist.HashStore() if request.param == "memory" else dist.FileStore(str(tmp_path / "store"), 1)


def test_one_deadline_holds_for_all() -> None:
    exchange = make_exchange(timeout_s=0.8)

    def body(own: StoreExchange) -> dict[int, str]:
        time.sleep(0.5 * own.rank)
        own.post("word", "here")
        return own.collect("word", range(3)) if own.rank == 0 else {}

    assert on_threads(body, exchange)[0] == {0: "here", 1: "here"}


def test_one_that_is_gone_ends_a_wait_for_others_that_need_it() -> None:
    store = dist.HashStore()
    announce_as(store, MEMBERS[2], gone_process())
    start = time.monotonic()
    assert make_exchange(store)[1].collect("verdict", [0], 60.0, needs=range(3)) == {}
    assert time.monotonic() - start < 30


def test_an_absence_names_the_rank_that_is_gone_before_one_that_is_late() -> None:
    store = dist.HashStore()
    exchange = make_exchange(store)[0]
    assert exchange.absence([1, 2], LATE) == LATE
    announce_as(store, MEMBERS[2], gone_process())
    found = exchange.absence([1, 2], LATE)
    assert found.startswith("rank 9 is gone (it reported no exception")


def test_a_wait_ends_once_what_has_come_is_enough() -> None:
    exchange = make_exchange()
    exchange[1].post("word", "another")
    start = time.monotonic()
    found = exchange[0].collect("word", [1, 2], 60.0, lambda found: found.get(1) != "the same")
    assert found == {1: "another"}
    assert time.monotonic() - start < 30


def test_all_ranks_get_all_texts_and_of_rounds_two_are_kept() -> None:
    def body(exchange: StoreExchange) -> list[dict[int, str]]:
        exchange.post("word", "said")
        return [exchange.gather("round", f"{number} of {exchange.rank}") for number in (1, 2, 3)]

    exchange = make_exchange()
    every = [{rank: f"{number} of {rank}" for rank in range(3)} for number in (1, 2, 3)]
    assert on_threads(body, exchange) == [every] * 3
    places = ("word", "round/1#1", "round/1/all#1", "round/0#2", "round/1#3")
    kept = [exchange[0].collect(what, range(3), 0.0) for what in places]
    assert kept == [dict.fromkeys(range(3), "said"), {}, {}, *every[1:]]


def test_a_round_takes_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list[str]()

    def counted(name: str) -> None:
        method = getattr(JobStore, name)

        def request(self: JobStore, key: str, *given: str) -> object:
            requests.extend([name] * key.startswith("posts/"))
            return method(self, key, *given)

        monkeypatch.setattr(JobStore, name, request)

    for name in ("set", "peek", "add"):
        counted(name)
    exchange = make_exchange()
    exchange[1].post("round/1#1", "early")
    exchange[2].post("round/1#1", "early")
    assert exchange[0].gather("round", "mine") == {0: "mine", 1: "early", 2: "early"}
    assert requests == ["set"] * 3 + ["peek"] * 2 + ["set"]
    requests.clear()
    assert exchange[1].gather("round", "early") == {0: "mine", 1: "early", 2: "early"}
    assert requests == ["set", "peek"]


def test_all_ranks_learn_who_is_late_and_a_late_one_that_it_was_late_itself() -> None:
    def body(exchange: StoreExchange) -> list[int]:
        time.sleep(0.8 * (exchange.rank == 1))
        return exchange.absent(exchange.gather("round", "here"))

    exchange = make_exchange(timeout_s=0.3)
    assert on_threads(body, exchange) == [[1]] * 3
    late = "rank 5 did not make this call"
    assert exchange[1].absence([1], late).startswith(f"rank 5 came after the others had given up: {late}")


def test_a_gather_ends_on_all_ranks_once_the_first_has_found_enough() -> None:
    def body(exchange: StoreExchange) -> dict[int, str]:
        if exchange.rank == 2:
            return {}
        return exchange.gather("round", str(exchange.rank), lambda found: len({*found.values()}) > 1)

    start = time.monotonic()
    assert on_threads(body, make_exchange(timeout_s=60.0)) == [{0: "0", 1: "1"}] * 2 + [{}]
    assert time.monotonic() - start < 30


def test_the_nth_opening_of_a_topic_is_one_place_for_all_its_ranks_and_no_others() -> None:
    with alone() as store:
        first, second = (open_numbered_exchange(store, "topic", (3, 4), 0, 1.0) for _ in range(2))
        theirs = open_numbered_exchange(store, "topic", (3, 4), 1, 1.0)
        others = open_numbered_exchange(store, "topic", (5, 6), 1, 1.0)
        assert open_numbered_exchange(store, "another", (3, 4), 0, 1.0).prefix != first.prefix
    assert theirs.prefix == first.prefix
    assert len({first.prefix, second.prefix, others.prefix}) == 3

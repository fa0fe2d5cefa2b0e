"""Roll calls over a store: every rank's word in rank order, or on every rank who has not come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist
from helpers.store_exchanges import MEMBERS, make_exchange, on_threads

from shardwise.consistency import agreement
from shardwise.consistency.agreement import StoreGather
from shardwise.consistency.failure_report import ASKS, put
from shardwise.errors import TransportError

SIZE = 3
LATE = "did not make this call within {} s; save and load are collective: call them on every rank"


def _on_threads(body: Callable[[StoreGather], object], timeout_s: float = 20.0) -> tuple[list[object], dist.HashStore]:
    store = dist.HashStore()
    return on_threads(lambda exchange: body(StoreGather(exchange)), make_exchange(store, timeout_s)), store


def _without_rank_1(store_gather: StoreGather) -> object:
    if store_gather.rank == 1:
        return ""
    try:
        return store_gather.call("here")
    except TransportError as error:
        return str(error)


def test_what_all_have_said_comes_in_rank_order_and_the_store_keeps_two_answers() -> None:
    def body(store_gather: StoreGather) -> object:
        return [store_gather.call(f"{number} of {store_gather.rank}") for number in range(3)]

    answers, store = _on_threads(body)
    assert answers == [[[f"{number} of {rank}" for rank in range(SIZE)] for number in range(3)]] * SIZE
    kept = [
        f"posts/call/{place}/{key}"
        for place in range(4)
        for key in ("all/0", *range(SIZE))
        if store.check([f"posts/call/{place}/{key}"])
    ]
    assert kept == [f"posts/call/{place}/{key}" for place in range(2) for key in ("all/0", *range(SIZE))]
    number, _, answer = store.get("posts/call/1/all/0").decode().partition(" ")
    assert (number, [*json.loads(answer).values()]) == ("3", answers[0][2])


def test_every_rank_names_the_one_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE_S", 5.0)

    assert _on_threads(_without_rank_1, timeout_s=0.3)[0] == [
        f"rank 5 {LATE.format(0.3)}",
        "",
        f"rank 5 {LATE.format(0.3)}",
    ]


def test_ranks_that_come_late_one_after_another_do_not_add_up() -> None:
    def body(store_gather: StoreGather) -> object:
        time.sleep(0.6 * store_gather.rank)
        try:
            return store_gather.call("here")
        except TransportError as error:
            return str(error)

    assert _on_threads(body, timeout_s=1.0)[0] == [f"rank 9 {LATE.format(1)}"] * SIZE


def test_all_wait_until_the_first_has_asked_who_is_late_for_the_reason() -> None:
    store = dist.HashStore()
    put(store, MEMBERS[1], "Timed out: rank 7 said nothing" + ASKS)  # it may know more in a moment
    found = on_threads(lambda exchange: _without_rank_1(StoreGather(exchange)), make_exchange(store, 0.3))
    assert found[0] == f"rank 5 {LATE.format(0.3)}; the last error of rank 5: Timed out: rank 7 said nothing"
    assert found[2] == found[0]

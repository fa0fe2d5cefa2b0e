"""What ranks read of each other's plans, and what a rank posts: it is in the store when the call returns."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from helpers.store_exchanges import MEMBERS, make_exchange, on_threads

from shardwise import DesyncError
from shardwise.consistency.agreement import MismatchCheck, StoreExchange
from shardwise.consistency.store import JobStore


class LateStore(dist.HashStore):
    """A client of a store to which a set may be on its way until the answer to the client's next query, as of TCPStore."""

    def __init__(self, shared: dist.Store) -> None:
        super().__init__()
        self._shared = shared
        self._sent: list[tuple[str, str]] = []

    def set(self, key: str, value: str) -> None:
        self._sent.append((key, value))

    def check(self, keys: list[str]) -> bool:
        while self._sent:
            self._shared.set(*self._sent.pop(0))
        return self._shared.check(keys)

    def get(self, key: str) -> bytes:
        return self._shared.get(key)


def test_what_a_rank_has_posted_is_seen_by_others_at_once() -> None:
    """One that was on its way after the step was read as that of a rank which had not stepped: a DesyncError."""
    shared = dist.HashStore()
    first, last = (
        MismatchCheck(StoreExchange(JobStore(LateStore(shared)), "posts", MEMBERS, rank, 20.0, shared))
        for rank in (0, 2)
    )
    last.post("steps/0", "news")
    assert first.posted("steps/0", MEMBERS[2]) == "news"


def _raises(exchange: StoreExchange, plan: list[str]) -> str:
    with pytest.raises(DesyncError) as found:
        MismatchCheck(exchange).check_plan(plan)
    return str(found.value)


def test_a_rank_with_another_plan_and_the_first_name_each_other() -> None:
    first, _, last = make_exchange(timeout_s=1.0)  # rank 5 is waited for
    texts = on_threads(lambda each: _raises(each, ["x"] if each is last else ["y"]), [first, last])
    for text in texts:
        assert text.startswith("ranks have different collectives in a step: rank 4: y; rank 9: x\n")


def test_all_ranks_that_are_late_are_named_and_not_the_first_of_them_alone() -> None:
    text = _raises(make_exchange(timeout_s=0.1)[0], ["unshard of unit 'a'"])
    assert text.startswith("ranks 5, 9 did not finish a step within 0.1 s of rank 4")

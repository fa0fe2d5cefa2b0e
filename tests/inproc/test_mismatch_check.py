"""What a rank posts for others to read: it is in the store when the call returns."""

from __future__ import annotations

import torch.distributed as dist
from helpers.store_exchanges import MEMBERS

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

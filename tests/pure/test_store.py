"""The store of a job whose keeper has ended is an error with a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch.distributed as dist

from shardwise import TransportError
from shardwise.comm.store import JobStore


class Gone:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise dist.DistNetworkError("Failed to recv, got 0 bytes\nframe #0")

        return fail


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.set("key", "text"),
        lambda store: store.get("key"),
        lambda store: store.check(["key"]),
        lambda store: store.add("key", 1),
    ],
)
def test_a_store_that_is_gone_is_named(ask: Callable[[JobStore], Any]) -> None:
    with pytest.raises(
        TransportError, match="the process that keeps it .* has ended or cannot be reached: Failed to recv"
    ):
        ask(JobStore(cast(Any, Gone())))


def test_what_cannot_be_forgotten_stays() -> None:
    JobStore(cast(Any, Gone())).delete("key")


def test_it_is_a_store() -> None:
    store = JobStore(dist.HashStore())
    store.set("key", "text")
    assert store.check(["key"])
    assert not store.check(["key", "other"])
    assert store.get("key") == "text"
    assert store.add("number", 2) == 2
    store.delete("key")
    assert not store.check(["key"])

"""Waits that look again and again, and what waits for a collective that has failed already."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise.collectives.c10d import HostWork
from shardwise.consistency import store
from shardwise.consistency.store import wait_until


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses, which take no time but move the clock."""
    made: list[float] = []
    monkeypatch.setattr(store.time, "sleep", made.append)
    monkeypatch.setattr(store.time, "monotonic", lambda: sum(made))
    return made


def test_pauses_grow_to_the_longest(pauses: list[float]) -> None:
    numbers = itertools.count()
    assert wait_until(lambda: next(numbers) == 6, pauses_s=(1.0, 3.0))
    assert pauses == [1.0, 1.5, 2.25, 3.0, 3.0, 3.0]


def test_a_wait_ends_at_its_limit_with_one_more_look(pauses: list[float]) -> None:
    assert not wait_until(lambda: False, 4.0, pauses_s=(1.0, 9.0))
    assert sum(pauses) == 4.0
    looks = iter([False, True])
    assert wait_until(lambda: next(looks), 0.0)


def test_a_wait_ends_once_it_is_hopeless_which_is_asked_rarely(pauses: list[float]) -> None:
    asked: list[float] = []

    def is_hopeless() -> bool:
        asked.append(sum(pauses))
        return len(asked) == 3

    assert not wait_until(lambda: False, 60.0, is_hopeless=is_hopeless)
    assert all(later - earlier >= store.LOOK_S for earlier, later in itertools.pairwise([0.0, *asked]))
    assert sum(pauses) < 4 * store.LOOK_S


class _Failed:
    """A collective that has ended before it is waited for, since another rank is gone."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_collective_that_has_failed_before_it_is_waited_for_raises_and_delivers_nothing() -> None:
    delivered: list[torch.Tensor] = []
    handle = HostWork(_Failed(), delivered.append, torch.zeros(1), None, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Connection closed"):
        handle.wait()
    assert not delivered

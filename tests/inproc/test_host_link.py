"""One rank's side of a link through shared memory, the other rank's words being written by the test."""

from __future__ import annotations

import os

import pytest

from shardwise.comm import shm
from shardwise.comm.segment import HEADER_BYTES, Segment
from shardwise.comm.shm import HostLink
from shardwise.errors import TransportError


def make_link() -> tuple[HostLink, memoryview]:
    """Return the link of rank 1 and the words of rank 0."""
    segments = [Segment.create(HEADER_BYTES + 4096) for _ in range(2)]
    return HostLink(segments, [os.getpid()] * 2, 1, HEADER_BYTES, 64, 5.0), segments[0].words


class Coming:
    """Words of a rank that comes, and leaves by an exception, between two looks at them."""

    def __init__(self, looks: int, words: dict[int, int]) -> None:
        self._looks, self._words = looks, words

    def __getitem__(self, index: int) -> int:
        self._looks -= 1
        return 0 if self._looks >= 0 else self._words.get(index, 0)


def test_a_peer_that_has_left_a_span_and_waits_in_the_next_one_is_no_desync() -> None:
    link, _ = make_link()
    # Its backward, span 1, raised as soon as this rank was there; its next forward waits.
    link._words = (Coming(1, {shm._OPEN: 4 * 2, shm._ABORTED: 1}), link._words[1])  # type: ignore[assignment]
    assert link.open("backward", False)
    link.abort()
    assert link.open("forward", False)


def test_a_peer_in_another_kind_of_span_is_a_desync() -> None:
    link, theirs = make_link()
    theirs[shm._OPEN] = 4
    with pytest.raises(TransportError, match="rank 0 starts a forward where rank 1 starts a backward"):
        link.open("backward", False)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_YIELDS", 1)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("looks", range(1, 7))
def test_a_peer_that_comes_and_leaves_between_two_looks_has_come(looks: int) -> None:
    link, _ = make_link()
    link._words = (Coming(looks, {shm._OPEN: 4, shm._ABORTED: 1}), link._words[1])  # type: ignore[assignment]
    assert link.open("forward", False)


class Script:
    """Words of a rank whose first word takes one value after the other, one for each look at it."""

    def __init__(self, opens: list[int]) -> None:
        self._opens = opens

    def __getitem__(self, index: int) -> int:
        if index != shm._OPEN:
            return 0
        return self._opens.pop(0) if len(self._opens) > 1 else self._opens[0]


@pytest.mark.usefixtures("_quick")
def test_a_peer_that_has_not_noticed_an_abort_takes_back_what_it_began() -> None:
    link, _ = make_link()
    link._span = 1
    link.abort()
    backward, forward = 4 * 2 + 2, 4 * 2
    link._words = (Script([backward] * 6 + [4] * 6 + [forward]), link._words[1])  # type: ignore[assignment]
    assert link.open("forward", False)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("looks", range(1, 7))
def test_a_peer_that_left_and_starts_again_is_named_as_having_left(looks: int) -> None:
    link, _ = make_link()
    link._span = 1
    link._words = (Coming(looks, {shm._OPEN: 4 * 2, shm._ABORTED: 1}), link._words[1])  # type: ignore[assignment]
    with pytest.raises(TransportError, match="rank 0 left the forward or backward by an exception"):
        link.open("backward", False)

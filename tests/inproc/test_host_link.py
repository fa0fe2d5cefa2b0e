"""One rank's side of a link through shared memory, the other rank's words being written by the test."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.links import make_links
from helpers.store_exchanges import gone_process

from shardwise import TransportError
from shardwise.collectives import local_peers as shm
from shardwise.collectives.routes import PassKind
from shardwise.collectives.shared_memory import HostLink
from shardwise.consistency import store

FORWARD, BACKWARD = 0, shm._IN_BACKWARD


class Script:
    """Words of a rank that change after a number of looks at them: ``(looks, words)``, the last ones for ever."""

    def __init__(self, *scenes: tuple[int, dict[int, int]]) -> None:
        self._scenes = list(scenes)

    def __getitem__(self, word: int) -> int:
        looks, words = self._scenes[0]
        if len(self._scenes) > 1:
            self._scenes[0] = looks - 1, words
            if looks <= 1:
                del self._scenes[0]
        return words.get(word, 0)


def link_beside(*scenes: tuple[int, dict[int, int]]) -> HostLink:
    """Return the link of rank 1; rank 0 is a script."""
    link = make_links(timeout_s=5.0)[1]
    link.local_peers._words = (Script(*scenes), link.local_peers._words[1])  # type: ignore[assignment]
    return link


def open_all(links: Sequence[HostLink], kind: PassKind) -> list[bool]:
    with ThreadPoolExecutor(len(links)) as threads:
        return list(threads.map(lambda link: link.open(kind, False), links))


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_YIELDS", 1)


# What rank 0 shows when its backward, the first span, raised as soon as all had come; then its next forward waits.
LEFT = {shm._EPOCH: 1, shm._OPEN: shm._stamp(0, 1) | BACKWARD, shm._LEFT: shm._stamp(0, 1)}
STARTS_AGAIN = {**LEFT, shm._OPEN: shm._stamp(1, 1) | FORWARD}


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("later", [0, 1, 2, 3])
@pytest.mark.parametrize("looks", range(1, 12))
def test_a_peer_that_left_a_span_and_starts_again_is_no_desync(looks: int, later: int) -> None:
    """However this rank's looks fall between what the other does: it goes on, or hears that the other has left."""
    link = link_beside((looks, {}), (later, LEFT), (1, STARTS_AGAIN))
    found: TransportError | None = None
    try:
        link.open("backward", False)
        link.abort()  # by the same exception
    except TransportError as error:
        found = error
    assert found is None or "rank 0 raised an exception while" in str(found)
    assert link.open("forward", False)


def test_a_span_that_a_peer_has_left_already_is_entered_all_the_same() -> None:
    """This rank may come to the same exception: it must not be told of the other's first."""
    link = link_beside((1, {}), (1, STARTS_AGAIN))
    assert link.open("backward", False)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("looks", range(1, 8))
def test_a_peer_that_has_not_noticed_an_abort_is_waited_for(looks: int) -> None:
    goes_on = {shm._OPEN: shm._stamp(0, 2) | BACKWARD}
    has_noticed = {**goes_on, shm._EPOCH: 1, shm._LEFT: shm._stamp(0, 2)}
    meets = {**has_noticed, shm._OPEN: shm._stamp(1, 1) | FORWARD}
    link = link_beside((2, goes_on), (looks, goes_on), (looks, has_noticed), (1, meets))
    link.local_peers._pass_number = 1
    link.abort()
    assert link.open("forward", False)


def test_a_peer_in_another_kind_of_span_is_a_desync() -> None:
    link = link_beside((1, {}), (1, {shm._OPEN: shm._stamp(0, 1) | FORWARD}))
    with pytest.raises(TransportError, match="rank 0 starts a forward where rank 1 starts a backward"):
        link.open("backward", False)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 1, 1), (1, 2, 3)], ids=str)
def test_ranks_that_leave_by_exceptions_meet_again(num_ranks: int, times: tuple[int, ...]) -> None:
    """Also when one has left, tried again and left again before another has noticed."""
    links = make_links(num_ranks, timeout_s=5.0)
    assert open_all(links, "backward") == [True] * num_ranks
    for link, number in zip(links, times, strict=False):
        for _ in range(number):
            link.abort()
    newest = max(link.local_peers._epoch for link in links)
    for link in links:
        if link.local_peers._epoch < newest:
            with pytest.raises(TransportError, match="raised an exception while"):
                link.open("forward", False)  # once, however often the others have left
    assert open_all(links, "forward") == [True] * num_ranks


@pytest.mark.usefixtures("_quick")
def test_a_rank_names_the_one_that_was_late_and_the_others_the_one_that_gave_up() -> None:
    links = make_links(3, timeout_s=5.0)
    links[0].local_peers._timeout_s = 0.3  # of 5: it gives up first

    def open_link(link: HostLink) -> str:
        with pytest.raises(TransportError) as info:
            link.open("forward", False)
        return str(info.value)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(open_link, links[:2])
    assert "rank 0 waited 0.3 s for rank 2 at the start of a forward" in first
    assert "rank 0 raised an exception while rank 1 was at the start of a forward" in second
    assert "rank 0 raised an exception while rank 2 was at the start" in open_link(links[2])
    assert open_all(links, "forward") == [True] * 3


def test_a_link_of_some_ranks_names_them_as_the_job_does() -> None:
    links = make_links(pids=[os.getpid(), gone_process()], members=(2, 3))
    with pytest.raises(TransportError, match="rank 3 is gone .*; rank 2 waited .* s for it at the start of a forward"):
        links[0].open("forward", False)

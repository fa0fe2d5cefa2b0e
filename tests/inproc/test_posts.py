"""What ranks post for each other: the rules that agreements, the bulletin, roll calls and meetings of links rest on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.posts import MEMBERS, announce_as, gone_process, make_posts, on_threads

from shardwise.consistency.agreement import Posts, number_posts

LATE = "late"


@pytest.fixture(params=["memory", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    return dist.HashStore() if request.param == "memory" else dist.FileStore(str(tmp_path / "store"), 1)


def test_posts_come_in_rank_order_whoever_is_first(store: dist.Store) -> None:
    def body(posts: Posts) -> dict[int, str]:
        time.sleep(0.02 * (2 - posts.rank))
        posts.post("word", f"of {posts.rank}")
        return posts.collect("word", range(posts.size))

    found = on_threads(body, make_posts(store))
    assert [list(each.items()) for each in found] == [[(rank, f"of {rank}") for rank in range(3)]] * 3


def test_one_deadline_holds_for_all() -> None:
    posts = make_posts(timeout_s=0.8)

    def body(own: Posts) -> dict[int, str]:
        time.sleep(0.5 * own.rank)
        own.post("word", "here")
        return own.collect("word", range(3)) if own.rank == 0 else {}

    assert on_threads(body, posts)[0] == {0: "here", 1: "here"}


def test_who_comes_in_time_is_heard_behind_one_who_does_not(store: dist.Store) -> None:
    posts = make_posts(store)
    posts[2].post("word", "in time")
    assert posts[0].collect("word", [1, 2], 0.05) == {2: "in time"}


def test_posts_are_waited_for_while_their_rank_is_there_or_unknown(store: dist.Store) -> None:
    posts = make_posts(store)
    announce_as(store, MEMBERS[1], gone_process())
    announce_as(store, MEMBERS[0], os.getpid())
    posts[1].post("word", "left before it went")
    start = time.monotonic()
    assert posts[0].collect("word", [1], 60.0) == {1: "left before it went"}
    assert posts[0].collect("other word", [0, 1, 2], 60.0) == {}
    assert time.monotonic() - start < 30, "a rank that is gone was waited for"
    assert posts[0].gone(range(3)) == [1]
    assert posts[0].collect("other word", [0, 2], 0.1) == {}


def test_one_that_is_gone_ends_a_wait_for_others_that_need_it() -> None:
    store = dist.HashStore()
    announce_as(store, MEMBERS[2], gone_process())
    start = time.monotonic()
    assert make_posts(store)[1].collect("verdict", [0], 60.0, needs=range(3)) == {}
    assert time.monotonic() - start < 30


def test_an_absence_names_the_rank_that_is_gone_before_one_that_is_late() -> None:
    store = dist.HashStore()
    posts = make_posts(store)[0]
    assert posts.absence([1, 2], LATE) == LATE
    announce_as(store, MEMBERS[2], gone_process())
    found = posts.absence([1, 2], LATE)
    assert found.startswith("rank 9 is gone (it reported no exception")


def test_nobody_is_known_to_be_gone_without_notes() -> None:
    store = dist.HashStore()
    announce_as(store, MEMBERS[1], gone_process())
    posts = Posts(make_posts(store)[0].store, "posts", MEMBERS, 0, 0.7)
    assert posts.collect("word", [1]) == {}
    assert posts.gone([1]) == []


def test_a_wait_ends_once_what_has_come_is_enough() -> None:
    posts = make_posts()
    posts[1].post("word", "another")
    start = time.monotonic()
    found = posts[0].collect("word", [1, 2], 60.0, lambda found: found.get(1) != "the same")
    assert found == {1: "another"}
    assert time.monotonic() - start < 30


def test_the_first_rank_decides_for_all_and_a_round_deletes_the_one_before_and_nothing_else() -> None:
    def body(posts: Posts) -> list[str | None]:
        posts.post("word", "said")
        return [
            posts.decide("round", number, str(posts.rank), lambda found: "".join(found.values())) for number in (0, 1)
        ]

    posts = make_posts()
    assert on_threads(body, posts) == [["012"] * 2] * 3
    kept = [posts[0].collect(what, range(3), 0.0) for what in ("word", "round/0", "round/0/verdict", "round/1")]
    assert kept == [dict.fromkeys(range(3), "said"), {}, {}, {0: "0", 1: "1", 2: "2"}]


def test_what_the_first_rank_raises_leaves_the_others_without_a_decision() -> None:
    def refuse(found: object) -> str:
        raise ValueError(found)

    def body(posts: Posts) -> str | None:
        try:
            return posts.decide("round", 0, "", refuse, lambda _: posts.rank > 0)
        except ValueError:
            return "raised"

    assert on_threads(body, make_posts()) == ["raised", None, None]


def test_the_nth_opening_of_a_topic_is_one_place_for_all_its_ranks_and_no_others() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        first, second = (number_posts(store, "topic", (3, 4), 0, 1.0) for _ in range(2))
        theirs = number_posts(store, "topic", (3, 4), 1, 1.0)
        others = number_posts(store, "topic", (5, 6), 1, 1.0)
        assert number_posts(store, "another", (3, 4), 0, 1.0).prefix != first.prefix
    finally:
        dist.destroy_process_group()
    assert theirs.prefix == first.prefix
    assert len({first.prefix, second.prefix, others.prefix}) == 3

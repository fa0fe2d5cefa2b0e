"""Which ranks wait for each other: certain only where of two ranks each has begun what the other has not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.consistency.recorder import RankStatus, deadlocked, status_at, statuses_in_words

BARRIER = "torch.distributed.barrier()"
WAITS = RankStatus(0, "a.py:1", BARRIER, "all ranks", still_s=20.0, awaited=("0",), collectives={"0": 5})


def in_barrier(rank: int, number: int = 6, group: str = "0") -> RankStatus:
    return replace(WAITS, rank=rank, awaited=(group,), collectives={"0": 5, group: number})


def polls(rank: int, for_rank: int) -> RankStatus:
    return replace(WAITS, rank=rank, call="save()", waits_for=f"rank {for_rank}", polls=True, awaited=())


def in_forward(rank: int, number: int, collectives: int = 5) -> RankStatus:
    passes, running = {"e": {"forward": number, "backward": 3}}, {"e": "forward"}
    return replace(WAITS, rank=rank, call="f()", passes=passes, running=running, collectives={"0": collectives})


def test_a_save_beside_a_barrier_is_a_deadlock() -> None:
    assert deadlocked([polls(0, 1), in_barrier(1)], 10.0) == [0, 1]


def test_a_rank_that_asks_the_store_again_and_again_polls_also_while_it_asks() -> None:
    user, root = "/home/me/train.py:3 main", "/x/shardwise/consistency"
    asking = [f"{root}/store.py:{line} {name}" for line, name in enumerate(["peek", "_query", "query"])]
    waiting = [user, "/x/shardwise/checkpoint/save.py:1 save", f"{root}/store.py:9 wait_until"]
    event = (0.0, 1, "", 0, "waits for rank 1", "call/1")
    for inner in ([], [*asking, *["/usr/lib/python3.11/threading.py:1 wait"] * 9]):
        found = status_at(0, [*waiting, *inner], event)
        assert (found.call, found.waits_for, found.polls) == ("save()", "rank 1", True)
    assert not status_at(0, [*waiting[:2], "/usr/lib/python3.11/pathlib.py:1 write_bytes"], event).polls


def test_forwards_beside_a_barrier_are_a_deadlock() -> None:
    at_barrier = replace(in_barrier(1), passes={"e": {"forward": 3}})
    assert deadlocked([in_forward(0, 4), at_barrier], 10.0) == [0, 1]


def test_two_collectives_of_one_number_and_group_are_a_deadlock_and_a_sender_beside_its_receiver_is_none() -> None:
    other = replace(in_barrier(1), call="torch.distributed.all_reduce()")
    assert deadlocked([in_barrier(0), other], 10.0) == [0, 1]
    assert deadlocked([in_barrier(0), replace(other, awaited=("1",))], 10.0) == [], "in groups of their own"
    send, receive = (
        replace(in_barrier(rank), call=f"torch.distributed.{name}()") for rank, name in ((0, "send"), (1, "recv"))
    )
    assert deadlocked([send, receive], 10.0) == []


@pytest.mark.parametrize(
    "change",
    [{"waits_for": ""}, {"still_s": 9.0}, {"raised": "ValueError"}],
    ids=["computes", "moved", "raised"],
)
def test_a_rank_that_may_still_go_on_is_waited_for(change: dict[str, str | float]) -> None:
    assert deadlocked([polls(0, 1), replace(in_barrier(1), **change)], 10.0) == []  # pyright: ignore[reportArgumentType]


def test_a_message_that_is_still_on_its_way_is_none() -> None:
    """Ranks 0 and 2 have sent their parts of a broadcast and wait in a barrier; rank 1 sends on to rank 3 for a long time."""
    broadcast = [replace(in_barrier(rank, 5), call="torch.distributed.broadcast()") for rank in (1, 3)]
    assert deadlocked([in_barrier(0), in_barrier(2), *broadcast], 10.0) == []


def test_a_cycle_of_three_groups_is_one_and_ranks_that_wait_for_it_are_in_it() -> None:
    def at(rank: int, mine: str, others: str) -> RankStatus:
        return replace(in_barrier(rank, 1, mine), collectives={mine: 1, others: 0})

    cycle = [at(0, "ab", "ca"), at(1, "bc", "ab"), at(2, "ca", "bc")]
    assert deadlocked(cycle, 10.0) == [0, 1, 2]
    assert deadlocked([*cycle, polls(3, 0), replace(WAITS, rank=4, waits_for="")], 10.0) == [0, 1, 2, 3]
    assert deadlocked(cycle[:2], 10.0) == []


def test_numbers_of_messages_between_pairs_are_no_measure() -> None:
    assert deadlocked([polls(0, 1), in_barrier(1, 12)], 10.0) == []


def test_in_a_join_ranks_run_different_numbers_of_forwards_and_other_calls_are_named() -> None:
    left = replace(in_forward(0, 3), call="Join's exit", running={})
    ahead = in_forward(1, 4, collectives=6)
    assert deadlocked([left, ahead], 10.0) == []
    words = statuses_in_words([left, replace(ahead, call="log()", running={})])
    assert words.startswith("rank 0 is in Join's exit after its 3rd forward")
    assert "different numbers" not in words
    assert words.endswith(
        "ranks that have left a Join serve forwards, backwards and steps only; make other calls after it"
    )

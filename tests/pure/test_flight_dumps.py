"""Records of ranks as dumps of FlightRecorder: what becomes an entry, in which state, and of whom."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.consistency.diagnosis import to_dumps
from shardwise.consistency.recorder import Event, Record, from_lines, to_lines
from shardwise.observe import ERROR, EVERYBODY

MAIN, ENGINE, BOARD = 7, "engine 1", "shardwise/zero/1"
GROUPS = {ENGINE: (0, 1), BOARD: (0, 1)}


def record_of(rank: int, *events: tuple[str, int, str, str], start_s: float = 0.0) -> Record:
    """Return a record of ``events``, one a second: track, count, place, what."""
    made = tuple(Event(start_s + second, MAIN, *event) for second, event in enumerate(events))
    groups = {track: ranks for track, ranks in GROUPS.items() if any(event.track == track for event in made)}
    return Record(rank, 2, "host", 100 + rank, MAIN, 99.0, events=made, groups=groups)


def gathered(count: int, unit: str) -> tuple[tuple[str, int, str, str], ...]:
    return ("", 0, "all-gather", ""), (ENGINE, count, "unshard", unit)


def entries_of(*records: Record, rank: int = 0) -> list[dict[str, Any]]:
    found: Any = to_dumps(records)[rank]["entries"]
    return found


def states_of(*events: tuple[str, int, str, str]) -> list[tuple[int, str]]:
    return [(each["collective_seq_id"], each["state"]) for each in entries_of(record_of(0, *events))]


def test_a_gather_has_ended_once_its_unit_has_waited_and_a_reduction_once_its_gradients_are_set() -> None:
    launched = (*gathered(1, "a"), *gathered(2, "b"), ("", 0, "reduction", "a.weight"), (ENGINE, 3, "reduce", "a"))
    assert states_of(*launched) == [(1, "started"), (2, "started"), (3, "started")]
    ended = (*launched, (ENGINE, 4, "wait", "b"), (ENGINE, 5, "commit", "a"))
    assert states_of(*ended) == [(1, "started"), (2, "completed"), (3, "completed")]
    times = [each["time_discovered_completed_ns"] for each in entries_of(record_of(0, *ended))]
    assert times == [None, 6_000_000_000, 7_000_000_000]


AGREES, WAITS, FAILS = (BOARD, 1, "agreement", "facts"), ("", 0, EVERYBODY, "agree/0"), ("", 0, ERROR, "gone")


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((AGREES,), "completed"),  # who waits says so
        ((AGREES, WAITS), "started"),
        ((AGREES, WAITS, ("", 0, "forward", "")), "completed"),
        ((AGREES, WAITS, FAILS), "started"),
        ((AGREES, WAITS, FAILS, ("", 0, "forward", "")), "started"),
        ((AGREES, FAILS), "completed"),  # all have come, and differ
    ],
)
def test_a_meeting_has_ended_unless_its_rank_waits_or_has_given_up(
    events: tuple[tuple[str, int, str, str], ...], state: str
) -> None:
    assert states_of(*events) == [(1, state)]


def test_what_a_board_launches_has_ended_when_its_rank_has_waited_for_it() -> None:
    launched = ((BOARD, 1, "all-gather", "step 1"), (BOARD, 2, "all-gather", "step 2"), ("", 0, EVERYBODY, "step 1"))
    assert states_of(*launched) == [(1, "started"), (2, "started")]
    assert states_of(*launched, (ENGINE, 1, "enter forward", "a")) == [(1, "completed"), (2, "started")]


def test_what_moves_nothing_is_no_collective_and_sums_of_whole_gradients_are_all_reduces() -> None:
    kept = ((ENGINE, 1, "unshard", "a"), ("", 0, "reduction", "replicas"), (ENGINE, 2, "reduce", "a"))
    joined = (*kept, (ENGINE, 3, "reduce", "b"))  # in the message of a
    found = entries_of(record_of(0, *joined))
    assert [(each["process_group"][1], each["profiling_name"]) for each in found] == [
        ("a", "gloo:all_reduce"),
        ("b", "gloo:all_reduce"),
    ]


SCATTERS = (("", 0, "reduction", "a.weight"), (ENGINE, 1, "reduce", "a"))


@pytest.mark.parametrize("other", [(("", 0, "reduction", "replicas"), *SCATTERS), SCATTERS[1:]])
def test_a_collective_has_one_name_on_all_ranks_whatever_they_remember_of_what_was_launched(
    other: tuple[tuple[str, int, str, str], ...],
) -> None:
    for rank in range(2):
        (entry,) = entries_of(record_of(0, *SCATTERS), record_of(1, *other), rank=rank)
        assert entry["profiling_name"] == "gloo:reduce_scatter_v"


def test_ranks_that_remember_different_parts_of_a_track_are_compared_where_both_do() -> None:
    long = [event for count in range(1, 9) for event in gathered(count, "a")]
    found = to_dumps([record_of(0, *long), record_of(1, *long[8:])])
    for rank in range(2):
        entries: Any = found[rank]["entries"]
        assert [(each["record_id"], each["collective_seq_id"]) for each in entries] == [(0, 5), (1, 6), (2, 7), (3, 8)]


def test_what_a_rank_may_have_forgotten_is_not_said_to_be_missing() -> None:
    early = record_of(0, AGREES, ("", 0, "forward", ""), (BOARD, 2, "agreement", "facts"))
    assert [each["collective_seq_id"] for each in entries_of(early, record_of(1, ("", 0, "x", ""), start_s=1.5))] == [2]
    assert len(entries_of(early, record_of(1))) == 2  # it has never done anything


def test_a_group_has_all_of_its_ranks_also_those_that_have_said_nothing() -> None:
    found = to_dumps([record_of(0, *gathered(1, "a")), record_of(1)])
    for rank in range(2):
        assert found[rank]["pg_config"] == {ENGINE: {"name": ENGINE, "desc": "shardwise", "ranks": "[0, 1]"}}
    status: Any = found[0]["pg_status"]
    assert status[ENGINE]["last_enqueued_collective"] == 1
    assert status[ENGINE]["last_completed_collective"] == -1


def test_a_record_keeps_the_groups_of_its_tracks() -> None:
    record = record_of(0, *gathered(1, "a"), AGREES)
    assert from_lines(to_lines(record)) == record

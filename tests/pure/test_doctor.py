"""Records of ranks, merged: where they part, who failed first, who waits for whom."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.consistency.recorder import (
    NOTHING_MOVES,
    Event,
    Reason,
    Record,
    Stack,
    diagnose,
    from_text,
    in_words,
    lines_of,
    own_line,
    to_text,
)
from shardwise.observe import ERROR

MAIN = 7
TRACK = "engine 1"


def events_of(texts: list[str], start: int = 0, thread: int = MAIN) -> tuple[Event, ...]:
    """Return the events of a track from count ``start + 1`` on, one a second."""
    return tuple(
        Event(float(count), thread, TRACK, count, place, "unit")
        for count, place in enumerate(texts, 1)
        if count > start
    )


def record_of(
    rank: int, events: tuple[Event, ...], reason: str = f"{NOTHING_MOVES} for 30 s", num_ranks: int = 2
) -> Record:
    last = events[-1].time_s if events else 0.0
    stack = Stack(last + 1, MAIN, "MainThread", ("/home/me/train.py:12 main", "/site/torch/wait.py:9 wait"))
    reasons = (Reason(last + 1, reason),)
    return Record(rank, num_ranks, "host", 100 + rank, MAIN, last + 1, reasons, (stack,), events)


def note(time_s: float, place: str, what: str = "") -> Event:
    return Event(time_s, MAIN, "", 0, place, what)


def test_a_rank_without_a_record_is_missing_and_named_first() -> None:
    found = diagnose([record_of(0, events_of(["unshard"]), num_ranks=3), record_of(2, (), num_ranks=3)])
    assert found.missing == (1,)
    lines = list(in_words(found))
    assert "rank 1" in lines[lines.index("what happened") + 1]


def test_the_report_of_who_waits_for_whom_is_what_happened() -> None:
    said = (
        "nothing has moved for 30 s: rank 0 is in barrier() (a.py:3, waits for all ranks); rank 1 is in save() (a.py:9)"
    )
    texts = ("nothing has moved for 30 s", said)
    found = diagnose([record_of(rank, events_of(["unshard"]), text) for rank, text in enumerate(texts)])
    lines = list(in_words(found))
    assert lines[lines.index("what happened") + 1] == f"  {said}"


def test_an_error_that_is_not_about_others_comes_first() -> None:
    lost = (*events_of(["reduce"]), note(5.0, ERROR, "TransportError: rank 1 is gone"))
    raised = record_of(1, events_of(["reduce"]), "ValueError: a bug [train.py:40]")
    found = diagnose([record_of(0, lost, "TransportError: rank 1 is gone"), raised])
    assert [each.rank for each in found.failures] == [1, 0]
    assert any("rank 1 first" in line and "ValueError: a bug" in line for line in in_words(found))


def test_an_error_about_another_rank_comes_after_the_error_of_that_rank_whatever_their_clocks_say() -> None:
    early = record_of(0, (note(1.0, ERROR, "TransportError: rank 1 left forward by an exception"),))
    late = record_of(1, (note(2.0, ERROR, "ValueError: injected"),))
    assert [each.rank for each in diagnose([early, late]).failures] == [1, 0]


def test_trouble_that_has_passed_is_not_the_failure_of_now() -> None:
    record = record_of(
        0, (note(1.0, ERROR, "CheckpointError: disk full"), *events_of(["unshard"] * 200)), "ValueError: x"
    )
    early = Reason(1.0, "CheckpointError: disk full")
    found = diagnose([replace(record, reasons=(early, *record.reasons))])
    assert [each.text for each in found.failures] == ["ValueError: x"]


def test_a_record_is_read_as_it_was_written() -> None:
    whole = record_of(0, events_of(["unshard", "reduce"]))
    assert from_text(to_text(whole)) == whole


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": "x"}', '{"version": 1}', "null\n[1]"])
def test_what_is_no_record_is_none(text: str) -> None:
    assert from_text(text) is None


def test_of_two_records_of_a_rank_the_newer_counts() -> None:
    old, new = record_of(0, events_of(["unshard"])), record_of(0, events_of(["unshard", "reduce"]))
    assert diagnose([new, old]).stacks[0].time_s == new.stacks[0].time_s


def test_own_code_is_the_innermost_line_that_is_not_of_a_library() -> None:
    frames = ("/home/me/train.py:3 main", "/home/me/model.py:8 forward", "/site/torch/nn.py:1 call")
    assert own_line(frames) == "/home/me/model.py:8 forward, in call()"
    assert own_line(()) == "nowhere"


def test_a_line_of_the_package_is_never_own_code_and_one_in_a_folder_of_its_name_is() -> None:
    package = str(Path(shardwise.__file__).parent)
    ours = (f"{package}/consistency/agreement.py:9 collect", "/site/torch/store.py:5 set")
    assert own_line(ours) == "outside your code, in set()"
    assert own_line(("/home/me/shardwise/train.py:3 main", *ours)) == "/home/me/shardwise/train.py:3 main, in set()"
    assert own_line(("/elsewhere/shardwise/consistency/agreement.py:9 collect",)) == "outside your code, in collect()"
    trainer = "/usr/lib/python3.11/site-packages/some/trainer.py:7 fit"
    assert own_line((trainer, *ours)) == f"{trainer}, in set()"
    assert own_line(("/home/me/train.py:3 main", trainer)) == "/home/me/train.py:3 main, in fit()"
    program = f"{package}/recipes/loop.py:4 train"
    assert own_line((program, *ours)) == f"shardwise's own program, {program}, in set()"
    assert own_line(("<string>:2 <module>", *ours)) == "<string>:2 <module>, in set()"


def test_the_users_line_is_found_outside_any_number_of_lines_of_a_library() -> None:
    library: dict[str, Any] = {}
    code = "def call(times, look):\n    return call(times - 1, look) if times else look()\n"
    exec(compile(code, "/site/torch/nn.py", "exec"), library)
    frames = library["call"](200, lambda: lines_of(sys._getframe().f_back))
    assert len(frames) <= 80
    assert "test_the_users_line_is_found" in own_line(frames)

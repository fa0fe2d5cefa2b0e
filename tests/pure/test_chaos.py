"""Chaos judges how jobs end: what may pass, and what never may."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from chaos.campaign import diverging, faulty, matrix, places_of, transacting
from chaos.job import Ending, Job
from chaos.judge import judge
from chaos.program import APIS, Program

SAME = ("aa", "bb")
PROGRAM = Program("fully_shard", "auto")
KILL = faulty(PROGRAM, 2, "kill", "forward", rank=1)
RAISE = faulty(PROGRAM, 2, "raise", "forward", rank=1)
LATE = faulty(PROGRAM, 2, "late", "forward", rank=1)
GONE = Ending(-9)
NAMED = Ending(0, error="DesyncError", is_ours=True, text="rank 1 is gone", seconds=0.5)
RAISED = Ending(0, error="ValueError", text="injected: raise ValueError of rank 1", seconds=0.1)
WHOLE = (Ending(0, "aa", seconds=1.0), Ending(0, "bb", seconds=1.0))


def wrong(job: Job, *endings: Ending) -> str:
    return "; ".join(judge(job, endings, SAME).faults)


def test_named_errors_and_the_injected_exception_itself_are_well() -> None:
    assert wrong(KILL, NAMED, GONE) == ""
    assert wrong(RAISE, NAMED, RAISED) == ""
    assert judge(LATE, WHOLE, SAME).how == "recovered"


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (Ending(None), "rank 0: hung"),
        (Ending(-6), "rank 0: ended by signal 6"),
        (Ending(1), "rank 0: ended with code 1 and no word"),
        (Ending(0, error="RuntimeError", text="[pair.cc:553] Connection closed"), "rank 0: raw RuntimeError: [pair.cc"),
        (replace(NAMED, text="rank 0 failed: connection closed"), "rank 0: does not name rank 1"),
        (Ending(0, "other", seconds=1.0), "rank 0: returned other numbers"),
    ],
)
def test_a_rank_that_hangs_aborts_or_gives_raw_or_nameless_text_is_wrong(ending: Ending, reason: str) -> None:
    assert wrong(KILL, ending, GONE).startswith(reason)


def test_other_numbers_on_every_rank_are_wrong_unless_the_divergence_is_each_ranks_own_affair() -> None:
    other = (Ending(0, "cc", seconds=1.0), Ending(0, "dd", seconds=1.0))
    assert "with other numbers" in wrong(LATE, *other)
    assert "with other numbers" in wrong(diverging(PROGRAM, 2, "order"), *other)


def test_a_rank_that_was_to_be_killed_and_lives_is_wrong() -> None:
    assert "rank 1: ended with code 0" in wrong(KILL, NAMED, WHOLE[1])


def test_what_ddp_itself_raises_is_the_users_and_what_comes_from_our_optimizer_is_not() -> None:
    job = faulty(Program("zero1", "auto"), 2, "kill", "backward", rank=1)
    raw = Ending(0, error="RuntimeError", text="Connection closed", seconds=0.5)
    known = replace(raw, text="Connection closed\nshardwise: rank 1 is gone")
    assert wrong(job, replace(known, trace="torch/nn/parallel/distributed.py"), GONE) == ""
    assert "does not name rank 1" in wrong(job, replace(raw, trace="torch/nn/parallel/distributed.py"), GONE)
    assert "raw" in wrong(job, replace(raw, trace="shardwise/zero/optimizer.py"), GONE)
    assert "raw" in wrong(KILL, replace(raw, trace="torch/nn/parallel/distributed.py"), GONE)


def test_the_matrix_has_every_place_of_every_api() -> None:
    jobs = list(islice(matrix((2, 4)), None))
    for api in APIS:
        program = Program(api, "auto")
        killed = {job.fault.at for job in jobs if job.fault and job.program == program and job.name == "kill"}
        assert killed == set(places_of(program, 4)) | set(places_of(program, 2))


def test_an_exception_in_a_transaction_that_ends_a_rank_is_wrong() -> None:
    retried = transacting(faulty(PROGRAM, 2, "raise", "forward", rank=1), "retry")
    assert "rank 0: the transaction did not undo it" in wrong(retried, NAMED, NAMED)
    assert wrong(retried, *WHOLE) == ""
    killed = transacting(faulty(PROGRAM, 2, "kill", "forward", rank=1), "retry")
    assert wrong(killed, NAMED, GONE) == ""

"""What ranks write down when something fails: by itself, by every way in which a job can fail, and without harm to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from chaos.program import DIVERGENCES, Program
from chaos.rank_program import train
from helpers.forked_ranks import run_script
from helpers.jobs import Job
from helpers.ranks import on_ranks

import shardwise
from shardwise import DesyncError, observe
from shardwise.cli.main import main
from shardwise.consistency.recorder import Diagnosis, diagnose, find_records, in_words
from shardwise.testing import WorkerPool, faults

PROGRAM = Program("fully_shard", "auto")


def recorded(folder: str, fault: faults.Fault | None, divergence: str = "", wait_s: float = 30.0) -> None:
    shardwise.set_wait_report(wait_s)  # the next test sets it back: helpers/ranks.py
    program = DIVERGENCES[divergence](PROGRAM) if divergence and dist.get_rank() == 1 else PROGRAM
    with shardwise.record(Path(folder) / "black_box"):
        if fault is None:
            train(program, Path(folder))
            return
        with faults.inject(fault):
            train(program, Path(folder))


def diagnosis_of(folder: Path) -> Diagnosis:
    return diagnose(find_records(folder)[0])


def lines_of(diagnosis: Diagnosis) -> str:
    return "\n".join(in_words(diagnosis))


def test_a_run_that_goes_well_writes_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(recorded, num_ranks=2, folder=str(tmp_path), fault=None)
    assert not (tmp_path / "black_box").exists()


def test_a_killed_rank_is_missing_and_the_others_say_that_they_waited_for_it(tmp_path: Path) -> None:
    fault = faults.Fault("kill", at="backward", rank=1, step=2, call=3)
    with Job(recorded, str(tmp_path), fault, num_ranks=3) as job:
        assert [job.outcome(rank).error is not None for rank in (0, 2)] == [True, True]
    found = diagnosis_of(tmp_path)
    assert found.missing == (1,)
    assert "rank 1 is gone" in found.failures[0].text


def test_the_rank_that_raised_is_named_first_with_its_line(pool: WorkerPool, tmp_path: Path) -> None:
    fault = faults.Fault("raise", at="backward", rank=1, step=2, call=3, error=ValueError)
    pool.attempt(recorded, num_ranks=2, folder=str(tmp_path), fault=fault)
    found = diagnosis_of(tmp_path)
    assert [each.rank for each in found.failures] == [1, 0]
    assert "ValueError: injected" in found.failures[0].text
    assert "chaos/rank_program.py" in found.failures[0].text  # the line of the program, not that of the library


def test_the_error_that_names_where_ranks_differ_is_the_failure(pool: WorkerPool, tmp_path: Path) -> None:
    pool.attempt(recorded, num_ranks=2, folder=str(tmp_path), fault=None, divergence="order")
    assert "ranks have different collectives in a step" in diagnosis_of(tmp_path).failures[0].text


def test_ranks_that_wait_in_silence_write_by_themselves_and_the_late_one_is_blamed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    fault = faults.Fault("delay", at="forward", rank=1, step=2, call=3, seconds=3)
    pool.run(recorded, num_ranks=2, folder=str(tmp_path), fault=fault, wait_s=1.0)
    found = diagnosis_of(tmp_path)
    texts = [reasons[0].text for reasons in found.reasons.values()]
    assert all(text.startswith("nothing has moved for ") for text in texts), texts
    assert "waits for rank 1" in lines_of(found)
    assert "in strike()" in lines_of(found)


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_folder_that_cannot_be_written_to_hurts_nobody(tmp_path: Path, is_gone: bool) -> None:
    place = tmp_path / "file"
    place.write_text("not a folder")
    with shardwise.record(place / "below" if is_gone else place) as recorder:
        assert recorder.write("a test") is None
        with pytest.raises(DesyncError, match="^mine$"):
            raise DesyncError("mine")


def test_an_error_of_ours_is_written_where_it_is_made_and_wrong_arguments_are_not(tmp_path: Path) -> None:
    with shardwise.record(tmp_path):
        shardwise.ConfigError("wrong")
        assert not list(tmp_path.iterdir())
        DesyncError("ranks differ")
        (found,) = find_records(tmp_path)[0]
    assert found.reasons[0].text == "DesyncError: ranks differ"
    assert "test_an_error_of_ours" in found.stacks[0].frames[-1]


def test_a_forked_child_does_not_write_as_its_parent(tmp_path: Path) -> None:
    with shardwise.record(tmp_path):
        child = os.fork()
        if child == 0:
            DesyncError("of the child")
            os._exit(0)
        os.waitpid(child, 0)
        assert not list(tmp_path.iterdir())


def test_the_ring_is_bounded_and_so_is_the_file(tmp_path: Path) -> None:
    with shardwise.record(tmp_path) as recorder:
        for number in range(3 * observe.NUM_EVENTS):
            observe.note("a place", f"{number} " + "x" * 2000)
        for _ in range(18):
            path = recorder.write("again")
    assert path is not None
    assert path.stat().st_size < 4 * 2**20
    assert len(observe.entries()) == observe.NUM_EVENTS


def test_what_a_process_did_before_it_recorded_is_not_written(tmp_path: Path) -> None:
    observe.note("before")
    with shardwise.record(tmp_path) as recorder:
        observe.note("within")
        recorder.write("a test")
    (found,) = find_records(tmp_path)[0]
    assert [event.place for event in found.events] == ["within"]


UNCAUGHT = """
import shardwise
shardwise.record({!r})
raise KeyError("a bug")
"""


def test_an_exception_that_nobody_catches_is_written_and_shown_as_ever(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNCAUGHT.format(str(tmp_path)))
    ended = run_script(script, 1)
    assert ended.code == 1
    assert ended.err.endswith("KeyError: 'a bug'\n")
    (found,) = find_records(tmp_path)[0]
    assert found.reasons[0].text.startswith("KeyError: 'a bug'")


def test_diagnose_prints_the_report_and_says_what_an_empty_folder_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "nothing has failed there, or its ranks wrote elsewhere" in capsys.readouterr().err
    with shardwise.record(tmp_path / "black_box") as recorder:
        recorder.write("a test")
    assert main(["diagnose", str(tmp_path)]) == 0


@on_ranks(2)
def test_a_new_start_puts_the_records_of_the_last_one_aside(tmp_path: Path) -> None:
    for reason in ("first", "second"):
        with shardwise.record(tmp_path) as recorder:
            recorder.write(reason)
    with shardwise.record(tmp_path) as recorder:
        dist.barrier()
        found, is_before = find_records(tmp_path)
        assert is_before
        assert [record.reasons[0].text for record in found] == ["second", "second"]
        dist.barrier()
        recorder.write("third")
        dist.barrier()
        found, is_before = find_records(tmp_path)
        assert not is_before
        assert [record.reasons[0].text for record in found] == ["third", "third"]
        dist.barrier()

"""Dumps of FlightRecorder made from records: torch's own analyzer reads them, and names who is missing where."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from chaos.program import DIVERGENCES, Door, Program
from chaos.rank_program import train
from helpers.forked_ranks import run_script
from helpers.jobs import Job, tell
from torch import nn
from torch.distributed.flight_recorder.components.types import Collective
from torch.torch_version import TorchVersion

import shardwise
from shardwise.checkpoint import save
from shardwise.cli.main import ANALYZER, main, write_dumps
from shardwise.consistency.recorder import Event, Record, find_records, to_lines
from shardwise.testing import WorkerPool, faults


def recorded(
    folder: str, door: Door, divergence: str = "", fault: faults.Fault | None = None, stall_s: float | None = None
) -> None:
    program = Program(door, "auto")
    if divergence and dist.get_rank() == 1:
        program = DIVERGENCES[divergence](program)
    with shardwise.record(folder, stall_s=stall_s) as recorder:
        if fault is None:
            train(program, Path(folder))
            recorder.write("a test")
            return
        with faults.inject(fault):
            train(program, Path(folder))


class AnalyzerFailed(Exception):
    """The text is what the analyzer printed."""


def analyzed(folder: Path, *options: str) -> tuple[str, list[Collective]]:
    """Return what torch's analyzer says of the dumps of the records in ``folder``, and the collectives that it has matched."""
    out, found = folder / "dumps", folder / "found"
    assert main(["diagnose", str(folder), "--flight-recorder", str(out)]) == 0
    script = folder / "analyze.py"
    words = [ANALYZER, str(out), "-o", str(found), *options]
    script.write_text(f"import runpy, sys\nsys.argv = {words!r}\nrunpy.run_module({ANALYZER!r}, run_name='__main__')\n")
    run = run_script(script, 1)
    if run.code:
        raise AnalyzerFailed(run.err)
    _, database = pickle.loads(found.read_bytes())
    return run.out + run.err, database.collectives


def missing(collectives: list[Collective]) -> list[tuple[int, str, set[int]]]:
    """Return count, what, and the ranks that were not there, of each collective without all of its ranks."""
    return [
        (each.collective_seq_id, each.pg_desc.rpartition(":")[2], each.missing_ranks)
        for each in collectives
        if each.missing_ranks
    ]


# That of torch 2.11 asserts that it reads of NCCL.
reads_gloo = pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="torch's analyzer takes no gloo")


@reads_gloo
@pytest.mark.parametrize(
    ("door", "num_ranks", "kinds"),
    [
        ("fully_shard", 2, {"all_gather_v", "reduce_scatter_v"}),
        ("hsdp", 4, {"all_gather_v", "reduce_scatter_v"}),
        ("replicate", 2, {"all_gather_v", "all_reduce"}),  # the gathers are meetings of a checkpoint
        ("zero2", 2, {"all_gather_v", "reduce_scatter_v", "barrier"}),
    ],
)
def test_the_collectives_of_a_run_that_goes_well_match(
    pool: WorkerPool, tmp_path: Path, door: Door, num_ranks: int, kinds: set[str]
) -> None:
    pool.run(recorded, num_ranks=num_ranks, folder=str(tmp_path), door=door)
    for record in find_records(tmp_path)[0]:
        assert set(record.groups) == {event.track for event in record.events if event.track}
    text, collectives = analyzed(tmp_path)
    assert "missing ranks" not in text
    assert "error msg" not in text
    assert len(collectives) > 12
    assert all(each.pass_check and each.expected_ranks == set(range(num_ranks)) for each in collectives)
    assert {each.collective_name for each in collectives} == {f"gloo:{kind}" for kind in kinds}
    gathered = {each.pg_desc.rpartition(":")[2] for each in collectives if each.pg_desc.startswith("engine")}
    assert gathered == (set() if door == "zero2" else {"blocks.0", "blocks.1", "blocks.2"})  # the root has nothing


@reads_gloo
def test_ranks_that_gather_other_units_at_one_count_are_not_said_to_have_met(pool: WorkerPool, tmp_path: Path) -> None:
    pool.attempt(recorded, num_ranks=2, folder=str(tmp_path), door="fully_shard", divergence="order")
    text, collectives = analyzed(tmp_path)
    assert "Not all ranks joining collective, sequence number: 5" in text
    first, *_ = missing(collectives)
    assert first == (5, "blocks.0", {1})
    assert (5, "blocks.1", {0}) in missing(collectives)


@reads_gloo
def test_the_rank_that_has_not_come_to_a_gather_is_missing_there(pool: WorkerPool, tmp_path: Path) -> None:
    fault = faults.Fault("delay", at="forward", rank=1, step=2, call=3, seconds=3)
    pool.run(recorded, num_ranks=2, folder=str(tmp_path), door="fully_shard", fault=fault, stall_s=1)
    text, collectives = analyzed(tmp_path)
    assert {(what, *ranks) for _, what, ranks in missing(collectives)} == {("blocks.2", 1)}
    (launched,) = [each for each in collectives if each.mismatch_collectives]  # the one before: not waited for yet
    assert launched.pg_desc.endswith(":blocks.1")
    assert "Culprit rank 1; Error type: COLLECTIVE_STATE_MISMATCH" in text


def saves_alone(folder: str) -> None:
    model = shardwise.fully_shard(nn.Linear(4, 4))
    with shardwise.record(folder):
        tell("waiting")
        if dist.get_rank() == 0:
            save(Path(folder) / "checkpoint", {"model": model}, step=1)
        time.sleep(60)


def test_a_rank_that_never_comes_to_a_meeting_is_missing_although_it_has_done_nothing(tmp_path: Path) -> None:
    job = Job(saves_alone, str(tmp_path), num_ranks=2)
    try:
        for rank in range(2):
            assert job.message(rank) == "waiting"
        time.sleep(0.5)
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("rank-*.jsonl"))) < 2:
            for pid in job.pids:
                os.kill(pid, signal.SIGUSR1)
            assert time.monotonic() < deadline
            time.sleep(0.2)
        _, collectives = analyzed(tmp_path)
    finally:
        for process in job.processes:
            process.kill()
        with job:
            pass
    assert missing(collectives) == [(1, "meeting", {1})]
    assert collectives[0].collective_state == "started"


def test_of_a_rank_without_a_record_the_analyzer_says_that_its_dump_is_missing(tmp_path: Path) -> None:
    group = {"engine 1": (0, 1)}
    events = (Event(1.0, 7, "", 0, "all-gather", ""), Event(1.0, 7, "engine 1", 1, "unshard", "blocks.0"))
    record = Record(0, 2, "host", 1, 7, 2.0, events=events, groups=group)
    (tmp_path / "rank-00000.jsonl").write_text("\n".join(to_lines(record)))
    with pytest.raises(AnalyzerFailed, match=r"Missing dump files from ranks \{1\}"):
        analyzed(tmp_path)
    text, _ = analyzed(tmp_path, "--allow-incomplete-ranks")
    assert "we missed FR dumps from ranks ({1})" in text


def test_dumps_of_an_earlier_call_go_and_what_else_lies_there_stays(tmp_path: Path) -> None:
    records = [Record(rank, 2, "host", 1, 7, 2.0) for rank in range(2)]
    (tmp_path / "notes").touch()
    assert write_dumps(records, tmp_path) == 2
    assert write_dumps(records[:1], tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "shardwise_rank_0"}

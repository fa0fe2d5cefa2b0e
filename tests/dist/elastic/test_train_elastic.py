"""``shardwise train --elastic``: a run whose ranks are killed has the bits and the figures of one that was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.commands import COMMAND, Ended, options
from helpers.forked_commands import run_forked
from helpers.mortal_model import CONTEXT, MORTAL
from helpers.runs import copy_cut_back, metrics_of, restarts_of, write_text

from shardwise.checkpoint.convert import CheckpointSource, compare_tensors
from shardwise.checkpoint.files import Files, list_checkpoints
from shardwise.cli.main import main

STEPS = 8


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def train(text: Path, run: Path, *more: str, kills: str = "", **changes: Any) -> Ended:
    small = {"steps": STEPS, "batch": 12, "reproducible": 12, "log_every": 1, "eval_every": 4, "save_every": 2}
    words = [
        *COMMAND,
        "--model-from",
        "helpers.mortal_model:build",
        "--context",
        str(CONTEXT),
        "--data",
        str(text),
        "--out",
        str(run),
    ]
    left_out = ("--layers", "--width", "--heads", "--context")
    pairs = [*zip(*[iter(options(**({"sample_bytes": 0, "keep": 9} | small | changes)))] * 2, strict=True)]
    words += [word for pair in pairs if pair[0] not in left_out for word in pair]
    return run_forked([*words, *more], None, TMPDIR=str(run.parent), **{MORTAL: kills})


def figures(run: Path) -> list[tuple[object, object, object]]:
    return [(line["kind"], line["step"], line["loss"]) for line in metrics_of(run)]


def differing(run: Path, other: Path) -> list[str]:
    places = [list_checkpoints(Files(), each / "checkpoints") for each in (run, other)]
    steps = [[each.step for each in place] for place in places]
    assert steps[0][-1] == steps[1][-1]
    assert set(steps[0]) <= set(steps[1]), "a save that a loss cuts leaves no checkpoint"
    first, second = (CheckpointSource.open(each[-1].path) for each in places)
    return [each.name for each in compare_tensors(first, second)]


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert train(text, run, nproc=1).code == 0
    return run


def test_ranks_that_are_killed_leave_a_run_with_the_bits_of_one_rank(text: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = train(text, run, "--elastic", nproc=4, kills="2:5 0:14")  # in steps 1 and 3 or 4
    assert ended.code == 0, ended.err
    assert figures(run) == figures(whole)
    assert differing(run, whole) == []
    found = restarts_of(run)
    assert [each["ranks"] for each in found] == [3, 2]
    causes = ["process 2 (rank 2 of 4) was ended by SIGKILL", "process 0 (rank 0 of 3) was ended by SIGKILL"]
    assert [each["cause"] for each in found] == causes
    assert f"restart 2: {causes[1]}; going on after step" in ended.out


@pytest.mark.parametrize("joins", [[], pytest.param(["--max-restarts", "1"], marks=pytest.mark.exhaustive)])
def test_what_follows_the_last_step_is_made_again(joins: list[str], text: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = train(text, run, "--elastic", *joins, nproc=3, sample_bytes=8, kills="1:sample")
    assert ended.code == 0, ended.err
    assert f"2 ranks go on after step {STEPS}" in ended.err
    assert "A sample from the trained model" in ended.out
    assert differing(run, whole) == []


def test_processes_that_join_a_run_that_was_resumed_leave_it_so_too(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copy_cut_back(whole, run, 4)
    words = ["--resume", str(run), "--model-from", "helpers.mortal_model:build", "--nproc", "2"]
    ended = run_forked([*COMMAND, *words, "--elastic", "--max-restarts", "1"], None, **{MORTAL: "0:2 1:8"})
    assert ended.code == 0, ended.err
    assert "resuming after step 4" in ended.out
    assert differing(run, whole) == []


def test_an_error_ends_the_run_and_is_said_once(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = train(text, run, "--elastic", nproc=2, lr=1e30, reproducible=0, kills="0:1")
    assert ended.code == 1
    assert ended.err.count("training has diverged") == 1
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--record-digests", "--reproducible", "4"], "--record-digests does not go with --elastic"),
        (["--tp", "2", "--nproc", "2"], "--tp does not go with --elastic"),
        (["--trace", "2"], "--trace does not go with --elastic"),
        (["--memory", "1GiB"], "--memory does not go with --elastic"),
    ],
)
def test_what_needs_the_ranks_of_the_start_is_refused(
    words: list[str], expected: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "--device", "cpu", "--elastic", "--data", str(text), "--out", str(run), *words]) == 2
    assert expected in capsys.readouterr().err
    assert not run.exists()

"""Terminals that break, names that no terminal should see, signals to the launcher, and processes that cannot take part."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.commands import COMMAND, children, clean_environment, options, wait_for_training
from helpers.forked_commands import start_forked
from helpers.ranks import on_ranks
from helpers.runs import metrics_of, write_text

from shardwise import StateError, fully_shard
from shardwise.checkpoint import finish, save
from shardwise.cli.main import main
from shardwise.formatting import plain


def _assert_went_on(run: Path, code: int | None, error: str) -> None:
    assert code == 0, error
    assert error.count("standard output was closed; the work goes on without it") == 1
    assert "restart" not in error
    assert metrics_of(run)[-1]["step"] == 20


@pytest.mark.parametrize(("num_ranks", "more"), [(1, []), (2, ["--max-restarts", "2"])])
def test_a_run_goes_on_where_nobody_reads_its_output_any_more(tmp_path: Path, num_ranks: int, more: list[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    os.mkfifo(out)
    command = [*COMMAND, *options(data=write_text(tmp_path), out=run, nproc=num_ranks), *more]
    with start_forked(command, out=out) as process:
        with open(out) as read:
            read.readline()
        process.wait()
        _assert_went_on(run, process.returncode, process.errors())


def test_a_run_needs_no_output_no_utf8_and_no_name_in_utf8(tmp_path: Path) -> None:
    run = os.fsencode(tmp_path) + b"/run\xff"
    folder = Path(os.fsdecode(run))
    done = None
    begins = [*options(data=write_text(tmp_path), nproc=1, steps=4), "--out"]
    resumes = ["--nproc", "1", "--steps"]
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for close, words in (
        (b">&- 2>&-", [*map(os.fsencode, begins), run]),
        (b"", [*map(os.fsencode, resumes), b"8", b"--resume", run]),
    ):
        command = [b"sh", b"-c", b'exec "$@" ' + close, b"sh", *map(os.fsencode, COMMAND), *words]
        done = subprocess.run(command, env=clean_environment() | ascii_alone, capture_output=True, check=False)
        assert done.returncode == 0, (close, done.stderr.decode()[-1500:])
    assert metrics_of(folder)[-1]["step"] == 8
    assert done is not None
    assert b"run\\udcff" in done.stdout
    assert done.stderr == b""  # in interpreters of their own: other tests fork their commands


def test_no_escape_in_a_name_reaches_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "w\x1b]0;title\x07\x1b[2J\x9b"
    save(tmp_path / "run", {"model": {evil: torch.ones(2), "value\x1b[2J": 3}}, step=1)
    finish(tmp_path / "run")
    assert main(["checkpoint", "show", str(tmp_path / "run"), "--sums"]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    assert main(["checkpoint", "show", f"{tmp_path}/{evil}"]) == 2
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert not [char for char in text if not char.isprintable() and char != "\n"]
        assert plain(evil)[:12] in text


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_rank_leaves_with_the_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = options(data=write_text(tmp_path), out=run, nproc=2, steps=1_000_000, save_every=5)
    with start_forked([*COMMAND, *words]) as process:
        wait_for_training(process, run)
        stopped = children(process.pid)[-1]
        os.kill(stopped, signal.SIGSTOP)
        while _state_of(stopped) != "T":
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=90)[1]
    assert process.returncode == 128 + signal.SIGTERM, error


def _forward_in_child(model: torch.nn.Module, pipe: Any) -> None:
    try:
        model(torch.ones(1, 4))
    except StateError as error:
        pipe.send(str(error))
    os._exit(0)


@on_ranks(2)
def test_a_forked_child_is_told_that_it_cannot_run_the_model() -> None:
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    model(torch.ones(1, 4))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_forward_in_child, args=(model, theirs))
    child.start()
    theirs.close()
    assert f"was forked from rank {dist.get_rank()} and cannot run its sharded modules" in ours.recv()
    child.join()
    model(torch.ones(1, 4))

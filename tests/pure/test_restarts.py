"""When a run is started again, on how many ranks, and whose run it may take for its own."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import pytest
from helpers.runs import write_text

from shardwise import ConfigError
from shardwise.checkpoint import CheckpointError
from shardwise.cli import EXIT_CONFIG, EXIT_FAILED, EXIT_FINAL
from shardwise.cli.local_ranks import RestartPolicy, ranks_for, why_not
from shardwise.cli.main import build_parser
from shardwise.cli.train import read_train_request, would_fail_again
from shardwise.loop.launch import Ended, FailedRank
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.run_folder import Restart, Start, note_restart, prepare_run
from shardwise.recipes.train import DivergedError

THREE = RestartPolicy(3, None)


def _ended(*codes: int) -> Ended:
    return Ended(FailedRank(0, codes[0]), codes)


@pytest.mark.parametrize("code", [EXIT_CONFIG, EXIT_FINAL])
def test_what_would_end_alike_is_not_started_again(code: int) -> None:
    assert why_not(_ended(-9, code), THREE, 0) == "a restart would end alike"
    assert why_not(_ended(-9, EXIT_FAILED), THREE, 0) is None


def test_restarts_end_with_their_number() -> None:
    assert why_not(_ended(-9), THREE, 2) is None
    assert why_not(_ended(-9), THREE, 3) == "--max-restarts 3"


def test_ranks_that_are_left_are_as_many_as_the_options_can_use() -> None:
    config = TrainConfig(batch=24)
    assert ranks_for(config, 8, 1, 4) == 6  # 7 do not divide the batch
    assert ranks_for(config, 8, 1, 7) == 8  # too few are left
    assert ranks_for(config, 8, 0, 4) == 8  # none was killed
    assert ranks_for(config, 8, 3, None) == 8
    hybrid = dataclasses.replace(config, shard="hsdp")
    assert ranks_for(hybrid, 8, 1, 2) == 6
    assert ranks_for(hybrid, 4, 1, 2) == 4  # neither 3 nor 2 can be laid out


def test_errors_that_would_come_again() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    failed = CheckpointError("not saved")
    failed.__cause__ = full
    assert all(map(would_fail_again, (full, failed, DivergedError("nan"), BrokenPipeError())))
    assert not any(map(would_fail_again, (MemoryError(), ConnectionResetError(), CheckpointError("rank 1 is gone"))))


def test_restarts_are_written_down(tmp_path: Path) -> None:
    note_restart(tmp_path, Restart(1, "rank 1 was ended by SIGKILL"), 12, 2)
    found = json.loads((tmp_path / "restarts.jsonl").read_text())
    assert {"step": 12, "ranks": 2, "number": 1, "kind": "restart"}.items() <= found.items()


def test_a_restart_resumes_the_run_that_its_own_job_has_begun_and_no_other(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    write_text(text)
    config = TrainConfig(model=ModelShape(1, 16, 2, 16), data=str(text))
    run = tmp_path / "run"
    prepare_run(Start(out=run, job="mine"), config)
    assert json.loads((run / "config.json").read_text())["begun_by"] == "mine"
    again = Start(out=run, job="mine", restart=Restart(1, "rank 1 failed"))
    assert prepare_run(again, config).folder == run
    for start, other in (
        (dataclasses.replace(again, restart=None), config),  # the first start of a job finds a folder that is not empty
        (dataclasses.replace(again, job="another"), config),
        (dataclasses.replace(again, job=None), config),
        (again, dataclasses.replace(config, lr=1.0)),
    ):
        with pytest.raises(ConfigError, match="exists and is not empty"):
            prepare_run(start, other)
    assert prepare_run(dataclasses.replace(again, out=tmp_path / "new"), config).folder == tmp_path / "new"


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--max-restarts", "-1"], {}, "--max-restarts is -1"),
        (["--min-nproc", "2"], {}, "together with --max-restarts"),
        (["--min-nproc", "0", "--max-restarts", "1"], {}, "--min-nproc is 0"),
        (["--max-restarts", "1"], {"RANK": "0", "WORLD_SIZE": "1"}, "Give the option to torchrun"),
        (
            [],
            {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "2"},
            "Name the run's folder with --out",
        ),
    ],
)
def test_options_that_cannot_be_meant_are_refused(words: list[str], environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_train_request(build_parser().parse_args(["train", *words]), environment)

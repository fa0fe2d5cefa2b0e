"""Every value of --shard, with what goes with it, on other ranks than the run began on: the losses go on as if nothing
had happened.

Ranks are the session's workers, which call the recipe itself: starting a command costs seconds, and is tested once, in
test_train_cli.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.ranks import Ranks
from shardwise.recipes.run_folder import Start
from shardwise.recipes.train import train
from shardwise.testing import WorkerPool

BASE = TrainConfig(
    model=ModelShape(layers=2, width=32, heads=4, context=32),
    steps=8, batch=8, warmup=2, lr=1e-2, log_every=4, eval_every=4, eval_windows=9, save_every=2, keep=9, sample_bytes=0,
)  # fmt: skip
CUT, AGAIN, END = 4, 6, 8  # the base run is left after CUT steps; what goes on is left again and resumed after AGAIN


@dataclass(frozen=True)
class Job:
    """One call of the recipe."""

    start: Start
    config: TrainConfig


def run_jobs(jobs: list[Job]) -> list[str]:
    """Do all jobs on this rank, one after the other; return what each printed."""
    printed: list[str] = []
    for job in jobs:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            train(job.start, job.config, Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
        printed.append(out.getvalue())
    return printed


def _losses(run: Path) -> dict[tuple[object, object], float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(line["kind"], line["step"]): line["loss"] for line in lines}


def _copy_cut_back(run: Path, to: Path, step: int) -> Path:
    """Copy a run as if it had been killed after the checkpoint of ``step``."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("tensorboard", "report.png"))
    for checkpoint in (to / "checkpoints").iterdir():
        if checkpoint.name > f"step-{step:08d}":
            shutil.rmtree(checkpoint)
    return to


def _assert_same_curve(run: Path, base: Path) -> None:
    mine, expected = _losses(run), _losses(base)
    assert mine.keys() == expected.keys()
    for key, loss in expected.items():
        assert mine[key] == pytest.approx(loss, abs=1e-4), (run.name, key)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for index in range(12):
        words = f"the cat number {index} sat on the mat, and the dog sat by the door. "
        (folder / f"{index}.txt").write_text(words * 60)
    return folder


@pytest.fixture(scope="module")
def base(pool: WorkerPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with --shard full that nothing interrupted."""
    run = tmp_path_factory.mktemp("runs") / "base"
    pool.run(run_jobs, num_ranks=2, jobs=[Job(Start(out=run), dataclasses.replace(BASE, data=str(text)))])
    return run


CASES: dict[str, dict[str, object]] = {
    "full": {"shard": "full", "accumulate": 2},
    "full-offload-recompute": {"shard": "full", "offload": True, "recompute": True},
    "full-compile-recompute": {"shard": "full", "compile": True, "compile_backend": "aot_eager", "recompute": True},
    "full-tp": {"shard": "full", "tp": 2, "accumulate": 2},
    "full-tp-offload-recompute": {"shard": "full", "tp": 4, "offload": True, "recompute": True},
    "hybrid": {"shard": "hybrid", "accumulate": 2},
    "hybrid-offload-recompute-compile": {
        "shard": "hybrid", "offload": True, "recompute": True, "compile": True, "compile_backend": "aot_eager",
    },
    "replicate": {"shard": "replicate", "accumulate": 2},
    "replicate-tp": {"shard": "replicate", "tp": 2},
    "replicate-offload-compile": {
        "shard": "replicate", "offload": True, "compile": True, "compile_backend": "aot_eager",
    },
    "gradients": {"shard": "gradients", "accumulate": 2},
    "gradients-recompute-compile": {
        "shard": "gradients", "recompute": True, "compile": True, "compile_backend": "aot_eager",
    },
    "optimizer": {"shard": "optimizer", "accumulate": 2},
    "optimizer-recompute-compile": {
        "shard": "optimizer", "recompute": True, "compile": True, "compile_backend": "aot_eager",
    },
    "none-recompute-compile": {"shard": "none", "recompute": True, "compile": True, "compile_backend": "aot_eager"},
    "full-tp-compile-recompute": {
        "shard": "full", "tp": 2, "compile": True, "compile_backend": "aot_eager", "recompute": True,
    },
}  # fmt: skip


def test_a_run_of_two_ranks_goes_on_behind_every_door_on_four_and_back(
    pool: WorkerPool, base: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(BASE, data=json.loads((base / "config.json").read_text())["config"]["data"])
    jobs = {
        name: Job(Start(resume=_copy_cut_back(base, tmp_path / name, CUT)), dataclasses.replace(config, **changes))
        for name, changes in CASES.items()
    }
    # Fresh processes: DTensor remembers meshes, whose groups ended with the test that made them.
    pool.run(run_jobs, num_ranks=4, fresh=True, jobs=list(jobs.values()))
    for name in jobs:
        _assert_same_curve(tmp_path / name, base)

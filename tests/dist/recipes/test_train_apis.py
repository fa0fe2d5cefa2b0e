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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.runs import copy_cut_back, metrics_of, write_text

from shardwise.recipes.config import ModelShape, TrainConfig, config_from_json
from shardwise.recipes.run_folder import Start, with_overrides
from shardwise.recipes.sharding import RunRanks
from shardwise.recipes.train import train
from shardwise.testing import WorkerPool

BASE = TrainConfig(
    model=ModelShape(layers=2, width=32, heads=4, context=32),
    steps=6, batch=8, warmup=2, lr=1e-2, log_every=6, eval_every=3, eval_windows=9, save_every=2, keep=9, sample_bytes=0,
)  # fmt: skip
CUT, AGAIN = 2, 4  # the base run is left after CUT steps; what goes on is left again and resumed after AGAIN


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
            train(job.start, job.config, RunRanks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
        printed.append(out.getvalue())
    return printed


def _losses(run: Path) -> dict[tuple[object, object], float]:
    return {(line["kind"], line["step"]): line["loss"] for line in metrics_of(run)}


def _norms(run: Path) -> dict[tuple[object, object], float]:
    return {("norm", line["step"]): line["grad_norm"] for line in metrics_of(run) if line["kind"] == "train"}


def _assert_same_curve(run: Path, base: Path) -> None:
    mine, expected = _losses(run) | _norms(run), _losses(base) | _norms(base)
    assert mine.keys() == expected.keys()
    assert max(_norms(base).values()) > BASE.clip  # else clipping would go untested
    for key, loss in expected.items():
        assert mine[key] == pytest.approx(loss, abs=1e-4), (run.name, key)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def base(pool: WorkerPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with --shard zero3 that nothing interrupted."""
    run = tmp_path_factory.mktemp("runs") / "base"
    # Fresh processes: DTensor remembers meshes, whose groups ended with the test that made them.
    pool.run(run_jobs, num_ranks=2, fresh=True, jobs=[Job(Start(out=run), dataclasses.replace(BASE, data=str(text)))])
    return run


SPLIT = 25_024 / 42_880  # share of the parameters that tensor parallelism splits: matrices of the blocks, some biases
COMPILE: dict[str, object] = {"compile": True, "compile_backend": "aot_eager"}
TRACE: dict[str, object] = {"compile": True, "compile_backend": "eager"}


@dataclass(frozen=True)
class Case:
    """Options on four ranks, and the shares that the largest rank saves of parameters, gradients, optimizer state."""

    options: dict[str, object]
    saves: tuple[float, ...]


CASES: dict[str, Case] = {
    "full": Case(
        {
            "shard": "zero3",
            "min_unit_bytes": 0,
            "accumulate": 2,
            "offload": True,
            "recompute": True,
        },
        (0.75, 0.75, 0.75),
    ),
    "full-tp": Case(
        {"shard": "zero3", "tp": 2, "accumulate": 2, "offload": True, "recompute": True},
        (1 - SPLIT / 4 - (1 - SPLIT) / 2,) * 3,
    ),
    "hybrid": Case({"shard": "hsdp", "accumulate": 2, "offload": True, "recompute": True}, (0.5, 0.5, 0.5)),
    "replicate": Case({"shard": "ddp", "accumulate": 2, "recompute": True}, (0.0, 0.0, 0.0)),
    "replicate-tp": Case({"shard": "ddp", "tp": 2, "offload": True}, (SPLIT / 2,) * 3),
    "gradients": Case({"shard": "zero2", "accumulate": 2, "recompute": True}, (0.75, 0.75, 0.75)),
    "optimizer": Case({"shard": "zero1", "accumulate": 2}, (0.0, 0.0, 0.75)),
    "none": Case({"shard": "none", "recompute": True}, (0.0, 0.0, 0.0)),
}
EACH, MERGED = ["(root)", "blocks.0", "blocks.1"], ["(root)", "blocks.0-1"]
UNITS = {
    "full": EACH,
    "full-tp": MERGED,
    "hybrid": MERGED,
    "gradients": MERGED,
    "replicate": EACH,
    "replicate-tp": EACH,
}
BACK: dict[str, dict[str, object]] = {  # compiled here: fewer ranks, so fewer compilations
    "full-tp": {"shard": "zero2", "recompute": True},
    "hybrid": {"shard": "zero1", **COMPILE},
    "replicate-tp": {"shard": "none", "recompute": True, **TRACE},
    "gradients": {"shard": "ddp", "recompute": True, "offload": True},
    "optimizer": {"shard": "zero3", "recompute": True, "offload": True, **TRACE},
    "none": {"shard": "zero3", "tp": 2, "recompute": True, **TRACE},
}


def _continue(run: Path, to: Path, step: int, **options: object) -> Job:
    config = config_from_json(json.loads((run / "config.json").read_text())["config"])
    plain: dict[str, object] = {
        "min_unit_bytes": 2**20,
        "tp": 1,
        "offload": False,
        "recompute": False,
        "compile": False,
        "accumulate": 1,
    }
    return Job(Start(resume=copy_cut_back(run, to, step)), with_overrides(config, plain | options))


def _saved_shares(printed: str) -> list[float]:
    rows = [line.replace("│", " ").split() for line in printed.splitlines() if line.rstrip(" │").endswith("%")]
    return [float(row[-1].rstrip("%")) / 100 for row in rows[:3]]


def _unit_names(printed: str) -> list[str]:
    """Return the first column of the table of units that a run begins with."""
    lines = printed.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("unit ")), len(lines))
    stop = next((index for index in range(start, len(lines)) if " units, " in lines[index]), start)
    return [line.split()[0] for line in lines[start + 1 : stop]]


LIKE_OTHERS = ("hybrid", "replicate", "replicate-tp", "none")  # other tests and cases have what these have


@pytest.mark.parametrize(
    "names",
    [[name for name in CASES if name not in LIKE_OTHERS], pytest.param(LIKE_OTHERS, marks=pytest.mark.exhaustive)],
    ids=lambda names: " ".join(names),
)
def test_a_run_of_two_ranks_goes_on_behind_every_api_on_four_and_back_on_two(
    pool: WorkerPool, base: Path, tmp_path: Path, names: Sequence[str]
) -> None:
    there = {name: _continue(base, tmp_path / name, CUT, **CASES[name].options) for name in names}
    printed = pool.run(run_jobs, num_ranks=4, jobs=list(there.values()))[0]
    for name, said in zip(there, printed, strict=True):
        _assert_same_curve(tmp_path / name, base)
        assert _saved_shares(said) == pytest.approx(CASES[name].saves, abs=0.01), name
        assert _unit_names(said) == UNITS.get(name, []), name
    back = {
        name: _continue(tmp_path / name, tmp_path / f"{name}-back", AGAIN, **BACK[name])
        for name in names
        if name in BACK
    }
    pool.run(run_jobs, num_ranks=2, jobs=list(back.values()))
    for name in back:
        _assert_same_curve(tmp_path / f"{name}-back", base)


def test_a_resume_on_as_many_ranks_gives_the_same_losses_to_the_bit_and_bf16_trains(
    pool: WorkerPool, base: Path, tmp_path: Path
) -> None:
    config = config_from_json(json.loads((base / "config.json").read_text())["config"])
    bf16 = [
        Job(Start(out=tmp_path / shard), dataclasses.replace(config, dtype="bf16", shard=shard))
        for shard in ("zero3", "zero2")
    ]
    pool.run(run_jobs, num_ranks=2, jobs=[_continue(base, tmp_path / "again", CUT), *bf16])
    assert _losses(tmp_path / "again") == _losses(base)
    for shard in ("zero3", "zero2"):
        mine, exact = _losses(tmp_path / shard), _losses(base)
        assert mine != exact
        for key, loss in exact.items():
            assert mine[key] == pytest.approx(loss, rel=0.05), (shard, key)  # Adam's first steps amplify rounding


@pytest.fixture(scope="module")
def experts(pool: WorkerPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainConfig, str]:
    """A run of two ranks whose model has experts, its configuration, and what it printed."""
    run = tmp_path_factory.mktemp("experts") / "both"
    shape = dataclasses.replace(BASE.model, experts=3, top_k=2)
    config = dataclasses.replace(BASE, data=str(text), model=shape, min_unit_bytes=0)
    return run, config, pool.run(run_jobs, num_ranks=2, jobs=[Job(Start(out=run), config)])[0][0]


def test_experts_train_as_on_one_process(
    pool: WorkerPool, experts: tuple[Path, TrainConfig, str], tmp_path: Path
) -> None:
    both, config, printed = experts
    alone = tmp_path / "alone"
    pool.run(run_jobs, num_ranks=1, jobs=[Job(Start(out=alone), config)])
    _assert_same_curve(both, alone)
    assert {f"blocks.{block}.mlp.experts.{expert}" for block in (0, 1) for expert in range(3)} < {*_unit_names(printed)}
    again = _continue(both, tmp_path / "again", CUT, min_unit_bytes=0)
    bf16 = dataclasses.replace(config, dtype="bf16", recompute=True)
    pool.run(run_jobs, num_ranks=2, jobs=[again, Job(Start(out=tmp_path / "bf16"), bf16)])
    assert _losses(tmp_path / "again") == _losses(both)
    assert _losses(tmp_path / "bf16") == pytest.approx(_losses(both), rel=0.05)


@pytest.mark.parametrize(
    ("shard", "transport"),
    [
        ("hsdp", "gloo"),
        pytest.param("zero3", "collective", marks=pytest.mark.exhaustive),
        pytest.param("ddp", "auto", marks=pytest.mark.exhaustive),
    ],
)
def test_experts_go_on_behind_every_api_that_takes_them(
    pool: WorkerPool, experts: tuple[Path, TrainConfig, str], tmp_path: Path, shard: str, transport: str
) -> None:
    more: dict[str, object] = {"accumulate": 2, "recompute": True, "min_unit_bytes": 0, "offload": shard != "zero3"}
    there = _continue(experts[0], tmp_path / shard, CUT, shard=shard, transport=transport, **more)
    pool.run(run_jobs, num_ranks=4, jobs=[there])
    _assert_same_curve(tmp_path / shard, experts[0])

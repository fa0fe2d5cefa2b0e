"""``benchmarks/bench.py`` in real processes: it measures, writes what it says, and notices a contender that is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.jobs import PRELOAD
from helpers.scripts import ROOT
from torch import nn

from shardwise.recipes.config import ModelShape
from shardwise.recipes.gpt import GPT
from shardwise.testing import WorkerPool

sys.path.append(str(ROOT / "benchmarks"))  # here and in the workers that import this file
import bench
import bench_contenders
from bench_contenders import CONTENDERS, BenchConfig, BenchShape, Contender, Setup, choose_names
from bench_timing import RankTimes, time_steps

FP32_BYTES = 4


def _config(*names: str, ranks: int = 2) -> BenchConfig:
    return BenchConfig("small", ranks, 1, 2, "gloo", 0, names)


def _no_communication(model: GPT, _: Setup) -> nn.Module:
    return model


def time_with_a_wrong_api(config: BenchConfig) -> RankTimes:
    """Runs on every rank: one contender forgets to communicate."""
    wrong = dataclasses.replace(CONTENDERS["shardwise full"], wrap=_no_communication)
    return time_steps_of_little(config, {**CONTENDERS, wrong.name: wrong})


def time_steps_of_little(config: BenchConfig, *contenders: Mapping[str, Contender]) -> RankTimes:
    """Time a model that is smaller than every shape of the command.  Runs on every rank."""
    little = BenchShape(ModelShape(layers=2, width=32, heads=2, context=16), grouped_blocks=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_contenders, "SHAPES", {"small": little})
        return time_steps(config, *contenders)


def test_a_contender_that_does_not_communicate_is_found(pool: WorkerPool) -> None:
    found = pool.run(time_with_a_wrong_api, config=_config("local", "DDP", "shardwise full"))
    for times in found:
        assert times.seconds == {}
        assert len(times.wrong) == 1
        assert times.wrong[0].startswith("shardwise full: loss ")


@pytest.mark.parametrize(
    ("patterns", "ranks"), [(None, 2), pytest.param(["shardwise hybrid"], 4, marks=pytest.mark.exhaustive)]
)
def test_every_contender_trains_alike(pool: WorkerPool, patterns: list[str] | None, ranks: int) -> None:
    names = choose_names(patterns, ranks, "gloo")
    config = dataclasses.replace(_config(*names, ranks=ranks), rounds=1)
    for times in pool.run(time_steps_of_little, num_ranks=ranks, fresh=True, timeout_s=240, config=config):
        assert times.wrong == ()
        assert {name: len(seconds) for name, seconds in times.seconds.items()} == dict.fromkeys(names, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="memory and bytes on the wire are read from /proc")
def test_the_command_measures_times_and_memory_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WorkerPool", functools.partial(WorkerPool, preload=PRELOAD))  # forks its processes
    words = ["--shape", "small", "--ranks", "2", "--rounds", "1", "--only", "FSDP2"]
    assert bench.main(["--backend", "gloo", "--out", str(tmp_path / "results"), *words]) == 0
    names = ["local", "FSDP2"]
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(names))]
    assert [line.split()[0] for line in table] == names
    stem = tmp_path / "results" / "bench_small_w2_gloo"
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(stem.with_suffix(".json").read_text())
    assert set(found) == {
        "command", "machine", "shape", "ranks", "backend", "batch_per_rank", "rounds", "seed", "alone", "rows", "notes"
    }  # fmt: skip
    assert set(found["machine"]) == {
        "cpu", "cores", "system", "python", "torch", "threads_per_rank", "gpus", "date", "disturbed"
    }  # fmt: skip
    assert found["command"].startswith("benchmarks/bench.py --backend gloo")
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == names
    assert rows["FSDP2"]["loss"] > 0  # that contenders train alike is tested above
    model_bytes = FP32_BYTES * found["shape"]["parameters"]
    wire = {name: row["memory"]["wire_bytes_per_step"] for name, row in rows.items()}
    assert (
        wire["FSDP2"] > 2 * model_bytes
    )  # no upper bound: the loopback device also counts what tests beside this send
    assert wire["local"] >= 0
    for row in rows.values():
        memory = row["memory"]
        assert row["median_s"] > 0
        assert memory["peak_rss_bytes"] > 0
        assert memory["peak_live_bytes"] is None or memory["peak_live_bytes"] > model_bytes
        assert memory["faults_per_step"] >= 0

"""``benchmarks/bench.py`` without processes: options, the choice of contenders, figures, table, JSON and picture."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import mmap
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers.scripts import ROOT

from shardwise import ConfigError

sys.path.append(str(ROOT / "benchmarks"))
import bench
from bench import BenchRequest, build_parser, main, read_bench_request
from bench_contenders import (
    CONTENDERS,
    SHAPES,
    BenchConfig,
    check_fit,
    choose_names,
    count_parameters,
    held_bytes,
    settle_ranks,
)
from bench_figures import (
    HostLoad,
    MeasuredMemory,
    Row,
    disturbances,
    find_wrong_losses,
    format_table,
    largest,
    make_rows,
)
from bench_timing import (
    PeakSampler,
    RankTimes,
    available_bytes,
    loopback_bytes,
    malloc_live_bytes,
    peak_resident_bytes,
    resident,
)

CONFIG = BenchConfig("small", 2, 2, 3, "gloo", 0, ("local", "FSDP2"))


def _request(*words: str, num_gpus: int = 0, num_cores: int = 8) -> BenchRequest:
    return read_bench_request(build_parser().parse_args(words), num_gpus, num_cores)


@pytest.mark.parametrize(
    ("words", "num_gpus", "expected"),
    [
        (["--ranks", "0"], 0, "--ranks is 0"),
        (["--rounds", "0"], 0, "--rounds is 0"),
        (["--batch", "-1"], 0, "--batch is -1"),
        (["--backend", "nccl"], 0, "finds no GPU"),
        (["--ranks", "2"], 1, "NCCL refuses ranks that share one. Use --ranks 1, or --backend gloo"),
        (["--ranks", "2", "--backend", "nccl"], 1, "this host has 1 GPU"),
        (["--only", "FSDP3"], 0, "'FSDP3' is not a contender. Known: 'local'"),
        (["--only", "shardwise hybrid"], 0, "cannot run on 2 rank(s) over gloo: two copies"),
        (["--only", "* (gloo)"], 1, "nccl leaves no choice of transport"),
        (["--out", sys.executable], 0, "is a file"),
    ],
)
def test_a_wrong_value_is_refused(words: list[str], num_gpus: int, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _request(*words, num_gpus=num_gpus)
    assert expected in str(caught.value)


def test_the_command_says_once_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "nobody"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bench.py: error: --only 'nobody'")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("backend", "ranks", "num_gpus", "num_cores", "settled"),
    [
        ("auto", None, 0, 8, ("gloo", 2)),
        ("auto", None, 0, 1, ("gloo", 1)),
        ("auto", 4, 0, 1, ("gloo", 4)),
        ("auto", None, 3, 8, ("nccl", 3)),
        ("auto", 1, 3, 8, ("nccl", 1)),
        ("gloo", None, 3, 8, ("gloo", 2)),
    ],
)
def test_the_host_decides_what_is_not_given(
    backend: str, ranks: int | None, num_gpus: int, num_cores: int, settled: tuple[str, int]
) -> None:
    assert settle_ranks(backend, ranks, num_gpus, num_cores) == settled


def test_patterns_choose_contenders_and_local_is_always_one() -> None:
    assert choose_names(["shardwise full*", "FSDP2"], 2, "gloo") == (
        "local", "FSDP2", "shardwise full", "shardwise full (gloo)", "shardwise full + fused"
    )  # fmt: skip
    assert "shardwise hybrid" not in choose_names(["shardwise*"], 2, "gloo")
    assert choose_names(["DDP"], 2, "gloo") == ("local", "DDP")


def test_contenders_that_do_not_fit_together_are_refused() -> None:
    assert held_bytes(CONTENDERS["DDP"], 1000, 4) == 16_000
    assert held_bytes(CONTENDERS["torch ZeRO"], 1000, 4) == 10_000
    assert held_bytes(CONTENDERS["FSDP2"], 1000, 4) == 4_000
    check_fit(CONFIG, 1000, 48_000)
    with pytest.raises(ConfigError, match="--only"):
        check_fit(CONFIG, 1000, 47_999)
    check_fit(dataclasses.replace(CONFIG, alone=True), 1000, 32_000)  # the largest of them
    with pytest.raises(ConfigError, match="1 contenders at once"):
        check_fit(dataclasses.replace(CONFIG, alone=True), 1000, 31_999)


@dataclass(frozen=True)
class Named:
    """A contender as rows see it."""

    name: str
    family: str = "DDP"
    dtype: str = "fp32"
    transport: str = "auto"


MEMORY = MeasuredMemory(2 << 20, 1 << 20, 30 << 20, 20 << 20, 1 << 20, 7, 5 << 20)


def _rows(memory: bool = True, names: tuple[str, ...] = ("local", "FSDP2", "shardwise full")) -> list[Row]:
    families = {"local": "local", "FSDP2": "FSDP2", "shardwise full": "shardwise"}
    contenders = [Named(name, families[name]) for name in names]
    times = {"local": [0.1, 0.1, 0.3], "FSDP2": [0.2, 0.2, 0.2], "shardwise full": [0.11, 0.15, 0.11]}
    slower = {name: [2 * s for s in times[name]] for name in names}
    held = {name: [MEMORY, dataclasses.replace(MEMORY, peak_rss_bytes=40 << 20)] for name in names} if memory else {}
    return make_rows(contenders, [times, slower], dict.fromkeys(names, 4.5), held, 100)


def test_rows_hold_medians_of_the_slowest_rank_and_ratios_of_them() -> None:
    local, fsdp2, ours = _rows()
    assert (local.median_s, fsdp2.median_s, ours.median_s) == (0.2, 0.4, 0.22)
    assert (local.x_local, fsdp2.x_local, ours.x_local) == pytest.approx((1.0, 2.0, 1.1))
    assert (local.x_fsdp2, fsdp2.x_fsdp2, ours.x_fsdp2) == pytest.approx((0.5, 1.0, 0.55))
    assert ours.tokens_per_s == pytest.approx(100 / 0.22)
    assert (local.low_quartile_s, local.high_quartile_s) == pytest.approx((0.2, 0.4))
    assert ours.memory is not None
    assert ours.memory.peak_rss_bytes == 40 << 20
    assert ours.memory.wire_bytes_per_step == 5 << 20


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (HostLoad(10.0, 20.2, 0.0, 20.0, 2), []),  # the ranks use both cores
        (HostLoad(10.0, 20.0, 0.0, 14.0, 2), ["other processes used 0.6 of 2 cores while contenders were timed"]),
        (HostLoad(10.0, 70.0, 0.0, 20.0, 64), []),  # five cores of others, and 57 idle
        (HostLoad(10.0, 500.0, 0.0, 20.0, 64), ["other processes used 48.0 of 64 cores while contenders were timed"]),
        (HostLoad(10.0, 19.0, 1.0, 19.0, 2), ["the hypervisor took 5% of the cores' time"]),
        (HostLoad(), []),
    ],
)
def test_what_disturbs_a_run_is_named(host: HostLoad, said: list[str]) -> None:
    quiet = [row for row in _rows() if row.name == "FSDP2"]
    assert disturbances(host, quiet) == said


def test_a_figure_that_one_rank_lacks_is_none() -> None:
    other = MeasuredMemory(None, 9 << 20, None, None, None, 3, None)
    found = largest([MEMORY, other])
    assert found == MeasuredMemory(None, 9 << 20, None, None, None, 7, None)


@pytest.mark.parametrize("loss", [4.5 + 2e-3, 4.5 - 2e-3, math.nan, math.inf])
def test_a_loss_beyond_rounding_is_wrong(loss: float) -> None:
    (found,) = find_wrong_losses({"a": 4.5, "b": loss}, {"a": 4.5005, "b": 4.5}, {"a": "fp32", "b": "fp32"})
    assert found.startswith("b: loss ")
    assert "expected 4.500000 within 0.001" in found


def test_the_table_is_aligned_and_shows_what_was_not_measured() -> None:
    lines = format_table(_rows()).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:3] == ["contender", "step", "ms"]
    assert lines[3].split() == [
        "shardwise", "full", "220.0", "220.0", "300.0", "1.100", "0.550", "455", "2.0", "40.0", "5.0", "7",
    ]  # fmt: skip
    bare = format_table(_rows(memory=False, names=("local", "shardwise full"))).splitlines()
    assert bare[2].split() == ["shardwise", "full", "220.0", "220.0", "300.0", "1.100", "-", "455", *["-"] * 4]


def test_a_contender_with_a_wrong_loss_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    times = RankTimes({}, {"local": 4.5, "FSDP2": 4.0}, ("FSDP2: loss 4.0, expected 4.5",), 1)
    monkeypatch.setattr(bench.WorkerPool, "run", lambda *given, **options: [times, times])
    assert bench.run_bench(BenchRequest(CONFIG, tmp_path / "out", True), []) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing was timed" in captured.err
    assert "FSDP2: loss 4.0, expected 4.5" in captured.err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_each_contender_is_timed_alone_if_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs: list[tuple[tuple[str, ...], bool]] = []

    def run(
        _pool: object, _function: object, *, config: BenchConfig, fresh: bool = False, **_: object
    ) -> list[RankTimes]:
        runs.append((config.names, fresh))
        seconds = {name: [0.1 * len(name)] * 3 for name in config.names}
        return [RankTimes(seconds, dict.fromkeys(config.names, 4.5), (), 1)] * 2

    monkeypatch.setattr(bench.WorkerPool, "run", run)
    for alone, expected in ((True, [(("local",), True), (("FSDP2",), True)]), (False, [(("local", "FSDP2"), False)])):
        runs.clear()
        request = BenchRequest(dataclasses.replace(CONFIG, alone=alone), tmp_path / str(alone), False)
        assert bench.run_bench(request, []) == 0
        assert runs == expected
        printed = capsys.readouterr().out
        assert ("each contender alone" in printed) is alone
        assert [line.split()[:4] for line in printed.splitlines() if line.startswith(("local ", "FSDP2 "))] == [
            ["local", "500.0", "500.0", "500.0"],
            ["FSDP2", "500.0", "500.0", "500.0"],
        ]
        found = json.loads((tmp_path / str(alone) / "bench_small_w2_gloo.json").read_text())
        assert (found["alone"], found["machine"]["disturbed"]) == (alone, [])


def test_the_probes_see_memory_come_and_go() -> None:
    size = 64 << 20
    gc.collect()  # what earlier tests have left would be given back in between
    before, live_before = resident(), malloc_live_bytes()
    assert before is not None
    with PeakSampler() as sampler:
        held = np.ones(size, dtype=np.uint8)  # for malloc's count: it may hand out pages that the process holds already
        kinds = (mmap.MAP_SHARED, mmap.MAP_PRIVATE)
        pages = [mmap.mmap(-1, size, flags=kind | mmap.MAP_ANONYMOUS) for kind in kinds]
        for each in pages:
            each.write(bytes(size))
        sampler.sample()
        now, live = resident(), malloc_live_bytes()
        del held
        for each in pages:
            each.close()
        peak = sampler.live
        sampler.forget_live()
        sampler.sample()
    assert now is not None
    assert now.total - before.total > 1.9 * size
    assert now.anonymous - before.anonymous > 0.9 * size
    assert now.shared - before.shared > 0.9 * size
    assert peak_resident_bytes() >= 0.99 * now.total  # the kernel counts on each core by itself
    assert loopback_bytes() is not None
    assert (available_bytes() or 0) > 0
    if live_before is not None:  # glibc
        assert live is not None
        assert peak is not None
        assert sampler.live is not None
        assert live - live_before >= 0.99 * size
        assert peak - sampler.live >= 0.99 * size


def test_make_bench_asks_for_what_there_is() -> None:
    jobs = runpy.run_path(str(ROOT / "benchmarks" / "run.py"))["list_jobs"](Path("out"))
    requests = [_request(*job[1:]) for job in jobs if job[0] == "benchmarks/bench.py"]
    assert {(r.config.shape, r.config.ranks) for r in requests} == {(s, w) for s in ("wide", "deep") for w in (2, 4)}
    for request in requests:
        check_fit(request.config, count_parameters(SHAPES[request.config.shape].model), 16_000_000_000)

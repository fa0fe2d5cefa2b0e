"""``make gpu`` on a host without a GPU, and its report."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

import shardwise  # noqa: F401  before the fixture, which forgets what its script imports

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {spec.name: module}):
        spec.loader.exec_module(module)
        yield module


def test_a_host_without_a_gpu_is_told_so_in_one_line(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(torch.accelerator, "device_count", return_value=0):
        assert gpu.main(["--out", str(tmp_path / "gpu.md")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("no GPU on this host")
    assert not list(tmp_path.iterdir())


def test_the_report_has_the_slowest_rank_and_the_largest_memory(gpu: ModuleType) -> None:
    fast = gpu.Figures(0.001, 0.001, 0.0005, 2**20, (1.0, 2.0))
    slow = gpu.Figures(0.002, 0.001, 0.0005, 3 * 2**20, (1.0, 2.5))
    ours = gpu.row_of("bf16", "shardwise", [fast, slow], [fast, fast])
    theirs = gpu.row_of("bf16", "FSDP2", [fast, fast], [fast, fast])
    assert ours == "| bf16 | shardwise | 2.0 | 1.0 (0.5) | 3 | 0.5 |"
    assert theirs == "| bf16 | FSDP2 | 1.0 | 1.0 (0.5) | 1 | 0 |"
    report = gpu.report_of("2 x something", "1 passed", [ours, theirs], gpu.NONE)
    assert "1 passed" in report
    assert report.endswith(theirs + "\n")


def test_all_of_it_ends_within_its_time(gpu: ModuleType) -> None:
    assert gpu.TEST_LIMIT_S + (len(gpu.CASES) + len(gpu.CONTENDERS)) * gpu.CASE_LIMIT_S < 14 * 60

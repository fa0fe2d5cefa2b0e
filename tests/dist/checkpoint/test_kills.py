"""A run that is killed while it saves goes on as if nothing had happened: a slice of ``benchmarks/kill_saves.py``."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from helpers.scripts import ROOT


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="waits for the end of processes in /proc")
def test_ranks_killed_while_they_save_resume_to_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # the ranks' functions are sent to them by name
    report = importlib.import_module("kill_saves").campaign(tmp_path, 2, 2, seed=1)
    assert len(report.kills) == 2
    assert report.steps > report.kills[-1].step

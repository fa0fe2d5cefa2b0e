"""Whoever is killed, writer or reader, no reader has a version in part: ``benchmarks/kill_publish.py``."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from helpers.scripts import ROOT


@pytest.mark.parametrize("num_kills", [4, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_no_reader_ever_has_a_version_in_part(num_kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # processes find the functions by name
    report = importlib.import_module("kill_publish").campaign(tmp_path, num_kills, seed=num_kills)
    assert sum(report.kills.values()) == num_kills
    assert report.checked

"""``shardwise --version``, ``python -m shardwise`` and ``shardwise info``: one version, and facts that were looked at."""

from __future__ import annotations

import json
import runpy
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import shardwise
from shardwise.cli import main as host_facts
from shardwise.cli.main import feature, in_lines, look_at_host, main, why_no_shared_memory
from shardwise.one_host import UNKNOWN, find_version, host_memory_bytes, usable_cores


def test_the_version_is_that_of_the_package_metadata() -> None:
    assert shardwise.__version__ == version("shardwise")


def test_source_that_nobody_installed_has_no_version_but_imports() -> None:
    assert find_version("no-such-package-of-ours") == UNKNOWN


def test_the_package_runs_as_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-m", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("shardwise", run_name="__main__", alter_sys=True)  # as ``python -m``
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"


def test_info_prints_every_fact_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    for kind in ("software", "backends", "transports", "packages"):
        for name in facts[kind]:
            assert name in text, (kind, name)
    assert facts["software"]["shardwise"] == shardwise.__version__
    assert str(usable_cores()) in facts["devices"]["cores"]
    assert facts["backends"]["gloo"] == "yes"


def test_what_cannot_be_used_says_why() -> None:
    offers = {"nccl": feature("2.1", "torch finds no GPU"), "gloo": feature()}
    lines = list(
        in_lines({"software": {"torch": "2"}, "backends": offers, "transports": {"messages": feature("CPU ranks")}})
    )
    assert lines[0] == "torch  2"
    assert "  nccl  no (2.1): torch finds no GPU" in lines
    assert "  gloo  yes" in lines
    assert "  messages  yes (CPU ranks)" in lines


def test_variables_that_change_how_ranks_run_are_told_and_others_are_not() -> None:
    facts = look_at_host({"NCCL_DEBUG": "INFO", "HOME": "/home/somebody", "TOKEN": "secret"})
    assert facts["environment"] == {"SHARDWISE_CHECKS": "first", "NCCL_DEBUG": "INFO"}


def test_shared_memory_is_tried_between_two_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert why_no_shared_memory() == ""
    monkeypatch.setattr(host_facts, "can_share_memory", lambda: "stores have no order here")
    assert why_no_shared_memory() == "stores have no order here"
    monkeypatch.undo()
    refusing = tmp_path / "python"
    refusing.write_text("#!/bin/sh\necho 'PermissionError: not yours' >&2\nexit 1\n")
    refusing.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(refusing))
    assert why_no_shared_memory() == "another process cannot open it: PermissionError: not yours"


def test_the_memory_of_a_host_is_what_its_container_may_have(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemFree:  10 kB\n")
    assert host_memory_bytes(tmp_path) == 1_024_000
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    for text, expected in (("max\n", 1_024_000), ("4096\n", 4096), ("9999999999\n", 1_024_000)):
        limit.write_text(text)
        assert host_memory_bytes(tmp_path) == expected

"""The file layer opens files alone, and a lock tells processes apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.checkpoint.files import Files, give_back, read_all, take, write_all
from shardwise.errors import CheckpointError, DamagedCheckpointError


def test_nothing_but_a_file_of_the_folder_is_opened(tmp_path: Path) -> None:
    files, outside = Files(), tmp_path / "outside"
    outside.write_text("secret")
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    for name in ("link", "folder", "pipe", "missing"):
        with pytest.raises(DamagedCheckpointError, match=name):
            files.open(folder / name)


def test_a_file_that_ends_early_or_is_too_long_is_an_error(tmp_path: Path) -> None:
    files, path = Files(), tmp_path / "a"
    write_all(files, path, b"12345")
    assert read_all(files, path) == b"12345"
    with pytest.raises(DamagedCheckpointError, match="expected at most 4"):
        read_all(files, path, 4)
    file = files.open(path)
    with pytest.raises(DamagedCheckpointError, match="ends at byte 5"):
        file.read_into(3, memoryview(bytearray(3)))
    file.close()
    with pytest.raises(FileExistsError):
        write_all(files, path, b"")


def test_a_lock_writes_to_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    os.link(tmp_path / "victim", tmp_path / ".lock")
    take(tmp_path)
    give_back(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_fork_has_not_the_lock_of_its_parent(tmp_path: Path) -> None:
    take(tmp_path)
    child = os.fork()
    if not child:
        with pytest.raises(CheckpointError, match=f"process {os.getppid()} on "):
            take(tmp_path)
        give_back(tmp_path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / ".lock").exists()
    give_back(tmp_path)

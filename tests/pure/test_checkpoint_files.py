"""The file layer opens files alone, and a lock tells processes apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardwise.checkpoint.files import Files, give_back, note_of, read_all, take, write_all
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


def test_a_lock_is_taken_over_from_processes_that_have_ended_alone(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    take(tmp_path)
    take(tmp_path)  # it is ours
    mine = json.loads(path.read_text())
    for change in ({"started": "1"}, {"pid": 2**22 + 1, "started": "5"}):
        path.write_text(
            json.dumps({**mine, **change})
        )  # a number that another process had before, and one that none has
        take(tmp_path)
        assert json.loads(path.read_text())["pid"] == os.getpid()
    for change in ({"host": "another", "name": "far"}, {**note_of(os.getppid()), "name": "near"}):
        path.write_text(json.dumps({**mine, **change}))
        with pytest.raises(CheckpointError, match=f"process .* on {change['name']}"):
            take(tmp_path)
        give_back(tmp_path)  # not ours
        assert path.exists()
    path.write_text("")  # torn by a crash of the machine
    take(tmp_path)
    give_back(tmp_path)
    assert os.listdir(tmp_path) == []

"""Folders for temporary files go with their owners, and nothing else goes with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.one_host import ScratchFolder, remove_abandoned, stay_on_loopback


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def _abandoned(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "owner").touch()
    (folder / "sub" / "store").write_text("left")
    return folder


def test_a_folder_is_private_and_goes_with_its_owner(place: Path) -> None:
    with ScratchFolder() as folder:
        assert folder.path.parent == place
        assert folder.path.stat().st_mode & 0o077 == 0
        (folder.path / "file").touch()
    assert list(place.iterdir()) == []


def test_the_next_start_removes_what_killed_owners_left_and_nothing_else(place: Path) -> None:
    elsewhere = _abandoned(place / "elsewhere")
    _abandoned(place / "shardwise-a")
    _abandoned(place / "shardwise-pool-b")
    (place / "shardwise-linked").symlink_to(elsewhere)
    (place / "shardwise-file").touch()
    (place / "shardwise-young").mkdir()  # its owner is about to lock it
    with ScratchFolder("shardwise-pool-") as living, ScratchFolder() as new:
        assert {path.name for path in place.iterdir()} == {
            "elsewhere", "shardwise-linked", "shardwise-file", "shardwise-young", living.path.name, new.path.name
        }  # fmt: skip
    assert (elsewhere / "sub" / "store").read_text() == "left"


def test_a_lock_that_is_a_link_is_not_followed(place: Path) -> None:
    folder = place / "shardwise-a"
    folder.mkdir()
    (place / "mine").touch()
    (folder / "owner").symlink_to(place / "mine")
    remove_abandoned(place)
    assert folder.exists()


def test_what_was_chosen_for_many_hosts_does_not_hold_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "HOME": os.curdir}
    stay_on_loopback(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HOME": os.curdir}

"""Saves, exports and loads of one process: what a folder keeps, by whatever name it is called."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardwise import CheckpointError
from shardwise.checkpoint import files as own_files
from shardwise.checkpoint import finish, load, save
from shardwise.checkpoint.convert import convert, export_model


def _steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_the_checkpoint_just_written_is_kept_where_later_steps_are(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (100, 200, 300):
        save(tmp_path, {"model": model}, step=step)
    damaged = next((tmp_path / "step-00000300").glob("part-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert load(tmp_path, {"model": model}, fallback=True).step == 200
    path = save(tmp_path, {"model": model}, step=210, keep=1)
    assert path is not None
    assert path.exists()
    assert _steps(tmp_path) == ["step-00000210", "step-00000300"]  # of another way: not this run's to remove
    assert load(tmp_path, {"model": model}, fallback=True).step == 210
    save(tmp_path, {"model": model}, step=220, keep=2)
    save(tmp_path, {"model": model}, step=230, keep=2)
    assert _steps(tmp_path) == ["step-00000220", "step-00000230", "step-00000300"]
    finish(tmp_path)


class _Slow:
    """A state whose write waits until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_writing, self.goes_on = threading.Event(), threading.Event()
        write = own_files.Files.create

        def create(files: Any, path: Path) -> Any:
            if "part-" in path.name and threading.current_thread() is not threading.main_thread():
                self.is_writing.set()
                assert self.goes_on.wait(60)
            return write(files, path)

        monkeypatch.setattr(own_files.Files, "create", create)


def test_a_folder_with_two_names_is_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to("run")
    model, slow = nn.Linear(2, 2), _Slow(monkeypatch)
    save(tmp_path / "run", {"model": model}, step=1, wait=False)
    assert slow.is_writing.wait(60)
    threading.Timer(0.2, slow.goes_on.set).start()
    save(tmp_path / "latest", {"model": model}, step=2)  # one save at a time: that of step 1 is not swept away
    assert _steps(tmp_path / "run") == ["step-00000001", "step-00000002"]
    finish(tmp_path / "latest")
    assert not (tmp_path / "run" / ".lock").exists()


def test_an_interrupted_finish_leaves_the_save_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, slow = nn.Linear(2, 2), _Slow(monkeypatch)
    save(tmp_path, {"model": model}, step=1, wait=False)
    assert slow.is_writing.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path)
    slow.goes_on.set()
    save(tmp_path, {"model": model}, step=2)
    assert _steps(tmp_path) == ["step-00000001", "step-00000002"]
    finish(tmp_path)


def test_an_export_has_all_tensors_below_a_key(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    averages = {"shadow": {"a": torch.ones(2), "b": torch.zeros(3)}}
    save(tmp_path / "run", {"ema": averages}, step=1)
    finish(tmp_path / "run")
    (path,) = export_model(tmp_path / "run", tmp_path / "out", key="ema")
    assert {name.replace("/", "."): tuple(each.shape) for name, each in load_file(path).items()} == {
        "shadow.a": (2,),
        "shadow.b": (3,),
    }


def test_a_link_to_one_checkpoint_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "run", {"model": model}, step=7)
    finish(tmp_path / "run")
    (tmp_path / "best").symlink_to(Path("run") / "step-00000007")
    assert load(tmp_path / "best", {"model": nn.Linear(2, 2)}).step == 7


def test_a_checkpoint_that_is_removed_while_it_is_read_is_named_as_that(tmp_path: Path) -> None:
    class Saves(nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            save(tmp_path, {"model": nn.Linear(2, 2)}, step=2, keep=1)
            return super().state_dict(*args, **options)

    save(tmp_path, {"model": nn.Linear(2, 2)}, step=1)
    with pytest.raises(CheckpointError, match="step-00000001 was not loaded, .*: it was removed meanwhile"):
        load(tmp_path, {"model": Saves(2, 2)})
    finish(tmp_path)


def test_numbers_of_numpy_are_saved(tmp_path: Path) -> None:
    loop = {"is_best": np.bool_(True), "name": np.str_("a"), "count": np.int64(3), "loss": np.float32(0.5)}
    save(tmp_path, {"loop": loop}, step=1)
    finish(tmp_path)
    state = {"loop": dict.fromkeys(loop)}
    load(tmp_path, state)
    assert state["loop"] == {"is_best": True, "name": "a", "count": 3, "loss": 0.5}


def test_a_full_disk_under_the_lock_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        kept: list[Any] = []  # errors, and with them the frames of the first call
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No space left") as caught:
                save(tmp_path, {"loop": {"epoch": 1}}, step=1)
            kept.append(caught)
    save(tmp_path, {"loop": {"epoch": 1}}, step=1)
    finish(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_conversion_beside_a_save_of_this_process_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"weight": torch.ones(2, 2)}}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    slow = _Slow(monkeypatch)
    save(tmp_path / "run", {"model": nn.Linear(2, 2)}, step=1, wait=False)
    assert slow.is_writing.wait(60)
    threading.Timer(0.2, slow.goes_on.set).start()
    convert(tmp_path / "dcp", tmp_path / "run", step=2)
    finish(tmp_path / "run")
    assert _steps(tmp_path / "run") == ["step-00000001", "step-00000002"]

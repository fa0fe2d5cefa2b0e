"""Folders from strangers: nothing outside is written, nothing in them runs, and no file hangs, crashes or fills memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import struct
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import hostile
from helpers.commands import COMMAND, Ended, options
from helpers.forked_commands import run_forked
from helpers.runs import write_text
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from shardwise import ConfigError, record
from shardwise.checkpoint import CheckpointError, DamagedCheckpointError, load
from shardwise.checkpoint.convert import convert, export_model
from shardwise.checkpoint.files import Files
from shardwise.consistency.recorder import read_record
from shardwise.errors import UnsafeFileError
from shardwise.recipes.run_folder import Restart, note_restart, read_run_config
from shardwise.safe_files import open_append, open_input, read_bytes, replace_file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that may go on."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    text = write_text(tmp_path_factory.mktemp("text"))
    ended = run_forked([*COMMAND, *options(data=text, out=folder, nproc=1, steps=4, save_every=2)])
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, as a stranger may have sent it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _resume(folder: Path, *words: str) -> Ended:
    return run_forked([*COMMAND, "--resume", str(folder), "--steps", "6", "--nproc", "1", *words])


# ---- writing ----

FILES = (".lock", ".report.html.writing", "metrics.jsonl", "report.html", "restarts.jsonl", "text/train.bin")
OTHER_FILES = (".config.json.writing", ".metrics.jsonl.writing", "checkpoints/.lock")


@pytest.mark.parametrize("name", [*FILES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHER_FILES)])
def test_no_file_of_a_folder_leads_what_is_written_out_of_it(folder: Path, name: str, tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", folder / name
    victim.write_bytes(place.read_bytes() if place.exists() else b"precious")
    before = victim.read_bytes()
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    ended = _resume(folder)
    assert victim.read_bytes() == before
    assert ended.code == 0 or f"{place}: is a symbolic link, expected a regular file" in ended.err


@pytest.mark.parametrize("name", ["tensorboard", "checkpoints", "text", "black_box", "black_box/before"])
def test_no_folder_within_a_run_leads_out_of_it(folder: Path, name: str, tmp_path: Path) -> None:
    outside, place = tmp_path / "outside", folder / name
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        shutil.move(place, outside)
    else:
        outside.mkdir()
    place.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    ended = _resume(folder)
    assert ended.code == 2
    assert "is a link or a file, expected a folder" in ended.err
    assert sorted(outside.rglob("*")) == before


def test_a_record_replaces_links_of_its_name_and_follows_none(tmp_path: Path) -> None:
    victim, box = tmp_path / "victim", tmp_path / "box"
    victim.write_text("precious")
    box.mkdir()
    for name in (f"rank-p{os.getpid()}.jsonl", f".rank-p{os.getpid()}.jsonl.writing"):
        (box / name).symlink_to(victim)
    with record(box) as recorder:
        written = recorder.write("a reason")
    assert written is not None
    assert not written.is_symlink()
    assert victim.read_text() == "precious"


def test_files_are_written_and_read_relative_to_the_folder_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "named").symlink_to("real")  # what the user names may be a link
    named = tmp_path / "named"
    replace_file(named, "in/it", "text")
    with open_append(named, "in/it") as file:
        file.write(" more")
    assert read_bytes(named, "in/it") == b"text more"
    with pytest.raises(UnsafeFileError, match=r"it: 9 bytes, expected at most 8"):
        read_bytes(named, "in/it", 8)
    (named / "link").symlink_to("in")
    with pytest.raises(UnsafeFileError, match="link is a link or a file, expected a folder"):
        open_input(named, "link/it")


# ---- reading ----

NOT_FILES = {"FIFO": os.mkfifo, "device": lambda path: Path(path).symlink_to("/dev/zero"), "folder": os.mkdir}
_READ = ("config.json", "metrics.jsonl", "text/facts.json", "text/train.bin", ".lock")


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", _READ)
def test_what_is_no_regular_file_in_a_run_is_named_at_once(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink()
    NOT_FILES[kind](folder / name)
    ended = _resume(folder)
    assert ended.code in (1, 2)
    assert f"{folder / name}: is a" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_no_regular_file_in_a_checkpoint_or_a_record_is_named_at_once(
    folder: Path, kind: str, tmp_path: Path
) -> None:
    step = sorted((folder / "checkpoints").glob("step-*"))[-1]
    part = next(step.glob("part-*"))
    part.unlink()
    NOT_FILES[kind](part)
    with pytest.raises(DamagedCheckpointError, match="part-00000.safetensors: is a"):
        export_model(step, tmp_path / "exported")
    for name in (".metadata", "rank-00000.jsonl"):
        NOT_FILES[kind](tmp_path / name)
    assert read_record(tmp_path / "rank-00000.jsonl") is None
    with pytest.raises((ConfigError, CheckpointError), match="is not a DCP folder|.metadata: is a"):
        convert(tmp_path, tmp_path / "out", step=1)


def test_a_file_of_holes_is_not_read(tmp_path: Path) -> None:
    place = tmp_path / "part-00000.safetensors"
    with place.open("wb") as file:
        file.write(b"header")
        file.truncate(2**43)
    with pytest.raises(DamagedCheckpointError, match="has 8796093022208 bytes, .* of them on the disk"):
        Files().open(place)


def test_values_of_a_wrong_type_in_the_config_are_named(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    for name, value in (("steps", "many"), ("seed", -(2**70)), ("lr", None), ("offload", 1), ("model", [])):
        changed = values | {"config": values["config"] | {name: value}}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=rf"config.json: '?{name}'? is "):
            read_run_config(folder)


def _dcp_of(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": torch.nn.Linear(2, 2).state_dict(), "optimizer": {"state": {"weight": {"step": 3}}}}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


_GLOBAL = b"\x80\x02c" + Metadata.__module__.encode() + b"\n"
BOMBS: dict[str, tuple[bytes, str]] = {
    "deep key": (b"\x80\x02}N" + b"\x85" * 200000 + b"Ns.", "it nests more than 32 deep"),
    "memo": (b"\x80\x02Nr" + struct.pack("<I", 1 << 30) + b".", "entry 1073741824 of its memo"),
    "bytearray": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "bytearray8"),
    "state of a class": (_GLOBAL + b"Metadata\n}X\x01\x00\x00\x00aK\x01sb.", "sets attributes of"),
    "state of an enum": (_GLOBAL + b"_MEM_FORMAT_ENCODING\nK\x00\x85\x81}b.", "sets attributes of"),
    "a call": (pickle.dumps(os.getcwd), "it names posix.getcwd"),
    "cut": (b"\x80\x02}", "pickle exhausted"),
    "another object": (pickle.dumps({"a": 1}), "holds a dict"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_crafted_metadata_file_is_refused_before_it_is_unpickled(name: str, tmp_path: Path) -> None:
    data, expected = BOMBS[name]
    (tmp_path / ".metadata").write_bytes(data)
    before = dict(vars(Metadata))
    with pytest.raises(CheckpointError, match=expected):
        convert(tmp_path, tmp_path / "out", step=1)
    assert dict(vars(Metadata)) == before


def test_metadata_that_promises_more_than_the_files_hold_is_refused(tmp_path: Path) -> None:
    place = _dcp_of(tmp_path / "dcp")
    metadata = pickle.loads((place / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.weight"].size = torch.Size([2**20, 2**20])
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"'model.weight' has sizes \[1048576, 1048576\], and \d+ bytes in files"):
        convert(place, tmp_path / "out", step=1)


def _mutations(count: int, seed: int, folder: Path, place: Path) -> int | None:
    """Return the exit code of a process that reads changed files, which may end it; the parent shows what it prints."""
    step = sorted((folder / "checkpoints").glob("step-*"))[-1]
    export_model(step, folder / "exported")
    for number in (1, 2):
        note_restart(folder, Restart(number, "a cause"), 2, 2)
    with record(folder / "black_box") as recorder:
        written = recorder.write("a reason")
    assert written is not None
    written.rename(written.with_name("rank-00000.jsonl"))

    def read_all() -> None:
        warnings.simplefilter("ignore")
        sys.exit(hostile.main(count, seed, folder, _dcp_of(place)))

    process = multiprocessing.get_context("fork").Process(target=read_all)
    process.start()
    process.join()
    return process.exitcode


def test_every_reader_takes_or_names_files_that_were_changed(folder: Path, tmp_path: Path) -> None:
    assert _mutations(40, 0, folder, tmp_path / "dcp") == 0


@pytest.mark.chaos
def test_every_reader_takes_or_names_thousands_of_files_that_were_changed(folder: Path, tmp_path: Path) -> None:
    count, seed = (int(os.environ.get(name, default)) for name, default in (("MUTATIONS", "2000"), ("SEED", "0")))
    assert _mutations(count, seed, folder, tmp_path / "dcp") == 0


# ---- what runs ----


def test_a_run_does_not_choose_what_is_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "stranger.py").write_text("print('CODE OF THE FOLDER RUNS', flush=True)\ndef build(): raise SystemExit\n")
    values = json.loads((folder / "config.json").read_text())
    values["config"]["model_from"] = "stranger:build"
    (folder / "config.json").write_text(json.dumps(values))
    monkeypatch.chdir(folder)
    ended = _resume(folder)
    assert ended.code == 2
    assert "CODE OF THE FOLDER RUNS" not in ended.out + ended.err
    assert "no run folder chooses what is imported. Say it with --model-from stranger:build" in ended.err
    assert "CODE OF THE FOLDER RUNS" in _resume(folder, "--model-from", "stranger:build").out


# ---- links of Hugging Face's cache ----


def test_a_snapshot_of_hugging_faces_cache_is_read_and_other_links_are_not(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"weight": torch.ones(3, 1), "bias": torch.zeros(3)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (tmp_path / "link").symlink_to(snapshot)
    (tmp_path / "file.safetensors").symlink_to(blobs / "0123")
    for named in (snapshot, snapshot / "model.safetensors", tmp_path / "link", tmp_path / "file.safetensors"):
        model = torch.nn.Linear(1, 3)
        load(named, {"model": model})
        assert model.weight.eq(1).all(), named
    for outside in ("/etc/passwd", "../../../secret"):
        (snapshot / "model.safetensors").unlink()
        (snapshot / "model.safetensors").symlink_to(outside)
        with pytest.raises(DamagedCheckpointError, match="is a symbolic link, expected a regular file"):
            load(snapshot, {"model": torch.nn.Linear(1, 3)})

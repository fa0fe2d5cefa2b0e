"""Wrong use of ``shardwise train``: one message, exit code 2, nothing written, no process started."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise import ConfigError
from shardwise.checkpoint.contents import encode
from shardwise.checkpoint.format import MANIFEST, Manifest, to_bytes
from shardwise.cli import check_extras, format_size, read_num_bytes, train
from shardwise.cli.main import build_parser, main
from shardwise.cli.train import read_train_request
from shardwise.recipes.config import PRESETS, ModelShape, TrainConfig
from shardwise.recipes.run_folder import Start, prepare_run

SMALL = ["--layers", "1", "--width", "8", "--heads", "2", "--context", "8"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("some words " * 100)
    return str(path)


def _request(*words: str, environment: dict[str, str] | None = None):
    return read_train_request(build_parser().parse_args(["train", *words]), environment or {})


def _fails(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert main(["train", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("shardwise: error: ")
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--width", "30", "--heads", "4"], "Try --width 32"),
        (["--batch", "7", "--nproc", "2"], "--batch 7"),
        (["--batch", "8", "--nproc", "2", "--accumulate", "3"], "Use --batch 6 or 12"),
        (["--nproc", "0"], "--nproc is 0"),
        (["--steps", "0", "--min-unit-bytes", "1M"], "--steps is 0"),
        (["--shard", "none", "--offload"], "--offload does not go with --shard none"),
        (["--shard", "zero1", "--tp", "2"], "--tp 2 does not go with --shard zero1"),
        (["--tp", "4"], "--tp 4 does not divide --heads 6"),
        (["--experts", "4", "--plan"], "--plan does not go with --experts 4"),
        (["--transport", "gloo", "--plan"], "--plan does not go with --transport gloo"),
        (["--reproducible", "5"], "--reproducible 5 does not divide --batch 32"),
        (["--reproducible", "4", "--nproc", "3"], "--reproducible 4 microbatches cannot be shared equally by 3 data"),
        (["--reproducible", "4", "--accumulate", "2"], "--accumulate 2 does not go with --reproducible 4"),
        (["--reproducible", "4", "--shard", "zero1"], "--shard zero1 does not go with --reproducible 4"),
        (["--reproducible", "4", "--tp", "2"], "--tp 2 does not go with --reproducible 4"),
        (["--reproducible", "4", "--experts", "2"], "--experts 2 does not go with --reproducible 4"),
        (["--memory", "1GiB", "--plan"], "--plan does not go with --memory"),
        (["--memory", "1GiB", "--experts", "4"], "--experts does not go with --memory"),
        (["--memory", "1GiB", "--reproducible", "4"], "--reproducible does not go with --memory"),
        (["--memory", "1GiB", "--recompute"], "--recompute does not go with --memory: it chooses that"),
        (["--memory", "1GiB", "--tp", "2"], "--tp does not go with --memory"),
        (["--memory", "1GiB", "--shard", "ddp"], "--shard ddp does not go with --memory"),
        (["--model-from", "a:b", "--top-k", "2"], "--top-k: of shardwise's own GPT"),
        (["--tp", "2", "--nproc", "3"], "--tp 2 does not divide the number of ranks, 3"),
        (["--tp", "2", "--nproc", "4", "--batch", "3"], "not divisible by 2 data-parallel rank(s)"),
        (["--shard", "hsdp", "--nproc", "2"], "cannot lay 2 data-parallel rank(s) out as --replicas 2"),
        (["--shard", "hsdp", "--nproc", "9", "--replicas", "2"], "--replicas 2"),
        (["--data", "no/such/place"], "--data no/such/place does not exist"),
        (["--data", "/dev/null"], "neither a file nor a folder"),
        (["--resume", "no/such/run"], "no such folder"),
        (["--resume", "a", "--out", "b"], "leave --out out"),
    ],
)
def test_a_wrong_value_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    _fails(capsys, ["--device", "cpu", *words], expected)


@pytest.mark.parametrize(
    "words", [["--shard", "some"], ["--model", "huge"], ["--steps", "x"], ["--min-unit-bytes", "x"], ["--unknown"], []]
)
def test_an_unknown_option_value_ends_with_usage(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", *words] if words else [])
    assert caught.value.code == 2
    assert "usage: shardwise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("0", 0), ("4096", 4096), ("512k", 2**19), ("1.5M", 3 * 2**19), ("2GiB", 2**31), ("1MB", 2**20), ("7b", 7)],
)
def test_sizes_are_read_in_powers_of_1024(size: str, num_bytes: int) -> None:
    assert _request("--min-unit-bytes", size).config.min_unit_bytes == num_bytes


@example(2**40 + 1)
@given(st.integers(0, 2**50) | st.integers(0, 2**20).map(lambda number: number * 2**19))
def test_a_printed_size_is_read_back(num_bytes: int) -> None:
    assert read_num_bytes(format_size(num_bytes)) == num_bytes


@pytest.mark.parametrize("size", ["-1", "M", "1T", "1 5M", "1e6", "", "x"])
def test_what_is_no_size_is_refused(capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit):
        _request(f"--min-unit-bytes={size}")
    assert "is no size, expected a number of bytes such as 0, 4096, 512k or 1.5M" in capsys.readouterr().err


def test_empty_and_short_texts_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty, short, folder = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "folder"
    empty.touch()
    short.write_text("short")
    folder.mkdir()
    out = tmp_path / "out"
    for path in (empty, folder):
        _fails(capsys, [*SMALL, "--device", "cpu", "--data", str(path), "--out", str(out)], "contains no text")
    with pytest.raises(ConfigError, match=r"--context 8 \+ 1 = 9"):
        prepare_run(Start(out), TrainConfig(model=ModelShape(1, 8, 1, 8), data=str(short)))
    assert not out.exists()


def test_a_folder_in_use_is_refused_and_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "kept").write_text("mine")
    _fails(
        capsys, [*SMALL, "--device", "cpu", "--data", text, "--out", str(tmp_path)], "not empty; nothing was changed"
    )
    _fails(capsys, [*SMALL, "--device", "cpu", "--data", text, "--out", str(tmp_path / "kept")], "is a file")
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "text.txt"}


def test_the_advice_for_a_folder_in_use_works(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    foreign, ours = tmp_path / "foreign", _fake_run(tmp_path / "ours", 5)
    (foreign / "run").mkdir(parents=True)
    (foreign / "config.json").write_text('{"model_type": "gpt2"}')
    words = [*SMALL, "--device", "cpu", "--data", text, "--out"]
    _fails(
        capsys,
        [*words, str(foreign)],
        "Name another folder; it holds no run of shardwise.",
    )
    _fails(capsys, [*words, ours], f"continue that run with --resume {ours}")
    assert _request("--resume", ours).start.resume == Path(ours)


def test_sizes_that_cannot_fit_are_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train, "host_memory_bytes", lambda: 16_000_000_000)
    out = tmp_path / "out"
    for words, expected in (
        (
            "--batch 100000000 --nproc 2",
            "the logits of 50,000,000 sequence(s), take at least",
        ),
        ("--batch 100000000 --nproc 2", "this host has 14.9 GiB for 2 of them. Use a smaller model, --batch "),
        ("--width 600000 --heads 6", "17,280,416,400,000 parameters"),
        ("--context 4000000 --layers 1 --width 64 --heads 1 --nproc 1", "--batch or --context"),
    ):
        _fails(capsys, ["--device", "cpu", *words.split(), "--out", str(out)], expected)
    assert not out.exists()


def test_a_missing_extra_is_named() -> None:
    check_extras(("json",))
    with pytest.raises(ConfigError, match=r"needs no_such_package.*shardwise\[train\]"):
        check_extras(("json", "no_such_package"))


def test_the_command_starts_without_the_packages_of_its_extras() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('rich', 'tensorboard'))); "
    called = "".join(f"main({words.split()!r}); " for words in ("info", "train", "checkpoint show x"))
    program = f"{blocked}from shardwise.cli.main import main; {called}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "transports" in done.stdout
    for expected in ("needs rich, tensorboard", "needs rich"):
        assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without GPUs")
def test_gpus_that_are_not_there_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    _fails(capsys, ["--device", "cuda"], "finds no GPU")


def _fake_run(folder: Path, step: int | None, width: int = 8, **changes: object) -> str:
    (folder / "checkpoints").mkdir(parents=True)
    config = dataclasses.asdict(TrainConfig(steps=10)) | {"model": {"layers": 1, "width": 8, "heads": 2, "context": 8}}
    (folder / "config.json").write_text(json.dumps({"config": config | changes}))
    if step is not None:
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir()
        shape = {"layers": 1, "width": width, "heads": 2, "context": 8}
        progress = {"step": step, "windows": step * 32, "num_parameters": 1, "model": shape}
        manifest = Manifest("0" * 32, step, 1, (), {}, values={"progress": encode(progress, "progress")})
        (checkpoint / MANIFEST).write_bytes(to_bytes(manifest))
    return str(folder)


def test_runs_that_cannot_be_continued_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cases = {
        "done": (_fake_run(tmp_path / "done", 10), [], "has done all its 10 steps"),
        "other": (_fake_run(tmp_path / "other", 5, width=16), [], "checkpoint of another model"),
        "moved": (_fake_run(tmp_path / "moved", 5, batch=64), [], "windows into the text"),
        "wider": (_fake_run(tmp_path / "wider", 5), ["--width", "16"], "--width 16 (the run has 8)"),
        "preset": (_fake_run(tmp_path / "preset", 5), ["--model", "small"], "--layers 6 (the run has 1)"),
    }
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"conf')
    (tmp_path / "empty").mkdir()
    cases["torn"] = (str(tmp_path / "torn"), [], "cannot be read")
    cases["empty"] = (str(tmp_path / "empty"), [], "not a run folder")
    before = sorted(tmp_path.rglob("*"))
    for folder, words, expected in cases.values():
        _fails(capsys, ["--device", "cpu", "--resume", folder, *words], expected)
    assert sorted(tmp_path.rglob("*")) == before


def test_options_become_the_config() -> None:
    request = _request("--model", "small", "--width", "96", "--steps", "7", "--shard", "none", "--save-every", "3")
    assert request.config.model.layers == PRESETS["small"].layers
    assert (request.config.model.width, request.config.steps, request.config.save_every) == (96, 7, 3)
    assert request.config.shard == "none"
    assert request.nproc is None
    assert request.launched_ranks is None


def test_a_resume_keeps_what_is_not_given(tmp_path: Path) -> None:
    folder = _fake_run(tmp_path / "run", 5, lr=0.5)
    request = _request("--resume", folder, "--steps", "20")
    assert (request.config.lr, request.config.steps, request.config.model.width) == (0.5, 20, 8)
    assert not request.config.offload
    folder = _fake_run(tmp_path / "offloaded", 5, offload=True)
    assert _request("--resume", folder).config.offload
    assert not _request("--resume", folder, "--no-offload").config.offload


def test_a_launcher_is_recognised() -> None:
    assert _request(environment={"RANK": "1", "WORLD_SIZE": "4"}).launched_ranks == 4
    for environment in ({"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "1"}, {"RANK": "4", "WORLD_SIZE": "4"}):
        with pytest.raises(ConfigError, match="RANK"):
            _request(environment=environment)


def test_a_misspelt_option_gets_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--stpes=3"])
    assert "unrecognized arguments: --stpes=3. Did you mean '--steps'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--learning-rate=3"])
    assert "Did you mean '--lr'?" in capsys.readouterr().err

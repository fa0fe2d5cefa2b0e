"""``shardwise train --config``: files of options, what wins over them, and which of their values are refused."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.each import of_each

from shardwise.cli.main import build_parser, main
from shardwise.cli.train import read_train_request, with_config_file
from shardwise.recipes.config import PRESETS, TrainConfig, config_to_toml
from shardwise.recipes.run_folder import with_overrides

TOML = 'model = "small"\nbatch = 64\nmin-unit-bytes = "512k"\nweight_decay = 1\nlr = 1e-3\noffload = true\nnproc = 2\n'


def write(folder: Path, text: str, suffix: str = ".toml") -> str:
    path = folder / f"run{suffix}"
    path.write_text(text)
    return str(path)


def request(*words: str) -> tuple[TrainConfig, int | None]:
    given = build_parser().parse_args(["train", *words])
    found = read_train_request(build_parser().parse_args(with_config_file(given, ["train", *words])), {})
    return found.config, found.nproc


def test_a_file_says_what_options_say(tmp_path: Path) -> None:
    words = ["--model", "small", "--batch", "64", "--min-unit-bytes", "512k", "--weight-decay", "1", "--lr", "1e-3"]
    words += ["--offload", "--nproc", "2"]
    assert request("--config", write(tmp_path, TOML)) == request(*words)


def test_options_given_beside_a_file_win_wherever_they_stand(tmp_path: Path) -> None:
    path = write(tmp_path, TOML)
    config, nproc = request("--batch", "8", f"--config={path}", "--no-offload", "--nproc", "4")
    assert (config.batch, config.offload, nproc, config.lr) == (8, False, 4, 1e-3)


def test_a_resumed_run_keeps_its_folder_whatever_the_file_calls_out(tmp_path: Path) -> None:
    path = write(tmp_path, 'out = "elsewhere"\n')
    given = build_parser().parse_args(["train", "--config", path, "--resume", "run"])
    assert not [word for word in with_config_file(given, ["train", "--resume", "run"]) if word.startswith("--out")]


@pytest.mark.parametrize(
    ("text", "suffix", "said"),
    [
        ("bacth = 3", ".toml", "there is no option 'bacth'. Did you mean 'batch'?"),
        ("learning_rate = 3", ".toml", "there is no option 'learning_rate'. Did you mean 'lr'?"),
        ("[train]\nbatch = 3", ".toml", "there is no option 'train'"),
        ("batch-size = 3", ".toml", "there is no option 'batch-size'"),
        ("weight-decay = 1\nweight_decay = 2", ".toml", "weight-decay is given twice, also as weight_decay"),
        ("batch = 3.5", ".toml", "argument --batch: invalid int value: '3.5'"),
        ("batch = true", ".toml", "argument --batch: expected one argument"),
        ('lr = "fast"', ".toml", "argument --lr: invalid float value: 'fast'"),
        ("offload = 1", ".toml", "argument --offload/--no-offload: ignored explicit argument '1'"),
        ('shard = "some"', ".toml", "argument --shard: invalid choice: 'some' (choose from "),
        ('min-unit-bytes = "x"', ".toml", "argument --min-unit-bytes: 'x' is no size, expected a number of bytes"),
        ("batch = [1]", ".toml", "argument --batch: invalid int value: '[1]'"),
        ("config = 'other.toml'", ".toml", "there is no option 'config'"),
        ("batch =", ".toml", "Invalid value"),
        ('out = "a\\u0000b"', ".toml", "expected a text without zero bytes"),
        ("", ".yaml", "expected a file that ends in .toml"),
    ],
)
def test_what_is_no_option_is_named_with_its_file(
    tmp_path: Path, text: str, suffix: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text, suffix)
    assert main(["train", "--config", path]) == 2
    printed = capsys.readouterr().err
    assert path in printed
    assert said in printed


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffbatch = 3\n")
    given = build_parser().parse_args(["train", "--config", path])
    assert "--batch=3" in with_config_file(given, ["train", "--config", path])


def test_a_second_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "batch = 3\n")
    assert main(["train", "--config", path, f"--config={path}", "--print-config"]) == 2
    assert "--config is given twice" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "nowhere.toml"]) == 2
    assert "--config nowhere.toml: cannot be read" in capsys.readouterr().err


def test_a_parser_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", "--config", write(tmp_path, "")]) == 2
    assert "Install it (pip install tom" in capsys.readouterr().err


def tomllib() -> ModuleType:
    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def test_the_printed_config_is_toml_that_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "small", "--context", "32", "--lr", "1e-5", "--offload", "--device", "cpu", "--nproc", "2"]
    words += ["--experts", "4", "--top-k", "2"]
    words += ["--text-column", 'a "quoted"\\ n\x7fame \U0001f600', "--data", "some/text"]
    assert main(["train", "--print-config", *words]) == 0
    printed = capsys.readouterr().out
    assert tomllib().loads(printed)["nproc"] == 2
    found, nproc = request("--config", write(tmp_path, printed))
    expected, _ = request(*words)
    assert found == dataclasses.replace(expected, data=str(Path("some/text").absolute()))
    assert nproc == 2


@of_each([each.name for each in dataclasses.fields(TrainConfig) if each.name not in ("model", "model_from")])
def test_every_option_of_a_run_is_repeated_by_its_file(field: str, tmp_path: Path) -> None:
    others: dict[str, object] = {
        "shard": "ddp", "transport": "gloo", "dtype": "bf16", "compile_backend": "eager", "text_column": "body",
    }  # fmt: skip
    old = getattr(TrainConfig(), field)
    new = others.get(field) or ("/a/file" if old is None else not old if isinstance(old, bool) else old + 2)
    model = dataclasses.replace(PRESETS["tiny"], layers=3)
    changes = {field: new} | ({"heads": 6} if field == "tp" else {})
    config = with_overrides(TrainConfig(model=model), changes)
    found, _ = request("--config", write(tmp_path, config_to_toml(config, 2, "cpu")))
    assert found == config

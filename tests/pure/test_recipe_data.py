"""Documents of a run: none is lost or read twice by a cut, and what is no text is refused with a word on what to do."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise import ConfigError
from shardwise.recipes.config import TrainConfig, check_config
from shardwise.recipes.data import (
    Bytes,
    find_sources,
    open_vocabulary,
    open_windows,
    optional_module,
)
from shardwise.recipes.sharding import build_own, check_module, try_own


def test_binary_files_of_a_folder_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "c.bin").write_bytes(bytes(range(256)))
    _, sources = find_sources(str(tmp_path))
    assert [(source.name, source.kind) for source in sources] == [("b.txt", "text")]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("d.bin", bytes(range(256)) * 9, "is not text (it has zero bytes), expected UTF-8 text, .jsonl, .parquet"),
        ("d.txt", "text".encode("utf-16"), "it is UTF-16: write it as UTF-8"),
        ("d.gz", bytes(n for n in range(1, 256)) * 9, "it is full of control characters"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        find_sources(str(tmp_path / name))
    assert expected in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_latin_text_and_escapes_of_terminals_are_text(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_bytes("größer \x1b[1mbold\x1b[0m ".encode("latin-1") * 40)
    assert len(find_sources(str(tmp_path / "d.txt"))[1]) == 1


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("d.parquet", "d.jsonl"):
        (tmp_path / name).write_bytes(b"{}")
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name in ("state.json", "dataset_info.json"):
        (folder / name).write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    for module in ("datasets", "tokenizers"):
        monkeypatch.setitem(sys.modules, module, None)
    for ask in (
        lambda: find_sources(str(tmp_path / "d.parquet")),
        lambda: find_sources(str(tmp_path / "d.jsonl")),
        lambda: find_sources(str(folder)),
        lambda: open_vocabulary(tmp_path / "tokenizer.json"),
    ):
        with pytest.raises(ConfigError, match=r"which is not installed here.*pip install 'shardwise\[data\]'"):
            ask()
    assert optional_module("json", "this") is json


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer .*: no such file"):
        open_vocabulary(tmp_path / "none.json")
    assert isinstance(open_vocabulary(None), Bytes)


def test_windows_of_tokens_are_read_in_their_width(tmp_path: Path) -> None:
    for itemsize in (2, 4):
        np.arange(70_000, 70_040).astype(f"<u{itemsize}").tofile(tmp_path / "t.bin")
        inputs, targets = open_windows(tmp_path / "t.bin", 8, itemsize).stack([1])
        first = 70_008 % 2 ** (8 * itemsize)
        assert (inputs[0, 0], targets[0, -1]) == (first, first + 8)
        assert inputs.dtype == torch.int64


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_from": "module"}, "expected module:function"),
        ({"model_from": "a:b", "tp": 2}, "--tp 2 does not go with --model-from"),
    ],
)
def test_what_is_for_the_own_gpt_does_not_go_with_another_model(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_config(dataclasses.replace(TrainConfig(), **changes))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_such_module_here:build", "there is no module 'no_such_module_here'"),
        ("helpers.own_model:missing", "has no such name"),
        ("helpers.own_model:NO_FUNCTION", "has a int there"),
        ("helpers.own_model:build_nothing", "returned a int, expected a torch.nn.Module"),
        ("helpers.own_model:build_with", "the function needs size, but gets only vocabulary and context"),
    ],
)
def test_a_function_that_builds_no_model_is_refused(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build_own(name, 0, 256, 8)


def test_a_model_is_built_from_the_seed_for_the_vocabulary_of_the_text() -> None:
    first, again, other = (build_own("helpers.own_model:build", seed, 300, 8) for seed in (1, 1, 2))
    states = [model.state_dict()["token.weight"] for model in (first, again, other)]
    assert states[0].shape == (300, 16)
    assert states[0].equal(states[1])
    assert not states[0].equal(states[2])
    check_module("helpers.own_model:build")


def test_a_model_of_fewer_tokens_than_the_text_has_is_refused_before_it_is_sharded() -> None:
    window = torch.zeros(1, 8, dtype=torch.long)
    model = build_own("helpers.own_model:build_narrow", 0, 256, 8)
    with pytest.raises(ConfigError, match=r"failed on int64 tokens of shape \(1, 8\), all 255.*vocabulary=256"):
        try_own(model, "m:f", 256, window)
    with pytest.raises(ConfigError, match=r"returned shape \(1, 8\) for tokens of shape \(1, 8\), expected logits"):
        try_own(torch.nn.Identity(), "m:f", 256, window)
    with pytest.raises(ConfigError, match="the model has logits for 100 tokens, the text has 256"):
        try_own(torch.nn.Sequential(torch.nn.Embedding(256, 4), torch.nn.Linear(4, 100)), "m:f", 256, window)
    try_own(model, "m:f", 100, window)
    assert model.training

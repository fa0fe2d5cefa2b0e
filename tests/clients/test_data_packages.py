"""Runs that read through packages of others: datasets folders, Parquet files, and tokens of the tokenizers package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from shardwise import ConfigError
from shardwise.recipes.config import TrainConfig
from shardwise.recipes.data import TOKENIZER, TextSource, find_sources, open_vocabulary, split_sources, write_cache
from shardwise.recipes.run_folder import Start, prepare_run, write_config

pytestmark = pytest.mark.clients
DOCUMENTS = [f"document {n}: the cat sat on the mat, größer, 日本. " * (1 + n % 3) for n in range(300)]


EXPECTED = "".join(f"{text}\n" for text in DOCUMENTS)


def _table(documents: Sequence[str]) -> pa.Table:
    return pa.table({"text": list(documents), "n": list(range(len(documents)))})


def _dataset(documents: Sequence[str], name: str) -> datasets.Dataset:
    return datasets.Dataset(_table(documents), fingerprint=name)


def _text_of(folder: Path, source: Path) -> str:
    write_cache(folder, "it", split_sources(find_sources(str(source))[1]))
    return b"".join((folder / name).read_bytes() for name in ("train.bin", "validation.bin")).decode()


def test_every_row_of_a_parquet_file_is_read_once(tmp_path: Path) -> None:
    pq.write_table(_table(DOCUMENTS), tmp_path / "d.parquet", row_group_size=70)
    assert _text_of(tmp_path / "text", tmp_path / "d.parquet") == EXPECTED
    with pytest.raises(ConfigError, match=r"no column 'body'; its columns: text, n"):
        find_sources(str(tmp_path / "d.parquet"), "body")
    with pytest.raises(ConfigError, match=r"'n' is int, expected text"):
        _, sources = find_sources(str(tmp_path / "d.parquet"), "n")
        write_cache(tmp_path / "wrong", "it", split_sources(sources))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ConfigError, match="the datasets package cannot read it"):
        find_sources(str(tmp_path / "broken.parquet"))


def _jsonl(path: Path, documents: Sequence[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text, "n": 1}) + "\n" for text in documents))
    return path


def test_documents_of_a_jsonl_file_are_trained_and_validated_on(tmp_path: Path) -> None:
    _, sources = find_sources(str(_jsonl(tmp_path / "d.jsonl", DOCUMENTS, "body")), "body")
    facts = write_cache(tmp_path / "text", "it", split_sources(sources))
    data = b"".join((tmp_path / "text" / name).read_bytes() for name in ("train.bin", "validation.bin"))
    assert data.decode() == EXPECTED
    assert 0.05 < facts.validation_bytes / len(data) < 0.2
    assert (facts.unit, facts.vocabulary, facts.itemsize) == ("byte", 256, 1)


def test_a_folder_may_hold_text_beside_jsonl(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "b.txt").write_text("two")
    _, sources = find_sources(str(tmp_path))
    assert [(source.name, source.kind) for source in sources] == [("a.jsonl", "table"), ("b.txt", "text")]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "a"', "the datasets package cannot read it: "),
        (b'{"text": "a"}\nbroken\n', "the datasets package cannot read it: "),
        (b'{"a": "b", "c": "d"}\n', "has no column 'text'; its columns: a, c. Name one with --text-column"),
        (b'{"text": 3}\n', "row 0: 'text' is int, expected text. Name a column with --text-column"),
    ],
)
def test_what_is_no_text_of_a_jsonl_file_is_refused_and_leaves_no_folder(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        prepare_run(Start(out=tmp_path / "out"), TrainConfig(data=str(tmp_path / "d.jsonl")))
    assert f"{tmp_path / 'd.jsonl'}" in str(caught.value)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_documents_too_short_for_a_window_are_refused_once_they_are_counted(tmp_path: Path) -> None:
    config = TrainConfig(data=str(_jsonl(tmp_path / "d.jsonl", ["a", "b"])))
    with pytest.raises(ConfigError, match="needs --context 128"):
        prepare_run(Start(out=tmp_path / "out"), config)
    assert not (tmp_path / "out").exists()


def test_every_row_of_a_dataset_is_read_once(tmp_path: Path) -> None:
    _dataset(DOCUMENTS, "a").save_to_disk(str(tmp_path / "d"))
    assert _text_of(tmp_path / "text", tmp_path / "d") == EXPECTED


def test_a_dataset_that_has_a_held_out_split_is_validated_on_it(tmp_path: Path) -> None:
    parts = {"train": _dataset(DOCUMENTS[:200], "a"), "test": _dataset(DOCUMENTS[200:], "b")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    split = split_sources(find_sources(str(tmp_path / "d"))[1])
    assert [(source.name, source.stop) for source in (*split.train, *split.validation)] == [
        ("train", 200),
        ("test", 100),
    ]


def _tokenizer(path: Path, special: Sequence[str] = ("<|endoftext|>",)) -> Path:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        DOCUMENTS, trainers.BpeTrainer(vocab_size=400, special_tokens=[*special], initial_alphabet=alphabet)
    )
    made.save(str(path))
    return path


@pytest.mark.parametrize(("special", "end"), [(("<|endoftext|>",), "<|endoftext|>"), ((), "\n")])
def test_tokens_of_documents_decode_to_the_documents(tmp_path: Path, special: tuple[str, ...], end: str) -> None:
    vocabulary = open_vocabulary(_tokenizer(tmp_path / "t.json", special))
    pq.write_table(_table(DOCUMENTS), tmp_path / "d.parquet")
    _, sources = find_sources(str(tmp_path / "d.parquet"))
    numbers = np.concatenate(list(vocabulary.read(sources[0])))
    assert vocabulary.decode(numbers.tolist()) == "".join(f"{text}{end}" for text in DOCUMENTS)
    assert (vocabulary.size, vocabulary.itemsize, vocabulary.unit) == (400, 2, "token")


def test_tokens_of_plain_text_decode_to_the_text(tmp_path: Path) -> None:
    vocabulary = open_vocabulary(_tokenizer(tmp_path / "t.json", ()))
    for text in ("\n".join(DOCUMENTS * 20), "日本" * 40_000):
        (tmp_path / "d.txt").write_text(text)
        source = TextSource(tmp_path / "d.txt", "d.txt", 0, (tmp_path / "d.txt").stat().st_size)
        assert vocabulary.decode(np.concatenate(list(vocabulary.read(source))).tolist()) == text


def test_a_run_keeps_its_tokenizer_and_goes_on_with_it(tmp_path: Path) -> None:
    _dataset(DOCUMENTS, "a").save_to_disk(str(tmp_path / "d"))
    config = TrainConfig(data=str(tmp_path / "d"), tokenizer=str(_tokenizer(tmp_path / "t.json")))
    config = replace(config, model=replace(config.model, context=16))
    run = prepare_run(Start(out=tmp_path / "run"), config)
    write_config(run, 1, "cpu", 1, "0")
    assert (run.facts.vocabulary, run.facts.unit, run.tokenizer) == (400, "token", tmp_path / "run" / TOKENIZER)
    (tmp_path / "t.json").unlink()
    again = prepare_run(Start(resume=tmp_path / "run"), config)
    assert again.facts == run.facts
    (tmp_path / "run" / "text" / "train.bin").unlink()  # made again from the data, with the run's own tokenizer
    assert prepare_run(Start(resume=tmp_path / "run"), config).facts.digest == run.facts.digest


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"--tokenizer .* cannot be read .*Name a tokenizer\.json"):
        open_vocabulary(tmp_path / "t.json")

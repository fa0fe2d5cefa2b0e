"""Rules of the text: no byte on both sides of the split, no window twice in an epoch, positions free of rank counts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import ConfigError
from shardwise.recipes.data import (
    TextFacts,
    TextSource,
    Windows,
    check_facts,
    count_windows,
    find_sources,
    open_windows,
    read_facts,
    split_sources,
    validation_part,
    write_cache,
)


def _sources(sizes: list[int]) -> list[TextSource]:
    return [TextSource(Path(f"f{i}.py"), f"f{i}.py", 0, size) for i, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=40))
def test_split_puts_every_file_on_exactly_one_side(sizes: list[int]) -> None:
    split = split_sources(_sources(sizes))
    assert sorted(s.name for s in (*split.train, *split.validation)) == sorted(s.name for s in _sources(sizes))
    assert split.train
    assert split.validation
    held_out = sum(s.num_bytes for s in split.validation)
    assert held_out <= max(0.1 * sum(sizes), min(sizes))


@given(st.integers(2, 10_000))
def test_a_single_file_is_cut_without_loss_or_overlap(size: int) -> None:
    split = split_sources(_sources([size]))
    (train,), (validation,) = split.train, split.validation
    assert (train.start, train.stop, validation.stop) == (0, validation.start, size)
    assert validation.num_bytes == max(1, int(0.1 * size))


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 9))
def test_validation_parts_are_equally_long_and_cover_each_window_once(windows: int, wanted: int, ranks: int) -> None:
    parts = [validation_part(windows, wanted, rank, ranks) for rank in range(ranks)]
    assert len({len(chosen) for chosen, _ in parts}) == 1
    counted = [w for chosen, weights in parts for w, weight in zip(chosen, weights, strict=True) if weight]
    assert len(counted) == len(set(counted)) == min(wanted, windows)
    assert max(counted) < windows


@given(st.integers(0, 400), st.integers(1, 40))
def test_windows_lie_inside_the_text_and_targets_are_the_next_bytes(num_bytes: int, context: int) -> None:
    windows = Windows(np.arange(num_bytes, dtype=np.int64).astype(np.uint8), context)
    assert len(windows) == count_windows(num_bytes, context)
    assert len(windows) * context + 1 <= max(1, num_bytes) < (len(windows) + 1) * context + 1 or num_bytes == 0
    if len(windows):
        inputs, targets = windows.stack([0, len(windows) - 1])
        assert inputs.shape == targets.shape == (2, context)
        assert ((inputs + 1) % 256).equal(targets)


def test_the_cache_holds_the_split_and_its_entropy(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "big.txt").write_bytes(b"xyz" * 1000)
    (text / "small.txt").write_bytes(b"ab" * 50)
    (text / ".hidden").write_bytes(b"secret")
    (text / "binary").write_bytes(b"\0\1\2")
    description, sources = find_sources(str(text))
    facts = write_cache(tmp_path / "cache", description, split_sources(sources))
    assert (facts.num_files, facts.train_bytes, facts.validation_bytes) == (2, 3000, 100)
    assert facts.unigram_nats == pytest.approx(math.log(2))
    assert read_facts(tmp_path / "cache") == facts
    inputs, _ = open_windows(tmp_path / "cache" / "validation.bin", 10).stack([1])
    assert bytes(inputs[0].tolist()) == b"ab" * 5


def test_a_torn_cache_is_not_read(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"hello world" * 20)
    write_cache(tmp_path / "cache", *_described(source))
    with (tmp_path / "cache" / "train.bin").open("r+b") as file:
        file.truncate(10)
    assert read_facts(tmp_path / "cache") is None
    assert read_facts(tmp_path / "nothing") is None


def _described(path: Path):
    description, sources = find_sources(str(path))
    return description, split_sources(sources)


def test_the_default_text_is_real_and_large_enough() -> None:
    description, sources = find_sources(None)
    assert "standard library" in description
    assert 1_000_000 < sum(source.num_bytes for source in sources) <= 12_000_000


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="--context 64"):
        check_facts(TextFacts("", 1, 64, 65, 1.0, ""), 64)
    check_facts(TextFacts("", 1, 65, 65, 1.0, ""), 64)

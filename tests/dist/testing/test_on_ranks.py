"""The decorator that runs a test on every rank: each size once, with pytest's arguments, and no failure unheard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks

from shardwise.testing import RankFailure, WorkerPool


@on_ranks(2, 4)
def test_every_rank_runs_the_body(num_ranks: int) -> None:
    ones = torch.ones(())
    dist.all_reduce(ones)
    assert ones == dist.get_world_size() == num_ranks


@on_ranks(3)
@pytest.mark.parametrize("word", ["a", "b"])
def test_arguments_and_fixtures_reach_every_rank(word: str, tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).write_text(word)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert {path.read_text() for path in tmp_path.iterdir()} == {word}


@on_ranks()
@pytest.mark.parametrize(("word", "num_ranks"), [("pair", 2), ("trio", 3)])
def test_a_size_may_belong_to_other_arguments(word: str) -> None:
    assert dist.get_world_size() == {"pair": 2, "trio": 3}[word]


@on_ranks(2)
def test_sets_of_strings_have_another_order_on_another_rank() -> None:
    found: list[object] = [None, None]
    dist.all_gather_object(found, hash("word"))
    assert found[0] != found[1]


@on_ranks(1, backend="none")
def test_options_are_the_pools() -> None:
    assert not dist.is_initialized()


@on_ranks(2)
def fails_on_one_rank(rank: int) -> None:
    assert dist.get_rank() != rank, "told to fail"


def test_a_rank_that_fails_fails_the_test(pool: WorkerPool) -> None:
    with pytest.raises(
        RankFailure, match=r"fails_on_one_rank\(\{.*'rank': 1.*\}\)[\s\S]*rank 1 of 2[\s\S]*told to fail"
    ):
        fails_on_one_rank(pool=pool, rank=1)


def test_patches_that_nobody_would_undo_are_refused() -> None:
    def body(monkeypatch: pytest.MonkeyPatch) -> None:
        del monkeypatch

    with pytest.raises(TypeError, match=r"MonkeyPatch.context\(\)"):
        on_ranks(2)(body)

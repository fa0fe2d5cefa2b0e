"""The same bits at 1, 2, 3, 4 and 6 ranks: each strategy with each optimizer, saved and resumed twice in between.

All rows take about half an hour of two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.jobs import SessionPool
from helpers.same_bits import Shape, Way, differences

from shardwise.testing import WorkerPool

STEPS = 50
FLAT: list[Shape] = [(1, 0), (2, 0), (3, 0), (4, 0), (6, 0)]
HYBRID: list[Shape] = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3)]
OVER_SHARDS = ("sgd", "adamw", "fused", "sharded sgd", "sharded adamw", "sharded fused", "muon")
OVER_COPIES = {"ddp": ("sgd", "adamw", "fused", "muon"), "zero1": ("zero sgd", "zero adamw", "zero even")}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with SessionPool(6) as workers:
        yield workers


WAYS = [
    Way(strategy, optimizer, precision)
    for strategy in ("zero3", "zero2", "hsdp", "hfsdp", "ddp", "zero1")
    for optimizer in OVER_COPIES.get(strategy, OVER_SHARDS)
    for precision in ("fp32", "mixed", "bf16")
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_runs_have_the_same_bits(pool: WorkerPool, way: Way, tmp_path: Path) -> None:
    shapes = HYBRID if way.strategy in ("hsdp", "hfsdp") else FLAT
    assert differences(pool, way, shapes, tmp_path, STEPS) == []

"""One process stands for any rank of any world, on a fake process group: plans agree, shards tile, traces follow plans."""

from __future__ import annotations

import pytest
import torch
from helpers.inside import Recorder, engine_of, start_peak
from helpers.models import Block
from helpers.one_process import standing_for
from helpers.sharded import build_sharded

from shardwise import fully_shard
from shardwise.plan.schedule import peak_bytes


@pytest.mark.parametrize("name", ["plain", "tied", "matrices"])
def test_every_rank_plans_the_same_and_does_it(name: str) -> None:
    plans = set()
    for rank in (0, 1, 5, 7):
        with standing_for(rank, 8):
            model = build_sharded(name)
            batch = torch.zeros(4, dtype=torch.int64) if name == "tied" else torch.zeros(4, 7)
            for _ in range(2):
                model(batch).sum().backward()
            engine = engine_of(model)
            plan = engine.exec_order.plan
            assert plan is not None
            recorder = Recorder(engine)
            start_peak(engine)
            model(batch).sum().backward()
            assert tuple(recorder.calls) == plan.calls
            assert engine.comm_ctx.pool.peak_used_bytes == peak_bytes(plan.calls)
            plans.add(plan.calls)
    assert len(plans) == 1


def test_shards_of_a_thousand_ranks_tile_the_parameters() -> None:
    rows = {name: 0 for name, _ in Block(9, 2100).named_parameters()}
    for rank in range(1024):
        if rank not in (0, 1, 699, 700, 1023):
            continue
        with standing_for(rank, 1024):
            model = fully_shard(Block(9, 2100))
            for name, param in model.named_parameters():
                size = param.shape[0]
                chunk = -(-size // 1024)
                assert param.to_local().shape[0] == max(0, min(chunk, size - rank * chunk)), (rank, name)
                rows[name] += param.to_local().shape[0]
    assert rows["up.weight"] == 3 * 3

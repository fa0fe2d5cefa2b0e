"""Long runs hold no more objects than short ones: what a step makes is freed."""

from __future__ import annotations

import gc
from collections import Counter

import torch
from helpers.ranks import on_ranks
from torch import nn

from shardwise import fully_shard
from shardwise.observe import ring


def objects() -> Counter[str]:
    ring.clear()  # the record of the last collectives: it grows for a thousand steps and no longer
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


@on_ranks(2)
def test_steps_of_adamw_leave_no_objects() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    optimizers = [
        torch.optim.AdamW(model.parameters(), foreach=True),
        torch.optim.AdamW(model.parameters(), fused=True),
    ]
    counted: dict[int, Counter[str]] = {}
    objects()  # the classes that Python's abstract ones have met are remembered once
    for step in range(1, 141):
        model(torch.ones(2, 4)).sum().backward()
        optimizers[step % 2].step()
        model.zero_grad()
        if step in (40, 140):
            counted[step] = objects()
    assert counted[40]["DTensorSpec"] == counted[140]["DTensorSpec"] > 0
    grown = {name: more for name, more in (counted[140] - counted[40]).items() if more >= 20}
    assert not grown, f"100 steps left these objects: {grown}"

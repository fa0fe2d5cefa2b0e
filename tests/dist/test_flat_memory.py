"""Long runs hold no more objects than short ones: what a step makes is freed."""

from __future__ import annotations

import gc
from collections import Counter

import torch
from helpers.ranks import on_ranks
from torch import nn

from shardwise import fully_shard


def objects() -> Counter[str]:
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
    for step in range(1, 1801):
        model(torch.ones(2, 4)).sum().backward()
        optimizers[step % 2].step()
        model.zero_grad()
        if step in (200, 1400, 1800):
            counted[step] = objects()
    assert counted[200]["DTensorSpec"] == counted[1800]["DTensorSpec"] > 0
    # The record of the last collectives is bounded, and is full after 1,400 steps, of this test alone.
    grown = {name: more for name, more in (counted[1800] - counted[1400]).items() if more >= 80}
    assert not grown, f"400 steps left these objects: {grown}"

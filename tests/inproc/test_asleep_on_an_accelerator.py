"""``asleep`` on the fake accelerator: memory of the device is freed, goes to the host or a disk, and comes back elsewhere."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from fake_accelerator.accelerator import FakeAccelerator
from helpers.compare import local
from helpers.models import batch_for, build, units_of
from helpers.one_process import standing_for
from helpers.pairs import checkered
from torch import nn

import shardwise
from shardwise import ShardedOptimizer

Made = tuple[nn.Module, torch.optim.Optimizer]


def made(kind: str) -> Made:
    model = build("plain")
    if kind == "replicate":
        shardwise.replicate(model)
    else:
        for module in units_of("plain", model):
            shardwise.fully_shard(module)
        shardwise.fully_shard(model)
    if kind == "sharded optimizer":
        return model, ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=1e-2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(kind: str, to: str, sleeps: bool) -> list[torch.Tensor]:
    """Return parameters after five steps."""
    fake = FakeAccelerator()
    with standing_for(1, 2), fake.in_use():
        model, optimizer = made(kind)
        params = [*model.parameters()]
        for number in range(5):
            model(batch_for("plain", number, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = model.state_dict()
            gc.collect()
            before = fake.live_bytes
            if sleeps:
                with shardwise.asleep(model, optimizer, to=to) as slept:
                    gc.collect()
                    assert fake.live_bytes <= before - slept.num_bytes
                assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
                for name, value in model.state_dict().items():
                    assert local(value).equal(local(state[name]))
            del state
        assert not fake.violations, fake.violations
        return [local(each).detach().clone() for each in params]


@pytest.mark.parametrize(("kind", "to"), checkered(["plain", "sharded optimizer", "replicate"], ["host", "disk"]))
def test_memory_of_the_device_is_free_while_asleep_and_comes_back_to_the_bit(
    kind: str, to: str, tmp_path: Path
) -> None:
    place = "host" if to == "host" else str(tmp_path)
    asleep, awake = run(kind, place, True), run(kind, place, False)
    assert all(a.equal(b) for a, b in zip(asleep, awake, strict=True))

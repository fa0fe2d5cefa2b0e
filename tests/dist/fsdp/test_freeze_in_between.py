"""Parameters that are frozen or thawed between a forward and its backward, or between two of each, train as on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from helpers.compare import average_gradients, full
from helpers.models import Block
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from helpers.trains_alike import batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard, replicate

Api = Callable[[nn.Module], None]
# Before a step's forward, and between its forward and its backward: what a parameter of the first block is told.
STEPS: tuple[tuple[bool | None, bool | None], ...] = (
    (False, True),  # thawed in between
    (None, None),
    (None, False),  # frozen in between
    (None, None),
    (True, None),
    (None, False),
    (True, True),
    (False, None),
)


class _Net(nn.Module):
    """Two blocks; ``kind``: how the first is checkpointed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.kind = Block(6, 10), Block(6, 10), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind:
            return self.second(checkpoint(self.first, x, use_reentrant=self.kind == "reentrant"))
        return self.second(self.first(x))


def _cut(shard: Callable[..., object], net: _Net) -> None:
    shard(net.first)
    shard(net)


def _train(net: _Net, is_sharded: bool) -> list[tuple[str, torch.Tensor | None]]:
    """Return all gradients after every backward."""
    name = "first.up.bias" if net.kind == "saved" else "first.up.weight"  # what is saved must not change there
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), list[tuple[str, torch.Tensor | None]]()
    for number, (before, between) in enumerate(STEPS):
        if before is not None:
            net.get_parameter(name).requires_grad_(before)
        with torch.no_grad():
            net(batch(number + 50))  # leaves the root's parameters full
        loss = net(batch(number).requires_grad_()).square().mean()
        if between is not None:
            net.get_parameter(name).requires_grad_(between)
        loss.backward()
        if not is_sharded:
            average_gradients(net)
        for each, param in net.named_parameters():
            found.append((f"{each} in step {number}", None if param.grad is None else full(param.grad).clone()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "way"), checkered(["", "reentrant", "saved"], ["reshards", "keeps", "default", "replicate"])
)
def test_freezing_and_thawing_at_any_time_gives_the_gradients_of_one_process(kind: str, way: str) -> None:
    options = {"reshards": {"reshard_after_forward": True}, "keeps": {"reshard_after_forward": False}}.get(way, {})
    expected = _train(_Net(kind), is_sharded=False)
    contenders: list[Callable[..., object]] = [functools.partial(fully_shard, **options)]
    if way == "replicate":
        contenders = [replicate]
    elif way != "keeps":  # there torch's own class forgets the gradient of the step after the thaw
        contenders.append(functools.partial(torch_fully_shard, mesh=init_device_mesh("cpu", (2,)), **options))
    for shard in contenders:
        net = _Net(kind)
        _cut(shard, net)
        found = _train(net, is_sharded=True)
        for (name, mine), (_, theirs) in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None), f"{name}: found {mine}, expected {theirs}"
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")

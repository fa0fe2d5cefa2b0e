"""``replicate`` the older way, where a backward does not begin at an output of the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import assert_gradients, average_gradients
from helpers.ranks import on_ranks
from helpers.trains_alike import batch
from torch import nn

from shardwise import StateError, replicate

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 6)
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor, way: str = "") -> Any:
        if way == "later":
            return lambda: self.last(torch.tanh(self.first(x)))
        out = self.last(torch.tanh(self.first(x)))
        if way == "inside":
            out.square().mean().backward()
            return out.detach()
        if way == "kept":
            self.kept = [out]
            return None
        return out


def _step(net: nn.Module, x: torch.Tensor, way: str) -> None:
    assert isinstance(net, _Net)
    if way == "children":
        out = net.last(torch.tanh(net.first(x)))
    elif way == "forward":
        out = net.forward(x)
    else:
        out = net(x, way)
        if way == "inside":
            return
        if way == "later":
            out = out()
        if way == "kept":
            out = net.kept[0]
    out.square().mean().backward()


WAYS = ["later", "inside", "kept", "children", "forward"]


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("num_backwards", [1, 3])
def test_replicas_stay_alike(way: str, num_backwards: int, held: bool) -> None:
    torch.manual_seed(0)
    net = _Net()
    plain = copy.deepcopy(net)
    replicate(net, device_ids=None)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, plain)]
    for number in range(3):
        for index in range(num_backwards):
            if held:
                net.set_requires_gradient_sync(index == num_backwards - 1)  # type: ignore[operator]
            for each in (net, plain):
                _step(each, batch(10 * number + index), way)
        average_gradients(plain)
        assert all(param.grad is not None for param in net.parameters())
        assert_gradients(net, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_a_copy_hears_of_them_too() -> None:
    torch.manual_seed(0)
    net = _Net()
    replicate(net, device_ids=None)
    copied = copy.deepcopy(net)
    _step(copied, batch(0), "children")
    plain = copy.deepcopy(_Net())
    plain.load_state_dict(net.state_dict())
    _step(plain, batch(0), "children")
    average_gradients(plain)
    assert_gradients(copied, plain)


@on_ranks(2)
def test_hooks_that_would_see_a_gradient_of_this_rank_alone_are_refused() -> None:
    net = _Net()
    replicate(net, device_ids=None)
    net(batch(0)).square().mean().backward()
    seen: list[torch.Tensor] = []
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    with pytest.raises(StateError, match="before it reached an output of the replicated module"):
        _step(net, batch(1), "later")

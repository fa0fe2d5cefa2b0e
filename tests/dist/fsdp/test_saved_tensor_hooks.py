"""Hooks on saved tensors see the weights that a forward saves: what they keep by address stays that weight's until backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from helpers.compare import EXACT, assert_averaged
from helpers.ranks import on_ranks
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from shardwise import fully_shard


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(5)])


def _by_address() -> AbstractContextManager[None]:
    """Keep one copy per address, as offloaders of activations do; the tensor itself is held, so its address stays its own."""
    store: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> object:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        store.setdefault(key, (tensor.detach().clone(), tensor))
        return key

    return saved_tensors_hooks(pack, lambda key: store[key][0])


def _train(hooks: Callable[[], AbstractContextManager[None]], reshard: bool | int) -> list[bool]:
    """Compare three steps with one process; return which blocks were sharded after the last forward."""
    plain, model = _net(), _net()
    for block in model:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    x = torch.linspace(-1, 1, 15).view(3, 5)
    are_sharded: list[bool] = []
    for _ in range(3):
        for net in (plain, model):
            net.zero_grad()
            with hooks():
                loss = net(x).square().mean()
            if net is model:
                are_sharded = [isinstance(block[0].weight, DTensor) for block in model]
            loss.backward()
        assert_averaged(model, plain, **EXACT)
        assert all(isinstance(param, DTensor) for param in model.parameters())
    return are_sharded


@pytest.mark.parametrize("reshard", [True, 2])
@on_ranks(4)
def test_tensors_that_a_hook_keeps_by_their_address_stay_what_they_are(reshard: bool | int) -> None:
    assert _train(_by_address, reshard) == [
        True,
        *[False] * 4,
    ]  # the first saves no weight: its input needs no gradient


@on_ranks(2)
def test_a_hook_that_keeps_no_weight_leaves_units_sharded_after_forward() -> None:
    assert all(_train(lambda: saved_tensors_hooks(torch.clone, lambda kept: kept), True))

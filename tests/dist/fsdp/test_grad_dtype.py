"""Dtypes in which gradients are held and reduced, beside torch's own class; ``grad_dtype`` of parameters is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.models import build
from helpers.ranks import on_ranks
from helpers.sharded import batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shardwise import ConfigError, MixedPrecisionPolicy, fully_shard, replicate

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def older(model: nn.Module) -> nn.Module:
    return replicate(model, device_ids=None)


APIS: dict[str, Callable[..., Any]] = {"fully_shard": fully_shard, "replicate": replicate, "older": older}


def sharded(api: str, model: nn.Module, **arguments: Any) -> Any:
    for child in model.children():
        APIS[api](child, **arguments)
    return APIS[api](model, **arguments)


def backward(model: nn.Module, number: int) -> None:
    dtype = next(model.parameters()).dtype
    model(batch(number).to(dtype)).square().mean().backward()


@on_ranks(2)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("chosen", [BF16, None])
def test_a_chosen_grad_dtype_is_refused_before_and_after_sharding(api: str, chosen: torch.dtype | None) -> None:
    model = build("plain")
    param = next(model.parameters())
    param.grad_dtype = chosen
    expected = rf"has grad_dtype {chosen}; .* dtype \(torch.float32\)\. .*reduce_dtype"
    with pytest.raises(ConfigError, match=expected):
        APIS[api](model)
    param.grad_dtype = FP32
    model = sharded(api, build("plain"))
    backward(model, 0)
    model.zero_grad()
    model.reshard()
    for child in model.children():
        child.reshard()
    next(model.parameters()).grad_dtype = chosen
    with pytest.raises(ConfigError, match=expected):
        backward(model, 1)


@on_ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, FP32, BF16])
def test_gradients_are_held_and_reduced_as_in_the_installed_torch(reduce_dtype: torch.dtype | None) -> None:
    ours = sharded("fully_shard", build("plain"), mp_policy=MixedPrecisionPolicy(BF16, reduce_dtype))
    theirs = build("plain")
    policy = TorchPrecision(BF16, reduce_dtype)
    for child in theirs.children():
        torch_fully_shard(child, mp_policy=policy)
    torch_fully_shard(theirs, mp_policy=policy)
    for each in (ours, theirs):
        for number in range(3):
            each.set_requires_gradient_sync(number == 2)
            backward(each, number)
    for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert param.grad.dtype is other.grad.dtype
        assert torch.equal(full(param.grad), full(other.grad))


@on_ranks(2)
def test_a_parameter_may_be_used_in_its_own_dtype() -> None:
    def keep(param: nn.Parameter) -> torch.dtype | None:
        return param.dtype if param.ndim == 1 else None

    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(7, 7)), nn.Parameter(torch.ones(7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self.weight.dtype, self.scale.dtype))
            return (x @ self.weight) * self.scale

    model = fully_shard(Scaled(), mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=keep))
    model(batch(0)).sum().backward()
    assert seen == [(BF16, FP32)]
    mean = batch(0).to(BF16).sum(-1).float().sum()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(model.scale.grad.full_tensor().mean(), mean, rtol=2e-2, atol=1e-2)
    with pytest.raises(
        ConfigError, match=r"returned torch.float64 for weight, not None, torch.bfloat16 or torch.float32"
    ):
        fully_shard(Scaled(), mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda _: FP64))

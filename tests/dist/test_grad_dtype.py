"""``grad_dtype`` of parameters: kept over conversions, used for accumulation and for ``.grad``; dtypes of torch's own class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import comparable, full
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
# Before 2.15 torch's class knows nothing of grad_dtype.
BESIDE = {**APIS, **({"torch": torch_fully_shard} if hasattr(torch.Tensor, "_has_grad_dtype_override") else {})}


def chosen(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    for param in model.parameters():
        param.grad_dtype = dtype
    return model


def sharded(api: str, model: nn.Module, **arguments: Any) -> Any:
    if api != "older":
        for child in model.children():
            BESIDE[api](child, **arguments)
    return BESIDE[api](model, **arguments)


def backward(model: nn.Module, number: int) -> None:
    dtype = next(model.parameters()).dtype
    model(batch(number).to(dtype)).square().mean().backward()


def assert_gradients(model: nn.Module, reference: nn.Module, dtype: torch.dtype) -> None:
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        dist.all_reduce(other.grad, op=dist.ReduceOp.AVG)
        assert param.grad_dtype is dtype, name
        assert param.grad.dtype is dtype, name
        assert full(param.grad).dtype is dtype, name
        torch.testing.assert_close(
            *comparable(param.grad, other.grad), rtol=1e-6, atol=1e-9, msg=lambda m, n=name: n + m
        )


@on_ranks(2)
@pytest.mark.parametrize("api", BESIDE)
@pytest.mark.parametrize("is_early", [True, False], ids=["chosen-before", "chosen-after"])
@pytest.mark.parametrize("syncs", [True, False], ids=["syncs", "syncs-last"])
def test_microbatches_accumulate_in_it(api: str, is_early: bool, syncs: bool) -> None:
    model, reference = build("plain").to(BF16), chosen(build("plain").to(BF16), FP32)
    model = sharded(api, chosen(model, FP32)) if is_early else chosen(sharded(api, model), FP32)
    for step in range(2):
        for number in range(4):
            model.set_requires_gradient_sync(syncs or number == 3)
            backward(model, 10 * step + number)
            backward(reference, 10 * step + number)
        assert any((param.grad != param.grad.to(BF16)).any() for param in reference.parameters())
        assert_gradients(model, reference, FP32)
        for each in (model, reference):
            each.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("api", APIS)
def test_it_is_kept_over_conversions_loading_and_copies(api: str) -> None:
    model, reference = sharded(api, chosen(build("plain"), FP64)), chosen(build("plain"), FP64)
    backward(model, 0)
    backward(reference, 0)
    kept = [full(param.grad).clone() for param in model.parameters()]
    model.to(BF16).cpu()
    for param, gradient in zip(model.parameters(), kept, strict=True):
        assert param.dtype is BF16
        assert torch.equal(full(param.grad), gradient), "the gradient was converted with its parameter"
    model.float()
    reference.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    backward(model, 1)
    backward(reference, 1)
    assert_gradients(model, reference, FP64)
    model.half()
    assert all(param.grad_dtype is FP64 for param in model.parameters())
    state = {name: value.float() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    reference = chosen(build("plain"), FP64)
    reference.load_state_dict({name: full(value) for name, value in state.items()})
    model.zero_grad()
    backward(model, 2)
    backward(reference, 2)
    assert_gradients(model, reference, FP64)
    copied = copy.deepcopy(model)
    backward(copied, 2)
    for param, other in zip(copied.parameters(), model.parameters(), strict=True):
        assert param.grad_dtype is FP64
        torch.testing.assert_close(full(param.grad), full(other.grad))


@on_ranks(2)
def test_it_may_be_chosen_after_a_step() -> None:
    model = sharded("fully_shard", build("plain").to(BF16))
    backward(model, 0)
    assert all(param.grad.dtype is BF16 for param in model.parameters())
    model.zero_grad()
    for child in model.children():
        child.reshard()
    chosen(model, FP32)
    reference = chosen(build("plain").to(BF16), FP32)
    backward(model, 1)
    backward(reference, 1)
    assert_gradients(model, reference, FP32)


@on_ranks(2)
@pytest.mark.parametrize("api", sorted({"fully_shard", "replicate", "torch"} & {*BESIDE}))
def test_a_reduce_dtype_goes_before_it(api: str) -> None:
    model, reference = chosen(build("plain"), BF16), chosen(build("plain").to(BF16), FP32)
    policy = (TorchPrecision if api == "torch" else MixedPrecisionPolicy)(BF16, FP32)
    model = sharded(api, model, mp_policy=policy)
    backward_in = batch(0)
    model(backward_in).square().mean().backward()
    reference(backward_in.to(BF16)).square().mean().backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(other.grad, op=dist.ReduceOp.AVG)
        assert param.grad.dtype is BF16
        assert torch.equal(full(param.grad), other.grad.to(BF16)), "not reduced in reduce_dtype"


def policy_of(api: str) -> Any:
    return (TorchPrecision if api == "torch" else MixedPrecisionPolicy)(param_dtype=BF16)


@on_ranks(2)
@pytest.mark.parametrize("api", BESIDE)
def test_none_takes_gradients_as_they_come(api: str) -> None:
    model = sharded(api, chosen(build("plain"), None), **({} if api == "older" else {"mp_policy": policy_of(api)}))
    backward(model, 0)
    expected = FP32 if api == "older" else BF16
    assert {param.grad.dtype for param in model.parameters()} == {expected}
    assert all(param.grad_dtype is None for param in model.parameters())
    backward(model, 1)
    assert {param.grad.dtype for param in model.parameters()} == {expected}


@on_ranks(2)
@pytest.mark.parametrize("api", ["fully_shard", "replicate"])
def test_zeros_for_unused_parameters_need_a_dtype(api: str) -> None:
    model = sharded(api, chosen(build("plain"), None))
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(ConfigError, match="reduce_dtype"):
        backward(model, 0)
    model = sharded(api, chosen(build("plain"), None), mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32))
    model.set_reduce_scatter_unused_params(True)
    backward(model, 0)
    assert {param.grad.dtype for param in model.parameters()} == {FP32}


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
    with pytest.raises(ConfigError, match=r"returned torch.float64 for weight; expected None, param_dtype"):
        fully_shard(Scaled(), mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda _: FP64))

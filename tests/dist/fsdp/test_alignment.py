"""Full tensors lie in memory as torch's own: libraries choose kernels, and with them bits, by the alignment of operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import local
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import MixedPrecisionPolicy, ShardedOptimizer, fully_shard, replicate, shard_model

_BYTES = 64  # of torch's allocations on a CPU


def _odd() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 3), nn.LayerNorm(3), nn.Linear(3, 7, bias=False))


def _is_off(tensor: torch.Tensor) -> bool:
    return bool(local(tensor).data_ptr() % _BYTES)


class _Rule(torch.optim.SGD):
    """An optimizer that looks where whole matrices and their gradients lie."""

    off: list[bool]  # of the last step

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        _Rule.off = [_is_off(each) for param in params if param.grad is not None for each in (param, param.grad)]
        return super().step(closure)


def _hsdp(model: nn.Module) -> object:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


_APIS: dict[str, Callable[[nn.Module], object]] = {
    "fully_shard": fully_shard,
    "bf16": functools.partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "smaller mesh": functools.partial(fully_shard, reshard_after_forward=2),
    "hsdp": _hsdp,
    "shard_model": shard_model,
    "zero2": functools.partial(shard_model, strategy="zero2"),
    "replicate": replicate,
}


@pytest.mark.parametrize("how", _APIS)
@on_ranks(1, 4)
def test_full_parameters_and_gradients_are_aligned(how: str) -> None:
    if how in ("hsdp", "smaller mesh") and torch.distributed.get_world_size() == 1:
        how = "fully_shard"
    model, off = _odd(), list[str]()
    _APIS[how](model)

    def look(where: str, tensors: Any) -> None:
        off.extend(f"{where}: {tuple(each.shape)}" for each in tensors if each is not None and _is_off(each))

    for module in model:
        module.register_forward_hook(lambda module, *_: look("forward", module.parameters()))
        module.register_full_backward_pre_hook(lambda module, *_: look("backward", module.parameters()))
    for _ in range(2):
        model(torch.randn(2, 7)).sum().backward()
        if how == "replicate" or torch.distributed.get_world_size() == 1:  # else gradients are shards
            look("gradients", [param.grad for param in model.parameters()])
    assert not off


@pytest.mark.parametrize("api", [fully_shard, replicate])
@on_ranks(2)
def test_whole_matrices_of_a_rule_and_their_gradients_are_aligned(api: Callable[..., object]) -> None:
    model = _odd()
    api(model)
    optimizer = ShardedOptimizer(dict(model.named_parameters()), _Rule, lr=0.1, update="whole_matrix")
    model(torch.randn(2, 7)).sum().backward()
    optimizer.step()
    assert _Rule.off
    assert not any(_Rule.off)

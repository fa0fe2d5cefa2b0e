"""Which optimizers compute the same bits wherever parameters are cut: they are tried on small tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise.errors import ConfigError
from shardwise.optim.elementwise import ElementwiseStep
from shardwise.optim.sharded_optimizer import ShardedOptimizer, optimizer_backend
from shardwise.optim.state_dict import options_of
from shardwise.zero.optimizer import ZeroRedundancyOptimizer

# Sizes around the widths of vector loops: an element is in the vector part of the whole and in the tail of a slice.
_SIZES = (1, 7, 33, 65, 94)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError unless ``optimizer`` computes the bits of an element alike wherever its parameter is cut.

    Cost: a few steps on some hundred elements, for each param group and dtype of sharded parameters.
    """
    inner, is_cut = optimizer, _is_cut
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        if optimizer.partition == "whole":
            return  # an owner updates whole parameters
        inner, is_cut = optimizer.optim, lambda param: True
    if isinstance(optimizer, ShardedOptimizer):
        backend = optimizer_backend(optimizer)
        inner = backend.optimizer
        if not isinstance(backend, ElementwiseStep):
            return  # an owner updates whole matrices
    tried: set[object] = set()
    for group in optimizer.param_groups:
        options = options_of(group)
        for param in group["params"]:
            key = (param.dtype, param.device, repr(options))
            if key not in tried and is_cut(param):
                tried.add(key)
                _try(type(inner), options, param.dtype, param.device)


def _is_cut(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and not all(isinstance(each, Replicate) for each in param.placements)


def _try(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    noise = torch.Generator("cpu").manual_seed(0)
    values = [torch.randn(sum(_SIZES), generator=noise, device="cpu").to(device, dtype) for _ in range(4)]
    whole = _stepped(cls, options, [[each] for each in values])
    slices = _stepped(cls, options, [list(each.split(_SIZES)) for each in values])
    if not torch.equal(whole, slices):
        raise ConfigError(
            f"Reproducible: {cls.__name__} computes other bits for parameters of {dtype} that are cut elsewhere, since the end "
            "of its vectorized loop rounds differently. Leave fused=True out, keep parameters in float32 (MixedPrecisionPolicy "
            "computes in bfloat16), or keep them whole (strategy='ddp' or 'zero1')"
        )


def _stepped(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], values: Sequence[Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Return the parts ``values[0]`` and their state, in rows, after a step with each of the gradients ``values[1:]``."""
    params = [torch.nn.Parameter(part.clone()) for part in values[0]]
    lr: dict[str, Any] = {name: options[name] for name in ("lr",) if name in options}  # some classes have no default
    optimizer = cls([{**options, "params": params}], **lr)
    for gradients in values[1:]:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    columns: list[torch.Tensor] = []
    for param in params:
        state = [
            value for value in optimizer.state[param].values() if torch.is_tensor(value) and value.shape == param.shape
        ]
        columns.append(torch.stack([param.detach(), *(value.to(param.dtype) for value in state)]))
    return torch.cat(columns, dim=1)

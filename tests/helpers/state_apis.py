"""Apis behind which state is saved and loaded: how a model with a layer ``first`` is wrapped, and its optimizer made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise import ShardedOptimizer, ZeroRedundancyOptimizer, fully_shard

OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.02, "amsgrad": True}


@dataclass(frozen=True)
class Api:
    wrap: Callable[[Any], nn.Module]
    make: Callable[[nn.Module], Any]


def fully_sharded(model: Any) -> nn.Module:
    fully_shard(model.first)
    return fully_shard(model)


def itself(model: nn.Module) -> nn.Module:
    return model


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), **OPTIONS)


def sharded(update: Any = None) -> Callable[[nn.Module], Any]:
    return lambda model: ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, update=update, **OPTIONS)


def zero(partition: Any) -> Callable[[nn.Module], Any]:
    return lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition=partition, **OPTIONS)

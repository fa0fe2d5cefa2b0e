"""torch's own sharding, imported only here and only to be measured."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from shardwise.recipes.bench.setup import LR, Setup
from shardwise.recipes.gpt import GPT


def shard_blocks(model: GPT, setup: Setup, dtype: torch.dtype | None = None) -> nn.Module:
    """FSDP2 as its documentation shows it: every block, then the rest; computed and communicated in ``dtype``."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for module in (*model.blocks, model):
        fully_shard(module, mesh=setup.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return model


def shard_blocks_bf16(model: GPT, setup: Setup) -> nn.Module:
    """The same, computing and communicating in bf16."""
    return shard_blocks(model, setup, torch.bfloat16)


def shard_tuned(model: GPT, setup: Setup) -> nn.Module:
    """FSDP2 tuned by hand: small neighbouring blocks as one unit, each prefetching the next."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    blocks = cast("Sequence[nn.Module]", model.blocks)
    size = setup.shape.grouped_blocks
    groups = [list(blocks[start : start + size]) for start in range(0, len(blocks), size)]
    for group in groups:
        fully_shard(group if len(group) > 1 else group[0], mesh=setup.mesh)
    fully_shard(model, mesh=setup.mesh)
    heads = [cast(FSDPModule, group[0]) for group in groups]
    cast(FSDPModule, model).set_modules_to_forward_prefetch(heads[:1])
    for this, following in pairwise(heads):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])
    return model


def zero_adamw(model: nn.Module) -> Optimizer:
    """Return torch's ZeroRedundancyOptimizer over AdamW."""
    return _zero(model, parameters_as_bucket_view=False)


def zero_adamw_bucket_view(model: nn.Module) -> Optimizer:
    """The same with parameters in flat buffers."""
    return _zero(model, parameters_as_bucket_view=True)


def _zero(model: nn.Module, *, parameters_as_bucket_view: bool) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        model.parameters(), AdamW, parameters_as_bucket_view=parameters_as_bucket_view, lr=LR
    )


def load() -> None:
    """Import what the functions above import, so that it does not count as memory of the contender that needs it."""
    for name in ("torch.distributed.fsdp", "torch.distributed.optim"):
        importlib.import_module(name)

"""The values of ``--shard``: one entry each, saying how to wrap the model, build its optimizer, clip and sync.

A new door is a new entry in ``DOORS``; the trainer, the checkpoints and the command line read the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from shardwise import FSDPModule, MixedPrecisionPolicy, fully_shard
from shardwise.recipes.config import TrainConfig
from shardwise.recipes.gpt import GPT


@dataclass(frozen=True, slots=True)
class Door:
    """How a model is trained under one value of ``--shard``.

    ``wrap`` gets the plain model on its device; ``sync(model, on)`` says whether this microbatch's backward reduces
    gradients; ``precision`` is entered around forward; ``plain`` gives the module to sample from.
    """

    summary: str
    wrap: Callable[[GPT, TrainConfig], nn.Module]
    build_optimizer: Callable[[nn.Module, TrainConfig], Optimizer]
    clip: Callable[[nn.Module, float], Tensor]
    sync: Callable[[nn.Module, bool], AbstractContextManager[None]]
    precision: Callable[[TrainConfig, torch.device], AbstractContextManager[object]]
    plain: Callable[[nn.Module], nn.Module]


def build_adamw(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return AdamW with weight decay on matrices only; one fused update per device and dtype."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients to a total norm of at most ``max_norm``; return the norm before, the same on all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _shard_fully(model: GPT, config: TrainConfig) -> nn.Module:
    policy = MixedPrecisionPolicy()
    if config.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


@contextmanager
def _full_sync(model: nn.Module, on: bool):
    switch = cast(FSDPModule, model)
    switch.set_requires_gradient_sync(on)
    try:
        yield
    finally:
        switch.set_requires_gradient_sync(True)


def _replicate(model: GPT, config: TrainConfig) -> nn.Module:
    return DistributedDataParallel(model)


def _replicate_sync(model: nn.Module, on: bool) -> AbstractContextManager[None]:
    return nullcontext() if on else cast(DistributedDataParallel, model).no_sync()


def _autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if config.dtype == "bf16" else nullcontext()


DOORS: Mapping[str, Door] = MappingProxyType(
    {
        "full": Door(
            summary="fully_shard: parameters, gradients and optimizer state sharded over all ranks",
            wrap=_shard_fully,
            build_optimizer=build_adamw,
            clip=clip_gradients,
            sync=_full_sync,
            precision=lambda config, device: nullcontext(),
            plain=lambda model: model,
        ),
        "none": Door(
            summary="plain DistributedDataParallel: everything on every rank, for comparison",
            wrap=_replicate,
            build_optimizer=build_adamw,
            clip=clip_gradients,
            sync=_replicate_sync,
            precision=_autocast,
            plain=lambda model: cast(DistributedDataParallel, model).module,
        ),
    }
)

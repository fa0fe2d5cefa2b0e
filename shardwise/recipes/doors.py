"""The values of ``--shard``: one entry each, saying how to wrap the model, build its optimizer, reduce, clip and sync.

A new door is a new entry in ``DOORS``; the trainer, the checkpoints and the command line read the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from shardwise import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    policy,
    replicate,
    shard_model,
)
from shardwise.comm.links.link import check_transport
from shardwise.recipes.config import TrainConfig
from shardwise.recipes.own_model import blocks_of


@dataclass(frozen=True, slots=True)
class Door:
    """How a model is trained under one value of ``--shard``.

    ``wrap`` gets the model on its device (heads split, parts compiled) and the data-parallel mesh; ``sync(model, on)``
    says whether this microbatch's backward reduces gradients; ``reduce`` is called after the last backward of a step;
    ``clip`` returns the norm before; ``precision`` is entered around forward; ``plain`` gives the module itself.
    """

    summary: str
    wrap: Callable[[nn.Module, TrainConfig, DeviceMesh], nn.Module]
    build_optimizer: Callable[[nn.Module, TrainConfig], Optimizer]
    sync: Callable[[nn.Module, bool], AbstractContextManager[None]]
    reduce: Callable[[Optimizer], None]
    clip: Callable[[nn.Module, Optimizer, float], Tensor]
    precision: Callable[[TrainConfig, torch.device], AbstractContextManager[object]]
    plain: Callable[[nn.Module], nn.Module]


def param_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Return groups with weight decay on matrices only, one per mesh: a fused update takes tensors of one mesh."""
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for param in model.parameters():
        if not param.requires_grad:
            continue
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        groups.setdefault((param.dim() >= 2, mesh), []).append(param)
    return [
        {"params": params, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in groups.items()
    ]


def build_adamw(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return AdamW with one fused update per group."""
    return AdamW(param_groups(model, config), lr=config.lr, betas=(0.9, 0.95), fused=True)


def build_zero_adamw(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return AdamW of which every rank keeps and updates the same number of elements."""
    return ZeroRedundancyOptimizer(
        param_groups(model, config), AdamW, partition="even", lr=config.lr, betas=(0.9, 0.95), fused=True
    )


def clip_gradients(model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
    """Scale gradients to a total norm of at most ``max_norm``; return the norm before, the same on all ranks."""
    del optimizer
    return clip_grad_norm_(model.parameters(), max_norm)


def clip_owned_gradients(model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
    """The same where each gradient is only with its owner.  Collective."""
    del model
    return cast(ZeroRedundancyOptimizer, optimizer).clip_grad_norm_(max_norm)


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds this rank's state."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _engine_options(config: TrainConfig) -> tuple[MixedPrecisionPolicy, OffloadPolicy]:
    precision = MixedPrecisionPolicy()
    if config.dtype == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return precision, CPUOffloadPolicy() if config.offload else OffloadPolicy()


def _shard_fully(model: nn.Module, config: TrainConfig, mesh: DeviceMesh) -> nn.Module:
    precision, offload = _engine_options(config)
    sharded: nn.Module = shard_model(
        model, min_unit_bytes=config.min_unit_bytes, mesh=mesh, mp_policy=precision, offload_policy=offload
    )
    assert isinstance(sharded, FSDPModule)
    sharded.set_transport(check_transport(config.transport))
    return sharded


def _replicate(model: nn.Module, config: TrainConfig, mesh: DeviceMesh) -> nn.Module:
    precision, offload = _engine_options(config)
    for block in blocks_of(model):
        replicate(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
    replicated = replicate(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    replicated.set_transport(check_transport(config.transport))
    return model


def _engine_sync(model: nn.Module, on: bool) -> AbstractContextManager[None]:
    return policy(model, sync=on)


def _wrap_ddp(model: nn.Module, config: TrainConfig, mesh: DeviceMesh) -> nn.Module:
    del config, mesh
    return DistributedDataParallel(model, gradient_as_bucket_view=True)  # else gradients are held twice


def _ddp_sync(model: nn.Module, on: bool) -> AbstractContextManager[None]:
    return nullcontext() if on else cast(DistributedDataParallel, model).no_sync()


def _autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16) if config.dtype == "bf16" else nullcontext()


def _reduce_to_owners(optimizer: Optimizer) -> None:
    cast(ZeroRedundancyOptimizer, optimizer).reduce_gradients()


_FULL = Door(
    summary="fully_shard: parameters, gradients and optimizer state sharded over all ranks",
    wrap=_shard_fully,
    build_optimizer=build_adamw,
    sync=_engine_sync,
    reduce=lambda optimizer: None,
    clip=clip_gradients,
    precision=lambda config, device: nullcontext(),
    plain=lambda model: model,
)
_NONE = Door(
    summary="plain DistributedDataParallel: everything on every rank, for comparison",
    wrap=_wrap_ddp,
    build_optimizer=build_adamw,
    sync=_ddp_sync,
    reduce=lambda optimizer: None,
    clip=clip_gradients,
    precision=_autocast,
    plain=lambda model: cast(DistributedDataParallel, model).module,
)
_GRADIENTS = Door(
    summary="ZeRO-2: gradients (after backward) and optimizer state sharded, parameters whole",
    wrap=lambda model, config, mesh: model,
    build_optimizer=build_zero_adamw,
    sync=lambda model, on: nullcontext(),
    reduce=_reduce_to_owners,
    clip=clip_owned_gradients,
    precision=_autocast,
    plain=lambda model: model,
)
DOORS: Mapping[str, Door] = MappingProxyType(
    {
        "full": _FULL,
        "hybrid": replace(
            _FULL, summary="fully_shard within --replicas groups of ranks, whole copies between them (HSDP)"
        ),
        "replicate": replace(_FULL, summary="our engine with everything on every rank", wrap=_replicate),
        "gradients": _GRADIENTS,
        "optimizer": replace(
            _NONE, summary="ZeRO-1: DDP with only the optimizer state sharded", build_optimizer=build_zero_adamw
        ),
        "none": _NONE,
    }
)

"""torch's own classes, imported here alone: what ours are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer


def fully_shard(modules: Any, **arguments: Any) -> None:
    """Call torch's own ``fully_shard``."""
    from torch.distributed.fsdp import fully_shard as theirs

    theirs(modules, **arguments)


def mixed_precision(**arguments: Any) -> Any:
    """Return torch's own policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(**arguments)


def cpu_offload() -> Any:
    """Return torch's own policy."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=False)


def zero(params: Any, make: type[Optimizer], bucket_view: bool, options: dict[str, Any]) -> Optimizer:
    """Return torch's own ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, make, parameters_as_bucket_view=bucket_view, **options)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Cut linear layers over ``mesh``: ``plan`` says "columns" or "rows" by path."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    styles: dict[str, ParallelStyle] = {}
    for path, how in plan.items():
        styles[path] = ColwiseParallel() if how == "columns" else RowwiseParallel()
    parallelize_module(model, mesh, styles)


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype called ``name``, None for ""."""
    found: torch.dtype | None = getattr(torch, name) if name else None
    return found

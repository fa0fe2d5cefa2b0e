"""What ours are compared with: torch's own classes, from a file of the tests; without that file, one process alone."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fuzz.case import Contender

FILE = Path(__file__).parents[1] / "helpers" / "torch_peers.py"
APIS = ("torch_fully_shard", "torch_zero", "within_replicate")


def able(contenders: Iterable[Contender], file: Path = FILE) -> list[Contender]:
    """Return those of ``contenders`` that can run here: all, where ``file`` is there."""
    is_there = file.exists()
    return [each for each in contenders if is_there or each.api not in APIS]


@functools.cache
def _theirs() -> Any:
    spec = importlib.util.spec_from_file_location("torch_peers", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fully_shard(modules: Any, **arguments: Any) -> None:
    """Call torch's own ``fully_shard``."""
    _theirs().fully_shard(modules, **arguments)


def replicate(module: nn.Module) -> None:
    """Call torch's own composable ``replicate``."""
    _theirs().replicate(module, find_unused_parameters=True)


def mixed_precision(**arguments: Any) -> Any:
    """Return torch's own policy."""
    return _theirs().MixedPrecisionPolicy(**arguments)


def cpu_offload() -> Any:
    """Return torch's own policy."""
    return _theirs().cpu_offload()


def zero(params: Any, make: type[Optimizer], bucket_view: bool, options: dict[str, Any]) -> Optimizer:
    """Return torch's own ZeroRedundancyOptimizer."""
    return _theirs().zero(params, make, bucket_view, options)


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

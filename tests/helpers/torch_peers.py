"""torch's own classes, which the fuzzer compares with; it finds this file by its path."""

from __future__ import annotations

from typing import Any

from torch.distributed._composable import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

__all__ = ["MixedPrecisionPolicy", "cpu_offload", "fully_shard", "replicate", "zero"]


def cpu_offload() -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False)


def zero(params: Any, make: type[Optimizer], bucket_view: bool, options: dict[str, Any]) -> Optimizer:
    return ZeroRedundancyOptimizer(params, make, parameters_as_bucket_view=bucket_view, **options)

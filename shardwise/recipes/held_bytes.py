"""Bytes that a rank holds, and what an unsharded run would hold."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.optim.owned_gradient import OwnedGradient


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What one rank holds.  ``peak_bytes`` is the peak resident set on CPU, the allocator's peak on a GPU."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def fold_held(fold: Callable[[Iterable[int]], int], held: Sequence[HeldBytes]) -> HeldBytes:
    """Fold each figure over ranks: ``fold_held(max, held)`` is the largest of each."""
    return HeldBytes(
        parameter_bytes=fold(item.parameter_bytes for item in held),
        gradient_bytes=fold(item.gradient_bytes for item in held),
        optimizer_bytes=fold(item.optimizer_bytes for item in held),
        peak_bytes=fold(item.peak_bytes for item in held),
    )


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the local parts; a shared tensor counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(part.numel() * part.element_size() for tensor in distinct.values() for part in _parts(tensor))


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    if isinstance(tensor, OwnedGradient):
        return tensor.parts
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def measure_held(model: nn.Module, optimizer: Optimizer) -> HeldBytes:
    """Measure what this rank holds now; gradients are there only between backward and zero_grad.

    ``optimizer``: the one that holds this rank's state.
    """
    states = (value for state in optimizer.state.values() for value in state.values())
    return HeldBytes(
        parameter_bytes=local_bytes(model.parameters()),
        gradient_bytes=local_bytes(p.grad for p in model.parameters() if p.grad is not None),
        optimizer_bytes=local_bytes(value for value in states if isinstance(value, Tensor)),
    )


def unsharded_bytes(num_parameters: int) -> HeldBytes:
    """Return what one rank holds without sharding: 4 bytes a parameter, 4 a gradient, 8 of AdamW state (fp32)."""
    return HeldBytes(4 * num_parameters, 4 * num_parameters, 8 * num_parameters)


def unsharded_of(model: nn.Module) -> HeldBytes:
    """Return the same for a model that is not sharded yet: AdamW's two averages are in the dtypes of the parameters."""
    params = {id(param): param for param in model.parameters()}.values()
    trained = local_bytes(param for param in params if param.requires_grad)
    return HeldBytes(local_bytes(params), trained, 2 * trained)


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak: of the CUDA allocator, or of resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Return the largest resident set since the process started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def format_bytes(count: float) -> str:
    """Write a byte count with three digits: 1.25 MB, 37.5 GB.  Units are powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

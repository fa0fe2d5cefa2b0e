"""Programs that publish weights, engines that take them, and what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import WeightReader, full_state_dict

BF16 = torch.bfloat16


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, for which NaN equals NaN, and zeros have signs."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names whose bits differ, or that only one side has."""
    both = found.keys() & wanted.keys()
    unlike = [name for name in both if not torch.equal(bits(found[name]), bits(wanted[name]))]
    return sorted({*unlike, *(found.keys() ^ wanted.keys())})


class Engine:
    """Tensors of an inference engine, on rank 0 alone, that follow what is published."""

    def __init__(self, folder: str | Path, like: nn.Module, dtype: torch.dtype | None = BF16, **options: Any) -> None:
        self.is_here = not dist.is_initialized() or dist.get_rank() == 0
        self.weights = {
            name: torch.full_like(value, 3, dtype=dtype if value.is_floating_point() else None)
            for name, value in like.state_dict().items()
        }
        self.reader = WeightReader(folder, **options)

    def advance(self) -> dict[str, torch.Tensor]:
        """Take the newest version; every rank calls it, between two calls of the publisher."""
        return self.reader.advance(self.weights) if self.is_here else {}


def assert_follows(engine: Engine, model: nn.Module, dtype: torch.dtype | None = BF16, what: str = "") -> None:
    """Compare what the engine has after it has advanced with the weights of ``model``.  Collective."""
    engine.advance()
    wanted = full_state_dict(model, dtype=dtype)
    if engine.is_here:
        assert not differing(engine.weights, wanted), what


def change_some(model: nn.Module, part: float, seed: int) -> None:
    """Change ``part`` of the elements of each shard by much, whatever API the model has."""
    chance = torch.Generator().manual_seed(seed * 1000 + (dist.get_rank() if dist.is_initialized() else 0))
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local() if hasattr(param, "to_local") else param.detach()
            local.mul_(torch.where(torch.rand(local.shape, generator=chance) < part, -1.5, 1.0))

"""Numbers by which ranks compare tensors without sending them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

CHUNK_NUMEL = 1 << 20
SAMPLE_NUMEL = 1 << 16
NUM_PROJECTIONS = 16
_SKETCHED_NUMEL = 1 << 12
_ODD = -7046029254386353131  # 2**64 / golden ratio, as a signed number: spreads consecutive integers over all bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(values: torch.Tensor) -> int:
    """Return a number that depends on every bit of ``values`` and on their order; 0 for zeros."""
    values = torch.view_as_real(values) if values.is_complex() else values
    numbers = values.detach().reshape(-1).view(_INTEGERS[values.element_size()])
    weights = torch.arange(1, min(CHUNK_NUMEL, numbers.numel()) + 1, device=values.device) * _ODD
    weights = (weights ^ (weights >> 31)) * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk in numbers.split(CHUNK_NUMEL):
        total = total * _ODD + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return int(total.item())


def sample_of(local: torch.Tensor, most: int = SAMPLE_NUMEL) -> torch.Tensor:
    """Return at most ``most`` elements of ``local``, 1-D: all of them, or evenly spaced ones and the last ones."""
    flat = local.reshape(-1)
    if flat.numel() <= most:
        return flat
    half = most // 2
    return torch.cat([flat[:: -(-flat.numel() // half)], flat[-half:]])


@functools.cache
def _signs() -> torch.Tensor:
    noise = torch.Generator("cpu").manual_seed(1)
    return _random_signs(NUM_PROJECTIONS * _SKETCHED_NUMEL, noise).view(NUM_PROJECTIONS, _SKETCHED_NUMEL)


def _random_signs(numel: int, noise: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (numel,), generator=noise, dtype=torch.int8, device="cpu") * 2 - 1


@dataclass(frozen=True, slots=True)
class Sketch:
    """What tells a tensor from another by more than yes or no.

    Attributes:
        norm: of all values.  projections: their sums with random signs.
        tolerance: how far apart, of the norm, rounding in their dtype may bring two of them.
    """

    norm: float
    projections: Sequence[float]
    tolerance: float

    @classmethod
    def of(cls, values: torch.Tensor) -> Sketch:
        """Return the sketch of ``values``, the same on every device but for rounding."""
        noise = torch.Generator("cpu").manual_seed(0)
        total = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device="cpu")
        square = 0.0
        flat = torch.view_as_real(values) if values.is_complex() else values
        for chunk in flat.detach().reshape(-1).split(_SKETCHED_NUMEL):
            numbers = chunk.to("cpu", torch.float64)
            # All chunks share their signs, each chunk multiplied by a random sign: drawing a sign per element would dominate.
            turns = _random_signs(NUM_PROJECTIONS, noise).double()
            total += turns * (_signs()[:, : numbers.numel()].double() @ numbers)
            square += float(numbers.square().sum())
        eps = torch.finfo(flat.dtype).eps if flat.dtype.is_floating_point else 0.0
        return cls(math.sqrt(square), total.tolist(), min(256 * eps, 0.02))

    @property
    def told(self) -> list[object]:
        """What to make it of again on another rank, as JSON has it."""
        return [self.norm, list(self.projections), self.tolerance]

    def distance(self, other: Sketch) -> float:
        """Return about the norm of the difference, over the larger norm; nan if that cannot be known."""
        squares = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        return math.sqrt(sum(squares) / NUM_PROJECTIONS) / max(self.norm, other.norm, 1e-300)

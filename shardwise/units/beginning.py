"""Digests of a parameter before sharding, with which ranks check that all of them sharded the same values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm.digest import Sketch, digest_of, sample_of

_SAMPLE_NUMEL = 1 << 14


@dataclass(frozen=True, slots=True)
class Beginning:
    """Digests of one parameter when it was sharded; of a large parameter, of a sample.

    Attributes:
        digest, sketch: of the whole values.
        shard: the sketch of this rank's shard of them.
    """

    digest: int
    sketch: Sketch
    shard: Sketch

    @classmethod
    def of(cls, whole: torch.Tensor, shard: torch.Tensor) -> Beginning | None:
        """Return the digests of ``whole``; None if it has no values (meta) or is a tensor subclass."""
        if type(whole) not in (torch.Tensor, nn.Parameter) or whole.is_meta:
            return None
        sample = sample_of(whole.detach(), _SAMPLE_NUMEL)
        return cls(digest_of(sample), Sketch.of(sample), _sketch_of(shard))

    def was_overwritten(self, shard: torch.Tensor) -> bool:
        """Return True if ``shard`` has changed since sharding, so that the values before it do not matter any more.

        Conversions do not count as changes.
        """
        if shard.is_meta:
            return True
        now = _sketch_of(shard)
        return not self.shard.distance(now) <= max(self.shard.tolerance, now.tolerance)


def _sketch_of(shard: torch.Tensor) -> Sketch:
    return Sketch.of(sample_of(shard.detach(), _SAMPLE_NUMEL))

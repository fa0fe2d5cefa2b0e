"""What a parameter held before it was sharded: enough for ranks to learn whether all of them cut the same values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm.digest import Sketch, digest_of, sample_of

_SAMPLE_NUMEL = 1 << 14


@dataclass(frozen=True, slots=True)
class Beginning:
    """Values of one parameter when it was sharded; of a large one, a sample.

    Attributes:
        digest, sketch: of the whole values.
        shard: the sketch of the shard that this rank cut from them.
    """

    digest: int
    sketch: Sketch
    shard: Sketch

    @classmethod
    def of(cls, whole: torch.Tensor, shard: torch.Tensor) -> Beginning | None:
        """Return the beginning of ``whole``; None where there are no values (meta) or only a user's class could read them."""
        if type(whole) not in (torch.Tensor, nn.Parameter) or whole.is_meta:
            return None
        sample = sample_of(whole.detach(), _SAMPLE_NUMEL)
        return cls(digest_of(sample), Sketch.of(sample), _sketch_of(shard))

    def was_overwritten(self, shard: torch.Tensor) -> bool:
        """Return True if ``shard`` has other values than it was cut with, so that the beginning does not matter any more.

        Conversions keep values.
        """
        if shard.is_meta:
            return True
        now = _sketch_of(shard)
        return not self.shard.distance(now) <= max(self.shard.tolerance, now.tolerance)


def _sketch_of(shard: torch.Tensor) -> Sketch:
    return Sketch.of(sample_of(shard.detach(), _SAMPLE_NUMEL))

"""A mark behind what is summed: ranks that sum different things hear of it from the sum, at no message more.

A backend pairs all-reduces by their number in the group and knows nothing of what is in them: a rank that has left one out
mixes its next one with the others' last, and goes on with numbers of nobody.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.alive import ranks_in_words

MOST_RANKS = 256  # so many marks are added up exactly, and one that differs shows in the mean
_LARGEST = 0xFFF


@dataclass(frozen=True, slots=True)
class ReductionChecksum:
    """What this rank says about a sum.

    Attributes:
        whole: 1-D, what is summed, with one element behind it for the mark.  label: what is in it.
        number: how many sums of these parameters came before, also those that were left out by choice.
    """

    whole: torch.Tensor
    label: str
    number: int

    @property
    def _value(self) -> int:
        return zlib.crc32(f"{self.label} {self.number}".encode()) & _LARGEST

    def put(self) -> torch.Tensor:
        """Write the mark; return what to sum in place of the section alone."""
        self.whole[-1] = self._value
        return self.whole

    def check(self, scale: float, ranks: Sequence[int], mine: int) -> None:
        """Raise unless what was summed over global ``ranks``, times ``scale``, is of the same thing on all of them.

        Raises: RuntimeError, as a backend does of a group whose ranks cannot be paired any more; it is explained like one.
        """
        mean = float(self.whole[-1]) / scale / len(ranks)
        if abs(mean - self._value) < 0.4 / len(ranks):
            return
        raise RuntimeError(sums_something_else(self.label, self.number, mine, [rank for rank in ranks if rank != mine]))


def sums_something_else(label: str, number: int, mine: int, others: Sequence[int]) -> str:
    """Say that one of ``others`` sums something else than what ``label`` names, which rank ``mine`` sums.  Ranks are global."""
    return (
        f"rank {mine} sums gradients of {label} with its replicas, {ranks_in_words(others)}, as number {number + 1}, and one "
        "of them sums something else: it has left a sum out, or has other gradients (set_requires_all_reduce and the "
        "microbatches must be the same on all replicas)"
    )

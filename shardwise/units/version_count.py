"""The version of a shard: how often it was written to, over all the memory that it has had."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


def _nothing() -> None:
    return None


class VersionCount:
    """Torch's counts of writes to one shard, which begin anew with every local tensor that user code puts in its place.

    Attributes:
        base: what is added to torch's counts.
        last: the version when its unit last looked.
        gathered: the version that the full form was last gathered from, and what has been put in since that is no write.
        local: weak reference to the local tensor whose writes are counted, if the shard is a DTensor.
        has_kept_values: what was put in the place of that has its values, on all ranks.
    """

    __slots__ = ("base", "gathered", "has_kept_values", "last", "local")

    def __init__(self) -> None:
        self.base = 0
        self.last = 0
        self.gathered = -1
        self.has_kept_values = False
        self.local: Callable[[], torch.Tensor | None] = _nothing

    def of(self, sharded: torch.Tensor, local: torch.Tensor) -> int:
        """Return the version of ``sharded``, which has ``local``."""
        return sharded._version + local._version + self.base

    def keep(self, version: int, sharded: torch.Tensor, local: torch.Tensor) -> None:
        """Let ``version`` be that of ``sharded`` with ``local``, of the same values as what it had before."""
        self.base += version - self.of(sharded, local)
        if local is not sharded:
            self.local = weakref.ref(local)

    def go_on(self, sharded: torch.Tensor, local: torch.Tensor) -> None:
        """Go on counting where user code has put ``local`` in the place of another.

        It is another version, whatever was written to either.  To autograd it is no write if it has kept its values: on one
        process conversions leave what a graph holds as it is.
        """
        if local is sharded:
            return  # a plain parameter: what counts its writes stays
        before, is_same, self.has_kept_values = self.last, self.has_kept_values, False
        self.keep(before + 1, sharded, local)
        if self.gathered == before and is_same and not (sharded._version or local._version):
            self.gathered += 1

"""Whom a rank waited for when a backend's collective failed: its own text says a port, or nothing."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist

from shardwise.comm.alive import ranks_in_words
from shardwise.comm.last_words import in_short
from shardwise.errors import ShardwiseError


class NamingPartners:
    """Add to a backend's error in the block which ranks of ``group`` it was about, if that is not all ranks of the job."""

    __slots__ = ("_group",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, ShardwiseError) or not dist.is_initialized():
            return
        ranks = dist.get_process_group_ranks(self._group)
        if len(ranks) < dist.get_world_size():
            others = ranks_in_words([rank for rank in ranks if rank != dist.get_rank()])
            raise RuntimeError(f"{in_short(error)} (in a group with {others})") from error

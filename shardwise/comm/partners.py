"""Whom a rank waited for when a backend's collective failed: its own text says a port, or nothing."""

from __future__ import annotations

import torch.distributed as dist

from shardwise.comm.alive import ranks_in_words
from shardwise.comm.last_words import in_short
from shardwise.errors import ShardwiseError


def name_partners(error: RuntimeError, group: dist.ProcessGroup) -> None:
    """Raise a backend's ``error`` with the ranks of ``group`` that it was about; return if these are all ranks of the job."""
    if isinstance(error, ShardwiseError) or not dist.is_initialized():
        return
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        others = ranks_in_words([rank for rank in ranks if rank != dist.get_rank()])
        raise RuntimeError(f"{in_short(error)} (in a group with {others})") from error

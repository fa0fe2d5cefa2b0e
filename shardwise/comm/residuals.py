"""What coding has lost of gradients, summed over the ranks that lost it: how it is saved, at any number of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm.c10d import all_to_all_rows
from shardwise.comm.watched import await_collective


def sum_at_owners(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return (n,) the sum over ranks, in rank order, of their rows for this one; ``rows`` (ranks, n), float32.  Collective."""
    received = torch.empty_like(rows)
    await_collective(all_to_all_rows(received, rows.contiguous(), group, async_op=True), group)
    total = torch.zeros_like(rows[0])
    for row in received:
        total += row
    return total


def sum_everywhere(row: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks of ``row`` (n,), float32, the same bits on all.  Collective."""
    total = row.clone()
    await_collective(dist.all_reduce(total, group=group, async_op=True), group)
    return total


def own_part(total: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return ``total`` (n,) with zeros in all but the ``rank``-th of ``size`` parts: the ranks' sum is ``total`` again."""
    part = -(-total.numel() // size)
    kept = torch.zeros_like(total)
    window = slice(rank * part, (rank + 1) * part)
    kept[window] = total[window]
    return kept

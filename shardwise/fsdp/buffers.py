"""Buffers that differ between ranks (BatchNorm)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHARES_BUFFERS = "_shardwise_shares_buffers"  # marks a module whose forward broadcasts the first rank's buffers
_MOST_LISTED = 8


def unlike_buffers(digests_of_ranks: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """Return the buffers that differ, each with two ranks whose values are different."""
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, list[int]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in digests.items():
            other, known = first.setdefault(name, (rank, digest))
            if digest != known:
                found.setdefault(name, [other, rank])
    return found


def unlike_in_words(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Return what is wrong with buffers that differ, and what to do."""
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    one, other = ranks
    return (
        f"buffers differ between ranks: {', '.join(names[:_MOST_LISTED])}{more}; rank {one} and rank {other} have different "
        "values, and a checkpoint holds one. Call save(..., buffers='rank0') to save those of the lowest rank, or "
        "'per_rank' for those of every rank, which load at the same number of ranks; or keep buffers equal during training "
        "(SyncBatchNorm)"
    )

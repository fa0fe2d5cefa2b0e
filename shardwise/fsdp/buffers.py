"""Buffers that differ between ranks (BatchNorm): a warning in the first steps, not first when a save refuses them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from shardwise import torch_private
from shardwise.consistency.agreement import MismatchCheck
from shardwise.consistency.store import digest_of
from shardwise.errors import TransportError

logger = logging.getLogger(__name__)
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


def warn_of_unlike(root: nn.Module, step: int, check: MismatchCheck) -> None:
    """Compare what the buffers of ``root`` are after its first step with another rank's, and warn on this one.

    No rank waits: all post in step 1, and read in step 3, which a rank begins after it has reduced gradients with all others.
    """
    with suppress(TransportError):  # the rank that keeps the store has made its steps and ended
        if step == 1:
            check.post("buffers", json.dumps(_digests_in(root)))
        if step == 3:
            other = check.members[check.rank == check.members[0]]
            mine, theirs = (check.posted("buffers", rank) for rank in (check.rank, other))
            unlike = unlike_buffers([json.loads(each) for each in (theirs, mine) if each is not None])
            if unlike:
                logger.warning("after the first step %s", unlike_in_words(list(unlike), sorted([other, check.rank])))


def _digests_in(root: nn.Module) -> dict[str, str]:
    """Return the digests of buffers that are saved and that no forward makes equal on all ranks."""
    shared = {id(inner) for module in root.modules() if SHARES_BUFFERS in module.__dict__ for inner in module.modules()}
    return {
        f"{path}.{name}" if path else name: f"{digest_of(buffer):x}"
        for path, module in root.named_modules()
        if id(module) not in shared
        for name, buffer in torch_private.saved_buffers_of(module).items()
        if type(buffer) is torch.Tensor and not buffer.is_meta
    }

"""Buffers that differ between ranks (BatchNorm): a warning in the first steps, not first when a save refuses them."""

from __future__ import annotations

import json
import logging
import weakref
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
_DIGESTS, _UNLIKE = "buffers of the first rank", "buffers that differ"


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


class BufferComparison:
    """Compare what a root's buffers are after its first step, and warn on every rank.

    No rank waits: each reads what others have posted before the reductions of a later step, which it has received.
    """

    def __init__(self, root: nn.Module, mismatch_check: MismatchCheck) -> None:
        self._root = weakref.ref(root)
        self._check = mismatch_check
        self._digests: dict[str, str] = {}
        self._num_steps = 0

    def after_step(self) -> bool:
        """Do the next part after a step that has reduced gradients; return True while another one follows."""
        self._num_steps += 1
        with suppress(TransportError):  # rank 0, which may keep the store, has made its steps and ended
            self._compare()
        return self._num_steps < 3

    def _compare(self) -> None:
        check = self._check
        is_first = check.rank == check.members[0]
        if self._num_steps == 1:
            root = self._root()
            self._digests = {} if root is None else _digests_in(root)
            if is_first:
                check.post_for_later(_DIGESTS, json.dumps(self._digests))
        elif self._num_steps == 2:
            text = None if is_first else check.posted_before(_DIGESTS)
            unlike = unlike_buffers([json.loads(text), self._digests]) if text is not None else {}
            if unlike:
                words = unlike_in_words(list(unlike), [check.members[0], check.rank])
                check.post_for_later(_UNLIKE, words)
        elif (text := check.posted_before(_UNLIKE)) is not None:
            logger.warning("after the first step %s", text)


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

"""Backends' raw errors in words: which rank is gone, or may have been left by an exception."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.comm import alarm
from shardwise.comm.alive import is_gone, ranks_in_words
from shardwise.errors import ShardwiseError, TransportError
from shardwise.torch_private import default_store

_T = TypeVar("_T")
_GRACE_S = 2.0  # a connection is closed before its process has ended


def naming_lost_peers(act: Callable[[], _T], what: str, members: Sequence[int], mine: int) -> _T:
    """Return ``act()``, a collective of global ranks ``members``, of which this process is ``mine``.

    Args:
        what: begins the message: "whole matrices cannot go to their owners or back".
    Raises: what ``act`` raises if that says itself what happened (an error of ours, of memory); in place of any other
        RuntimeError a TransportError that names the ranks whose processes are gone, or all that it may be.
    """
    try:
        return act()
    except (ShardwiseError, torch.OutOfMemoryError):
        raise  # it says what happened
    except RuntimeError as error:
        others = tuple(rank for rank in members if rank != mine)
        gone = _gone(others)
        if gone:
            who = f"{ranks_in_words(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        else:
            who = f"{ranks_in_words(others)} did not all come, or left by an exception: see their errors"
        first = str(error).split("\n")[0]
        raise TransportError(
            f"{what}: {who}; rank {mine} waited. Every rank must make the same calls in the same order; first error: {first}"
        ) from error


def _gone(others: Sequence[int]) -> tuple[int, ...]:
    store = default_store() if dist.is_initialized() else None
    if store is None:
        return ()
    end = time.monotonic() + _GRACE_S
    while True:
        alarm.look()
        found = tuple(rank for rank in others if is_gone(store, rank))
        if found or time.monotonic() >= end:
            return found
        time.sleep(0.05)

"""Backends' raw errors in words: which rank is gone, or may have been left by an exception."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.black_box import explainers, witnesses
from shardwise.comm import alarm
from shardwise.comm.alive import LOOK_S, is_gone, ranks_in_words
from shardwise.comm.last_words import (
    ASKS,
    cited,
    gone_in_words,
    in_short,
    leave,
    out_of_reach,
    out_of_reach_in_words,
    store_of_job,
    words_of,
)
from shardwise.comm.leaving import will_leave
from shardwise.comm.mending import break_off_all
from shardwise.comm.store import BRIEF_S, JobStore
from shardwise.comm.wait_watch import status_in_words
from shardwise.doctor.user_code import lines_of_trace
from shardwise.errors import ShardwiseError, TransportError

_T = TypeVar("_T")
_MOST_ASKED = 64
_OF_BACKEND = re.compile(r"^\[\S+\.(cc|cpp|hpp):\d+\]|^Connection (closed|reset)|^Wait timeout")
_SAY_S = 3.0  # for ranks to fail after this one, and to say so


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
        others, store = tuple(rank for rank in members if rank != mine), store_of_job()
        if store is None:
            who = f"{ranks_in_words(others)} did not all make this call, or raised an exception: see their errors"
        else:
            leave(f"{what} on rank {mine}: {in_short(error)}{ASKS}")
            break_off_all(members)  # nobody may wait for this rank while it asks
            status = status_in_words(members)
            who = found_among(others, store, str(error)) + (f"; {status}" if status else "")
        raise TransportError(
            f"{what}: {who}; rank {mine} waited. Every rank must make the same calls in the same order; first error: "
            f"{in_short(error)}"
        ) from error


def concerns_others(error: RuntimeError) -> bool:
    """Return True for an error of a backend, or of ours about another rank; False for one of this rank alone."""
    return not isinstance(error, (ShardwiseError, torch.OutOfMemoryError)) or isinstance(error, TransportError)


def _explain(error: BaseException) -> str:
    """Return which ranks a backend's own ``error`` may be of; leave for them what any error says that none of ours is."""
    store = store_of_job()
    if store is None or isinstance(error, SystemExit):
        return ""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    found, status = "", status_in_words(range(dist.get_world_size()), error)
    if not isinstance(error, ShardwiseError):  # which has been left, and names whom it is of
        said = f"{type(error).__name__}: {in_short(error)}"
        leave(said)
        if _is_of_backend(error):
            found = found_among(others, store, str(error))
            leave(f"{said}; {found}")
            found = "; ".join(filter(None, [found, status]))
    will_leave(store)
    return found


def _is_of_backend(error: BaseException) -> bool:
    """Return True if ``error`` is of a collective or the store; False for the program's own, of which others know nothing."""
    frames = lines_of_trace(error.__traceback__)
    is_called = isinstance(error, RuntimeError) and any("/torch/distributed/" in frame for frame in frames)
    return is_called or isinstance(error, dist.DistError) or _OF_BACKEND.search(str(error)) is not None


def found_among(others: Sequence[int], store: dist.Store, error: str = "") -> str:
    """Say which of ``others`` are gone, else which say nothing although all whose collective has failed do.

    ``error``: why this rank asks; a host that does not answer is not waited for.
    """
    others, begin = others[:_MOST_ASKED], time.monotonic()
    while True:
        alarm.look()
        try:
            JobStore(store, BRIEF_S).check([""])
        except TransportError as silence:
            return str(silence)
        gone = [rank for rank in others if is_gone(store, rank)]
        if gone:
            return gone_in_words(store, gone)
        silent = [rank for rank in others if not words_of(store, rank)]
        waited = time.monotonic() - begin
        lost = [rank for rank in out_of_reach(store, others, error) if rank in silent] if waited >= LOOK_S else []
        if lost:
            return out_of_reach_in_words(lost)
        if not silent:
            return f"all ranks have failed{cited(store, others, patience_s=0.0)}"  # each would wait for all
        if waited >= _SAY_S:
            return f"{ranks_in_words(silent)} reported nothing: stopped, in another call, or it caught its exception"
        time.sleep(0.05)


# From the first import on: errors of this process are there for the others to read, and a backend's own says who is gone.
witnesses.append(leave)
explainers.append(_explain)

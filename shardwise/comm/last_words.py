"""The last error that each rank has made: whoever finds a rank gone, or waits for it in vain, can cite the first cause.

A rank that hears of a fault leaves, too, and the next one finds that one gone: without its words the blame would be on who
followed.  Written when an error is made, into the store of the job; read only where something has failed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist

from shardwise.comm.alive import is_elsewhere, ranks_in_words
from shardwise.comm.cables import host_timeout_s, tells_of_lost_host
from shardwise.comm.store import BRIEF_S, SILENCE, JobStore
from shardwise.doctor.recorder import place_of_records
from shardwise.errors import TransportError
from shardwise.torch_private import default_store

_MOST_TEXT = 600
_CITATION = re.compile(r"; the last error of ranks? (\d+(?:, \d+)*): ")
_LEFT = re.compile(r"rank (\d+) raised an exception (?:while|in backward)")
ASKING_S = 4.0
ASKS = " (asks the others)"  # at the end of words that may change
_busy = threading.local()  # an error that is made while words are left has none of its own
_ADVICE = re.compile(r" ?Look at the end of its log(; ask: shardwise diagnose \S+)?")
UNTOLD = "it reported no exception: killed, or its program ended"


def leave(text: str) -> None:
    """Let the others read ``text``, the reason why this rank may come no more; an empty one takes it back.  Never raises."""
    store = store_of_job()
    if store is None or SILENCE in text or getattr(_busy, "is_on", False):
        return
    _busy.is_on = True
    try:
        put(store, dist.get_rank(), text)
    except (TransportError, ValueError):  # it is said aloud, at least
        return
    finally:
        _busy.is_on = False


def look_next() -> str:
    """Return the advice that messages about a lost rank end with."""
    place = place_of_records()
    return "Look at the end of its log" + (f"; ask: shardwise diagnose {place}" if place is not None else "")


def in_short(error: BaseException) -> str:
    """Return the first line of ``error``, of a backend's own without the line of its source and its advice.

    Example:
        >>> in_short(RuntimeError("[/a/pair.cc:553] Connection closed by peer. This is typically caused by a crash. GLHF!"))
        'Connection closed by peer'
    """
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". This is typically caused by")[0]


def put(store: dist.Store, rank: int, text: str) -> None:
    """Leave ``text`` as the words of global ``rank``.  Raises: TransportError if the store does not answer."""
    said = _ADVICE.sub("", text.removesuffix(ASKS))[:_MOST_TEXT]  # advice is for the first who reads it
    line = " | ".join(each.strip() for each in said.splitlines())
    JobStore(store, BRIEF_S).set(_key(rank), line + ASKS * text.endswith(ASKS))


def store_of_job() -> dist.Store | None:
    """Return the store that the default group was made with, None if there is none."""
    return default_store() if dist.is_available() and dist.is_initialized() else None


def words_of(store: dist.Store | None, rank: int, patience_s: float = 0.0) -> str:
    """Return what global ``rank`` has left, an empty text if nothing or if that cannot be known.

    ``patience_s``: for one that is asking the others for the reason, because it will know more.
    """
    end = time.monotonic() + patience_s
    with suppress(TransportError):  # the store may itself be the reason
        while store is not None:
            text = JobStore(store, BRIEF_S).peek(_key(rank)) or ""
            if not text.endswith(ASKS) or time.monotonic() >= end:
                return text.removesuffix(ASKS)
            time.sleep(0.05)
    return ""


def has_said_all(store: dist.Store, rank: int) -> bool:
    """Return True if global ``rank`` has left words and does not ask the others any more, or if no words can come."""
    with suppress(TransportError):
        text = JobStore(store, BRIEF_S).peek(_key(rank)) or ""
        return bool(text) and not text.endswith(ASKS)
    return True


def cited(store: dist.Store | None, ranks: Sequence[int], patience_s: float = ASKING_S) -> str:
    """Return the words of global ``ranks`` as a message goes on with them: "; the last error of rank 3: ..."."""
    end = time.monotonic() + patience_s
    found = {rank: words_of(store, rank, end - time.monotonic()) for rank in ranks[:8]}
    return cited_texts({rank: text for rank, text in found.items() if text})


def cited_texts(found: Mapping[int, str]) -> str:
    """Return what ranks have left as a message goes on with it: each rank's own reason once, also of ranks that they cite.

    Example:
        >>> cited_texts({1: "DesyncError: rank 2 is gone; the last error of rank 2: KeyError: 7; rank 1 waited for it."})
        '; the last error of rank 1: DesyncError: rank 2 is gone; the last error of rank 2: KeyError: 7'
        >>> cited_texts({1: "Timed out; the last error of rank 2: Timed out", 2: "Timed out"})
        '; the last error of ranks 1, 2: Timed out'
    """
    reasons: dict[int, str] = {}
    quoted: dict[int, str] = {}
    for rank, text in found.items():
        own, *rest = _CITATION.split(text)
        reasons[rank] = _own_reason(own)
        for names, said in zip(rest[::2], rest[1::2], strict=True):
            for name in map(int, names.split(", ")):  # the longest: what is quoted twice may be cut
                quoted[name] = max(quoted.get(name, ""), _own_reason(said), key=len)
    ranks_of: dict[str, list[int]] = {}
    for rank, reason in (reasons | quoted | reasons).items():  # a rank knows its own reason best
        ranks_of.setdefault(reason, []).append(rank)
    return "".join(f"; the last error of {ranks_in_words(ranks)}: {reason}" for reason, ranks in ranks_of.items())


def _own_reason(text: str) -> str:
    """Return ``text`` without what a rank says of others: where they were, and that it has waited for them."""
    lines = [line for line in text.split(" | ") if not re.match(r"rank \d+ was at |Ranks must run ", line)]
    short = re.sub(r", after [^()]*(?= \()", "", "; ".join(lines))
    return re.sub(r"; rank \d+ waited for (it|them)\.?", "", short).rstrip(" .;|")


def who_left(error: str) -> set[int]:
    """Return the global ranks of which ``error`` says that they have left by an exception of their own: they may go on.

    Example:
        >>> who_left("rank 1 raised an exception while rank 0 was at the end of a forward")
        {1}
    """
    return {int(rank) for rank in _LEFT.findall(error)}


def out_of_reach(store: dist.Store | None, ranks: Sequence[int], error: str) -> list[int]:
    """Return which of global ``ranks`` no word can come from: those on other hosts, once one is known not to answer.

    ``error`` may say so, this rank's own, or what another has left: who follows it has another error.
    """
    if store is None:
        return []
    heard = tells_of_lost_host(error) or any(tells_of_lost_host(words_of(store, rank)) for rank in ranks)
    return [rank for rank in ranks if is_elsewhere(store, rank)] if heard else []


def out_of_reach_in_words(ranks: Sequence[int]) -> str:
    """Say of ``ranks`` that their host does not answer."""
    after = f" for {host_timeout_s():g} s" if host_timeout_s() else ""
    return (
        f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} on another host, from which no answer has come{after}: "
        "it is switched off or stands still, or the cable to it is cut. Look at that host and at the network between; "
        "shardwise.set_host_timeout says how long is waited"
    )


def gone_in_words(store: dist.Store | None, ranks: Sequence[int]) -> str:
    """Say that the processes of global ``ranks`` have ended, and what they have left.

    Example:
        >>> gone_in_words(None, [3])
        'rank 3 is gone (it reported no exception: killed, or its program ended)'
    """
    text = f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} gone"
    found = cited(store, ranks, patience_s=0.0)  # they will say no more
    return text + (found or f" ({UNTOLD})")


def _key(rank: int) -> str:
    return f"shardwise/last words/{rank}"

"""What this process has done lately: a ring of its last few thousand events, always on.

Whoever does something that other ranks wait for, or waits for them, says so here in one line.  That costs less than a
microsecond: one tuple, nothing formatted.  ``shardwise.record`` writes the ring down when something fails, and
``shardwise diagnose`` reads it; :mod:`shardwise.testing.faults` hears of every event before what it announces is done.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")

NUM_EVENTS = 4096
WAITS = "waits for "  # begins the place of an event after which its thread waits: "waits for rank 3", "waits for process 88"
EVERYBODY = f"{WAITS}all ranks"
ERROR = "error"  # the place of an error of ours when it is made

# Monotonic seconds, id of the thread, name of the track, count on the track, place, what.
Entry: TypeAlias = tuple[float, int, str, int, str, str]
# Gets place, what, and the object that it is about; returns True if the thing announced shall be left out.
Hearer: TypeAlias = Callable[[str, str, object], bool]

_ring: deque[Entry] = deque(maxlen=NUM_EVENTS)  # of this process: who looks at it wants to see all threads
hearers: list[Hearer] = []  # changed by hearing() alone
witnesses: list[Callable[[str], None]] = []  # hear every error of ours, where it is made
# Told of an error, not ours, that leaves the program; what they return is added to it as a note.
explainers: list[Callable[[BaseException], str]] = []
_numbers: dict[str, itertools.count[int]] = {}
_groups: deque[tuple[str, tuple[int, ...]]] = deque(
    maxlen=NUM_EVENTS
)  # of tracks, beside the ring: told once, not per event
# What is crossed at every call of a step writes its entry itself, without a call in Python: an Entry into ``remember``, and
# :func:`tell` only if there are ``hearers``.  Everybody else calls :func:`note`.
remember, now, thread = _ring.append, time.monotonic, threading.get_ident


def note(place: str, what: str = "", subject: object = None) -> bool:
    """Say that this process comes to ``place``; return True if a fault wants that it is left out."""
    remember((now(), thread(), "", 0, place, what))
    return bool(hearers) and tell(place, what, subject)


def note_error(text: str) -> None:
    """Say that an error of ours was made here."""
    remember((now(), thread(), "", 0, ERROR, text))
    for witness in list(witnesses):
        witness(text)


def explain_end(error: BaseException) -> str:
    """Return what this process knows of the reason of ``error``, which leaves the program; ``error`` gets it as a note."""
    text = "; ".join([found for explain in list(explainers) if (found := explain(error))])
    if text and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"shardwise: {text}")
    elif text:
        print(f"shardwise: {text}", file=sys.stderr, flush=True)
    return text


class Track:
    """A sequence of events that all ranks of a group make in the same order, so that their counts can be compared.

    Attributes:
        name: the same on every rank of the group, and of no other sequence.
        count: of the events so far.
        num_forwards, num_backwards: how many have begun.  running: "forward" or "backward"; empty if neither runs.
    """

    __slots__ = ("__weakref__", "count", "name", "num_backwards", "num_forwards", "running")

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.num_forwards = self.num_backwards = 0
        self.running = ""

    def note(self, place: str, what: str = "", subject: object = None) -> bool:
        """Do as :func:`note`, for the next event of the track."""
        self.count = count = self.count + 1
        remember((now(), thread(), self.name, count, place, what))
        return bool(hearers) and tell(place, what, subject)


def next_track(topic: str) -> Track:
    """Return a new track: the n-th of a topic on this rank is the n-th on the others."""
    track = Track(f"{topic} {next(_numbers.setdefault(topic, itertools.count(1)))}")
    live_tracks.add(track)
    return track


live_tracks: weakref.WeakSet[Track] = weakref.WeakSet()  # those of next_track, as long as somebody uses them


def note_group(track: str, ranks: tuple[int, ...]) -> None:
    """Say that the track of this name, and those whose names go on from it behind a slash, are of global ``ranks``."""
    _groups.append((track, ranks))


def groups_of(tracks: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the global ranks of those of ``tracks`` whose group is known: of the last ``NUM_EVENTS`` that were told."""
    known, found = dict(_all_of(_groups)), dict[str, tuple[int, ...]]()
    for track in tracks:
        name = track
        while name and name not in known:
            name = name.rpartition("/")[0]
        if name:
            found[track] = known[name]
    return found


def entries() -> list[Entry]:
    """Return the last ``NUM_EVENTS`` events, oldest first."""
    return _all_of(_ring)


def _all_of(ring: deque[_T]) -> list[_T]:
    while True:
        try:
            return list(ring)
        except RuntimeError:  # another thread has added one meanwhile
            continue


def last_time() -> float:
    """Return when the last event was, in monotonic seconds; 0 before the first."""
    try:
        return _ring[-1][0]
    except IndexError:
        return 0.0


@contextmanager
def hearing(hearer: Hearer) -> Generator[None, None, None]:
    """Let ``hearer`` be called at every event of every thread, before what the event announces."""
    hearers.append(hearer)
    try:
        yield
    finally:
        hearers.remove(hearer)


@contextmanager
def witnessing(witness: Callable[[str], None]) -> Generator[None, None, None]:
    """Let ``witness`` be called with the text of every error of ours, where it is made."""
    witnesses.append(witness)
    try:
        yield
    finally:
        witnesses.remove(witness)


def tell(place: str, what: str, subject: object = None) -> bool:
    """Let all hearers hear of an event; return True if one wants that what it announces is left out."""
    is_left_out = False
    for hearer in list(hearers):
        is_left_out |= hearer(place, what, subject)
    return is_left_out

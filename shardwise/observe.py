"""What this process has done lately: a ring of its last few thousand events, always on.

Whoever does something that other ranks wait for, or waits for them, says so here in one line.  That costs less than a
microsecond: one tuple, nothing formatted.  ``shardwise.record`` writes the ring down when something fails, and
``shardwise diagnose`` reads it; :mod:`shardwise.testing.faults` hears of every event before what it announces is done.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias, TypeVar

# ---- Lines for ``TORCH_LOGS=fsdp``; none unless asked for.

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")  # what TORCH_LOGS=fsdp turns on


def log_for_torch(what: str, unit: str | None = None) -> None:
    """Log that ``what`` happens, to the unit with path ``unit``."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("FSDP::%s%s", what, "" if unit is None else f" ({unit})")


def say(what: str) -> None:
    """Log ``what`` for people: a choice that was made for them."""
    logger.info("%s", what)


# ---- What takes how long: whoever launches or waits says when it begins and ends, if somebody listens.
# While nobody does, a call site costs one look at an empty list: ``if listeners: begin(...)``.


class SpanListener(Protocol):
    """Hears of every span of every thread; must not change anything."""

    def begin(self, track: str, what: str, subject: str) -> None:
        """``what`` begins on this thread, for ``subject`` (a unit, a message); ``track``: of which sequence of events."""
        ...

    def end(self, what: str, subject: str, num_bytes: int) -> None:
        """The last ``what`` of ``subject`` that has begun on this thread ends; spans inside of it that raised end too."""
        ...


listeners: list[SpanListener] = []  # changed by listening(), and by the profiler's records


def begin(track: str, what: str, subject: str) -> None:
    """Tell all listeners that ``what`` begins."""
    for listener in list(listeners):
        listener.begin(track, what, subject)


def end(what: str, subject: str, num_bytes: int = 0) -> None:
    """Tell all listeners that ``what`` has ended."""
    for listener in list(listeners):
        listener.end(what, subject, num_bytes)


@contextmanager
def span(track: str, what: str, subject: str, num_bytes: int = 0) -> Generator[None, None, None]:
    """Say when the body begins and ends; not for what is crossed at every call of a step."""
    if listeners:
        begin(track, what, subject)
    try:
        yield
    finally:
        if listeners:
            end(what, subject, num_bytes)


@contextmanager
def listening(listener: SpanListener) -> Generator[None, None, None]:
    """Let ``listener`` hear of spans; inside of another, both do."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


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
observers: list[Callable[[str], None]] = []  # hear every error of ours, where it is made
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
    for observer in list(observers):
        observer(text)


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
        age: the number of tracks that this process made before: names of earlier jobs come again, and their models may live.
        num_forwards, num_backwards: how many have begun.  running: "forward" or "backward"; empty if neither runs.
    """

    __slots__ = ("__weakref__", "age", "count", "name", "num_backwards", "num_forwards", "running")

    def __init__(self, name: str) -> None:
        self.name = name
        self.age = self.count = self.num_forwards = self.num_backwards = 0
        self.running = ""

    def note(self, place: str, what: str = "", subject: object = None) -> bool:
        """Do as :func:`note`, for the next event of the track."""
        self.count = count = self.count + 1
        remember((now(), thread(), self.name, count, place, what))
        return bool(hearers) and tell(place, what, subject)


def next_track(topic: str) -> Track:
    """Return a new track: the n-th of a topic on this rank is the n-th on the others."""
    track = Track(f"{topic} {next(_numbers.setdefault(topic, itertools.count(1)))}")
    track.age = next(_ages)
    live_tracks.add(track)
    return track


_ages = itertools.count()
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
def observing(observer: Callable[[str], None]) -> Generator[None, None, None]:
    """Let ``observer`` be called with the text of every error of ours, where it is made."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


def tell(place: str, what: str, subject: object = None) -> bool:
    """Let all hearers hear of an event; return True if one wants that what it announces is left out."""
    is_left_out = False
    for hearer in list(hearers):
        is_left_out |= hearer(place, what, subject)
    return is_left_out


# ---- The vocabulary that plan, engine and instruments share: what a unit does in a step.


class Op(str, Enum):
    """What a unit does to its parameters or gradients."""

    UNSHARD = "unshard"  # all-gather launched
    WAIT = "wait"  # full parameters may be read from here on
    RESHARD = "reshard"  # full parameters given back
    REDUCE = "reduce"  # reduce-scatter (and all-reduce over replicas) launched
    HOLD = "hold"  # gradients kept unreduced for a later backward
    COMMIT = "commit"  # reduced gradients are in ``.grad``


@dataclass(frozen=True, slots=True)
class Call:
    """One thing a unit does in a step; the plan predicts these and the trace records them.

    Attributes:
        op: what is done.
        unit: path of the unit's module in the root ("" is the root itself).
        num_bytes: bytes that this rank's buffers for it hold (staging of a collective, full parameters of a wait).
        in_place: an unshard that holds the full parameters from its launch on; they are among ``num_bytes``.
    """

    op: Op
    unit: str
    num_bytes: int = 0
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class OrderChanged:
    """Forward left the order that the plan was made for; units unshard on demand until the next plan."""

    expected: str
    found: str


Event = Call | OrderChanged


def unit_in_words(name: str) -> str:
    """Return the words for a unit in messages.

    Example:
        >>> unit_in_words("blocks.0"), unit_in_words("")
        ("unit 'blocks.0'", 'the root unit')
    """
    return f"unit '{name}'" if name else "the root unit"


class Instrument(Protocol):
    """Hears every event of an engine; must not change anything."""

    def on_event(self, event: Event) -> None:
        """Take note of ``event``; called on the thread that runs the step, in the order things happen."""
        ...


@dataclass(slots=True)
class EventLog:
    """What has happened last, and who hears of it.  Units write to it themselves: it is crossed at every call.

    Attributes:
        track: for the black box: all events of an engine in their order.
        num_calls: calls so far.  recent: what the last of them did, and the units they did it to.
        instruments: hear every event.
    """

    track: Track = field(default_factory=lambda: Track("no engine"))
    num_calls: int = 0
    recent: deque[tuple[Op, str]] = field(default_factory=lambda: deque[tuple[Op, str]](maxlen=4))
    instruments: list[Instrument] = field(default_factory=list[Instrument])

"""The recent events of this process: a ring of the last few thousand, always on.

Code that other ranks wait for, or that waits for them, records an event here.  That takes less than a microsecond: one
tuple, without formatting.  ``shardwise.record`` writes the ring to a file when something fails, and ``shardwise
diagnose`` reads it; :mod:`shardwise.testing.faults` gets every event before the announced action.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

# ---- Log messages for ``TORCH_LOGS=fsdp``; off by default.

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")  # the logger that TORCH_LOGS=fsdp turns on


def log_for_torch(what: str, unit: str | None = None) -> None:
    """Log that ``what`` happens, to the unit with path ``unit``."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("FSDP::%s%s", what, "" if unit is None else f" ({unit})")


def say(what: str) -> None:
    """Log ``what``, a choice made for the user."""
    logger.info("%s", what)


# ---- The bus: code that acts reports it to all listeners.  Without listeners a call site costs one test of an empty list:
# ``if listeners: begin(...)``.


class Listener:
    """Receives the events of all threads, and must not change anything; a subclass overrides the methods that it wants."""

    def begin(self, track: str, what: str, subject: str) -> None:
        """``what`` begins on this thread, for ``subject`` (a unit, a message), on the event sequence ``track``."""

    def end(self, track: str, what: str, subject: str, num_bytes: int, call: Call | None) -> None:
        """The last begun ``what`` of ``subject`` on this thread ends; spans inside it that raised end too.

        ``call``: the action of a unit that has ended, if this is one; some have no begin.
        """

    def reach(self, place: str, what: str, subject: object) -> bool:
        """This thread is about to do what ``place`` announces; True skips that (an injected fault)."""
        return False


listeners: list[Listener] = []  # changed by listening(), and by the profiler's records


def begin(track: str, what: str, subject: str) -> None:
    """Notify all listeners that ``what`` begins."""
    for listener in list(listeners):
        listener.begin(track, what, subject)


def end(track: str, what: str, subject: str, num_bytes: int = 0, call: Call | None = None) -> None:
    """Notify all listeners that ``what`` has ended."""
    for listener in list(listeners):
        listener.end(track, what, subject, num_bytes, call)


def emit(track: str, call: Call) -> None:
    """Notify all listeners that a unit has done ``call``; it ends the span of this name, if that has begun."""
    end(track, call.op.value, call.unit, call.num_bytes, call)


def tell(place: str, what: str, subject: object = None) -> bool:
    """Notify all listeners of an announced action; return True if one of them skips it."""
    is_left_out = False
    for listener in list(listeners):
        is_left_out |= listener.reach(place, what, subject)
    return is_left_out


@contextmanager
def span(track: str, what: str, subject: str, num_bytes: int = 0) -> Generator[None, None, None]:
    """Report the begin and the end of the body; too slow for code that runs at every call of a step."""
    if listeners:
        begin(track, what, subject)
    try:
        yield
    finally:
        if listeners:
            end(track, what, subject, num_bytes)


_T = TypeVar("_T")


@contextmanager
def _while_in(found: list[_T], each: _T) -> Generator[None, None, None]:
    found.append(each)
    try:
        yield
    finally:
        found.remove(each)


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Send events to ``listener`` inside the context; contexts nest."""
    return _while_in(listeners, listener)


NUM_EVENTS = 4096
# prefix of the place of an event after which its thread waits: "waits for rank 3", "waits for process 88"
WAITS = "waits for "
EVERYBODY = f"{WAITS}all ranks"
ERROR = "error"  # the place of an event for an error of shardwise when it is created

# Monotonic seconds, id of the thread, name of the track, count on the track, place, what.
Entry: TypeAlias = tuple[float, int, str, int, str, str]

ring: deque[Entry] = deque(maxlen=NUM_EVENTS)  # of this process: readers want all threads
observers: list[Callable[[str], None]] = []  # called with every error of shardwise when it is created
# Called with an exception, not of shardwise, that ends the program; their results are added to it as a note.
explainers: list[Callable[[BaseException], str]] = []
_numbers: dict[str, itertools.count[int]] = {}
# Code that runs at every call of a step appends its Entry with ``remember`` itself, without a Python call.  All other code
# calls :func:`note`.
remember, now, thread = ring.append, time.monotonic, threading.get_ident


def note(place: str, what: str = "", subject: object = None) -> bool:
    """Record that this process reaches ``place``; return True if an injected fault skips the announced action."""
    remember((now(), thread(), "", 0, place, what))
    return bool(listeners) and tell(place, what, subject)


def note_error(text: str) -> None:
    """Record that an error of shardwise was created."""
    remember((now(), thread(), "", 0, ERROR, text))
    for observer in list(observers):
        observer(text)


def explain_end(error: BaseException) -> str:
    """Return what this process knows about the cause of ``error``, which ends the program; add it to ``error`` as a note."""
    text = "; ".join([found for explain in list(explainers) if (found := explain(error))])
    if text and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"shardwise: {text}")
    elif text:
        print(f"shardwise: {text}", file=sys.stderr, flush=True)
    return text


class Track:
    """A sequence of events that all ranks of a group make in the same order, so that their counts can be compared.

    Attributes:
        name: the same on every rank of the group; unique to the sequence.  is_of_several: the group has several ranks.
        count: number of events so far.
        age: number of earlier tracks of this process: a later job reuses names, while models of earlier jobs may live.
        num_forwards, num_backwards: how many have begun.  running: "forward" or "backward"; empty if neither runs.
    """

    __slots__ = ("__weakref__", "age", "count", "is_of_several", "name", "num_backwards", "num_forwards", "running")

    def __init__(self, name: str) -> None:
        self.name = name
        self.age = self.count = self.num_forwards = self.num_backwards = 0
        self.running = ""
        self.is_of_several = False

    def note(self, place: str, what: str = "", subject: object = None) -> bool:
        """Do :func:`note` for the next event of the track."""
        self.count = count = self.count + 1
        remember((now(), thread(), self.name, count, place, what))
        return bool(listeners) and tell(place, what, subject)

    def recent(self, most: int) -> list[tuple[str, str]]:
        """Return place and what of the last ``most`` events, oldest first."""
        mine = [entry for entry in entries() if entry[2] == self.name][-most:]
        return [(str(getattr(entry[4], "value", entry[4])), entry[5]) for entry in mine]


def next_track(topic: str) -> Track:
    """Return a new track: the n-th of a topic on this rank corresponds to the n-th on the others."""
    track = Track(f"{topic} {next(_numbers.setdefault(topic, itertools.count(1)))}")
    track.age = next(_ages)
    live_tracks.add(track)
    return track


_ages = itertools.count()
live_tracks: weakref.WeakSet[Track] = weakref.WeakSet()  # those of next_track that are still referenced


def entries() -> list[Entry]:
    """Return the last ``NUM_EVENTS`` events, oldest first."""
    return [*ring.copy()]  # other threads add entries, also while a loop over the ring itself would run


def last_time() -> float:
    """Return the time of the last event, in monotonic seconds; 0 before the first."""
    return ring[-1][0] if ring else 0.0


def observing(observer: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call ``observer`` with the text of every error of shardwise inside the context, when it is created."""
    return _while_in(observers, observer)


# ---- The vocabulary shared by plan, engine and instruments: what a unit does in a step.


class Op(str, Enum):
    """An action of a unit on its parameters or gradients."""

    UNSHARD = "unshard"  # all-gather launched
    WAIT = "wait"  # full parameters may be read from here on
    RESHARD = "reshard"  # full parameters freed
    REDUCE = "reduce"  # reduce-scatter (and all-reduce over replicas) launched
    HOLD = "hold"  # gradients stored unreduced for a later backward
    COMMIT = "commit"  # reduced gradients are in ``.grad``
    SERVE = "serve"  # all-gather launched for other ranks alone (``set_allow_rank_divergence``)


@dataclass(frozen=True, slots=True)
class Call:
    """One action of a unit in a step; the plan predicts these and the trace records them.

    Attributes:
        op: the action.
        unit: path of the unit's module in the root ("" is the root itself).
        num_bytes: bytes of this rank's buffers for it (staging of a collective, full parameters of a wait).
        in_place: the full parameters of an unshard exist from its launch on; ``num_bytes`` includes them.
    """

    op: Op
    unit: str
    num_bytes: int = 0
    in_place: bool = False


def unit_in_words(name: str) -> str:
    """Return a unit's name in messages.

    Example:
        >>> unit_in_words("blocks.0"), unit_in_words("")
        ("unit 'blocks.0'", 'the root unit')
    """
    return f"unit '{name}'" if name else "the root unit"

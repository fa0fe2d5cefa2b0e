"""The vocabulary that plan, engine and instruments share: what a unit does in a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from shardwise.black_box import Track


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

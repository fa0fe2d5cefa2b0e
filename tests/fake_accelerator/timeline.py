"""What happens before what, on a host that runs ahead of its streams: vector clocks.

A stream does in order what it is given, nothing before the host has given it; between streams, and back to the host,
there is only the order that events make; threads of the host are lanes, too.

Two things that no chain of these orders may happen at the same time, or in
either order, however unlikely that is on one machine or another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HOST = 0
CURRENT = 1  # the stream that work goes to outside of any other

Clock = dict[int, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """One piece of work: number ``time`` of ``lane``."""

    lane: int
    time: int


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work that was given to a lane, and what had happened before it began.

    Attributes:
        what: the name of the operation.  label: what the host was doing.
    """

    what: str
    label: str
    at: Moment
    before: Clock

    def comes_after(self, other: Work) -> bool:
        """Return True if ``other`` is always done before this begins."""
        return self.before.get(other.at.lane, 0) >= other.at.time


@dataclass(slots=True)
class Timeline:
    """The clocks of the host and of every stream.

    Attributes:
        thread: the lane of the thread of the host that runs, HOST for the user's.  threads: of all.
        names: of the lanes.  current: lanes that work goes to, the innermost last.
        clocks: what has happened before the next work of each lane.
        num_events: recorded so far, per pair of lanes that was ordered by one (from, to); a host that waits is HOST.
        host_waits: what the user's thread has waited for, one line each.  thread_waits: what others have.
        works: all work, if ``keeps_works``.  label: says what the host is doing.
    """

    keeps_works: bool = False
    names: list[str] = field(default_factory=lambda: ["host", "current"])
    current: list[int] = field(default_factory=lambda: [CURRENT])
    clocks: list[Clock] = field(default_factory=lambda: [{}, {}])
    num_events: dict[str, int] = field(default_factory=dict[str, int])
    host_waits: list[str] = field(default_factory=list[str])
    thread_waits: list[str] = field(default_factory=list[str])
    thread: int = HOST
    threads: set[int] = field(default_factory=lambda: {HOST})
    works: list[Work] = field(default_factory=list[Work])
    label: Callable[[], str] = str

    def new_lane(self, name: str) -> int:
        """Return the number of a new lane."""
        self.names.append(name)
        self.clocks.append({})
        return len(self.names) - 1

    def begin(self, lane: int, what: str) -> Moment:
        """Give work to ``lane``: it comes after what the lane, and the host, had come after."""
        clock = self.clocks[lane]
        if lane not in self.threads:
            _join(clock, self.clocks[self.thread])
        time = clock[lane] = clock.get(lane, 0) + 1
        if self.keeps_works:
            self.works.append(Work(what, self.label(), Moment(lane, time), dict(clock)))
        return Moment(lane, time)

    def is_before(self, moment: Moment, lane: int) -> bool:
        """Return True if ``moment`` is over whenever the next work of ``lane`` begins."""
        return self.clocks[lane].get(moment.lane, 0) >= moment.time

    def record(self, lane: int) -> Mark:
        """Return the end of what ``lane`` has been given so far."""
        self.begin(lane, "event")
        name = self.names[lane]
        self.num_events[name] = self.num_events.get(name, 0) + 1
        return Mark(self, name, dict(self.clocks[lane]))

    def order(self, lane: int, mark: Mark) -> None:
        """Let the next work of ``lane`` come after ``mark``."""
        _join(self.clocks[lane], mark.clock)

    def host_waits_for(self, lane: int, why: str) -> None:
        """The host goes on when ``lane`` has done what it was given."""
        self.wait(f"{why} (on {self.names[lane]})", self.clocks[lane])

    def wait(self, why: str, clock: Clock) -> None:
        """The thread that runs goes on when all of ``clock`` has happened."""
        (self.host_waits if self.thread == HOST else self.thread_waits).append(why)
        _join(self.clocks[self.thread], clock)

    def join(self, clock: Clock) -> None:
        """Let the thread that runs come after ``clock``, by means that are not the device's."""
        _join(self.clocks[self.thread], clock)

    def new_thread(self, name: str) -> int:
        """Return the lane of a new thread of the host."""
        lane = self.new_lane(name)
        self.threads.add(lane)
        return lane

    @contextmanager
    def in_thread(self, lane: int, after: Clock) -> Generator[None, None, None]:
        """Be the thread ``lane``, after ``after``; it uses the device in streams that it names alone."""
        _join(self.clocks[lane], after)
        kept = self.thread, self.current
        self.thread, self.current = lane, [lane]
        try:
            yield
        finally:
            self.thread, self.current = kept


@dataclass(frozen=True, slots=True)
class Mark:
    """An event: what had been done when it was recorded, as torch.Event."""

    timeline: Timeline
    lane: str
    clock: Clock

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self.timeline.wait(f"Event.synchronize (of {self.lane})", self.clock)


@dataclass(slots=True)
class FakeStream:
    """A lane of a timeline, with the methods of torch.Stream that the engine and its users call."""

    timeline: Timeline
    lane: int

    def __enter__(self) -> FakeStream:
        self.timeline.current.append(self.lane)
        return self

    def __exit__(self, *_: Any) -> None:
        self.timeline.current.pop()

    def wait_event(self, event: Mark) -> None:
        """Start what follows after ``event``."""
        self.timeline.order(self.lane, event)

    def wait_stream(self, other: FakeStream) -> None:
        """Start what follows after what ``other`` has been given."""
        self.wait_event(other.record_event())

    def record_event(self) -> Mark:
        """Return the end of what it has been given."""
        return self.timeline.record(self.lane)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self.timeline.host_waits_for(self.lane, "Stream.synchronize")


def _join(clock: Clock, other: Clock) -> None:
    for lane, time in other.items():
        if clock.get(lane, 0) < time:
            clock[lane] = time

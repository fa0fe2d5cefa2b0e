"""What one rank has written down: its last events, why it wrote, and where its threads were.  Pure; JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from shardwise.safe_files import MOST_BYTES, open_input

VERSION = 1
MOST_RANKS = 2**20  # what is said of missing ranks takes memory for each
MOST_TEXT = 400  # characters of one text


@dataclass(frozen=True, slots=True)
class Event:
    """One event; ``time_s`` in seconds since the epoch, ``track`` empty for those that are this rank's own."""

    time_s: float
    thread: int
    track: str
    count: int
    place: str
    what: str

    @property
    def text(self) -> str:
        """Say what it was."""
        return f"{self.place} ({self.what})" if self.what else self.place


@dataclass(frozen=True, slots=True)
class Reason:
    """Why, and when, a rank wrote."""

    time_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a thread was when the rank wrote; ``frames``: "file:line function", the innermost last."""

    time_s: float
    thread: int
    name: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """All that one rank has written.

    Attributes:
        rank: global; None if it was not known yet.  num_ranks: of the job; 0 if not known.
        host, pid: of the process.  main_thread: which of its threads runs the program.
        written_s: when it was written last.
        groups: of tracks among the events, as far as they are known: the global ranks that make these events.
        is_cut: a line could not be read.
    """

    rank: int | None
    num_ranks: int
    host: str
    pid: int
    main_thread: int
    written_s: float
    reasons: tuple[Reason, ...] = ()
    stacks: tuple[Stack, ...] = ()
    events: tuple[Event, ...] = field(default=(), repr=False)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]], repr=False)
    is_cut: bool = False


def to_lines(record: Record) -> Iterator[str]:
    """Yield ``record`` as JSON lines: the rank, its reasons, its stacks, groups of tracks, its events."""
    head = {
        "version": VERSION,
        "rank": record.rank,
        "num_ranks": record.num_ranks,
        "host": record.host,
        "pid": record.pid,
        "main_thread": record.main_thread,
        "written_s": record.written_s,
    }
    yield json.dumps(head)
    for reason in record.reasons:
        yield json.dumps({"reason": reason.text[:MOST_TEXT], "time_s": reason.time_s})
    for stack in record.stacks:
        yield json.dumps({"stack": asdict(stack)})
    tracks: dict[tuple[int, ...], list[str]] = {}
    for track, ranks in record.groups.items():
        tracks.setdefault(ranks, []).append(track)
    for ranks, names in tracks.items():
        yield json.dumps({"ranks": ranks, "tracks": names})
    for event in record.events:
        what = event.what[:MOST_TEXT]
        yield json.dumps([round(event.time_s, 6), event.thread, event.track, event.count, event.place, what])


def read_record(path: Path) -> Record | None:
    """Return the record in the file ``path``; None if there is none that can be read."""
    try:
        with open_input(path.parent, path.name, MOST_BYTES) as file:
            return from_lines(line.decode(errors="replace") for line in file)
    except OSError:
        return None


def from_lines(lines: Iterable[str]) -> Record | None:
    """Return what ``lines`` say, without those that are cut off or unknown; None if not even the first can be read."""
    head: dict[str, Any] | None = None
    reasons: list[Reason] = []
    stacks: list[Stack] = []
    events: list[Event] = []
    groups: dict[str, tuple[int, ...]] = {}
    is_cut = False
    for line in lines:
        try:
            found = json.loads(line)
            if head is None:
                head = _checked_head(found)
            elif isinstance(found, list):
                events.append(_event(cast(list[Any], found)))
            elif "reason" in found:
                reasons.append(Reason(float(found["time_s"]), str(found["reason"])))
            elif "stack" in found:
                stacks.append(_stack(found["stack"]))
            elif "tracks" in found:
                groups |= dict.fromkeys(map(str, found["tracks"]), tuple(map(int, found["ranks"])))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            is_cut = True
            if head is None:
                return None
    if head is None:
        return None
    return Record(
        **head, reasons=tuple(reasons), stacks=tuple(stacks), events=tuple(events), groups=groups, is_cut=is_cut
    )


def _checked_head(found: Any) -> dict[str, Any]:
    rank, num_ranks = found["rank"], int(found["num_ranks"])
    if not -1 <= int(-1 if rank is None else rank) < MOST_RANKS or not 0 <= num_ranks <= MOST_RANKS:
        raise ValueError("no job has so many ranks")
    return {
        "rank": None if rank is None else int(rank),
        "num_ranks": num_ranks,
        "host": str(found["host"]),
        "pid": int(found["pid"]),
        "main_thread": int(found["main_thread"]),
        "written_s": float(found["written_s"]),
    }


def _event(found: list[Any]) -> Event:
    time_s, thread, track, count, place, what = found
    return Event(float(time_s), int(thread), str(track), int(count), str(place), str(what))


def _stack(found: Any) -> Stack:
    frames = tuple(map(str, found["frames"]))
    return Stack(float(found["time_s"]), int(found["thread"]), str(found["name"]), frames)

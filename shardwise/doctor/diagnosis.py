"""What the records of all ranks say together: who is missing, who failed first, where ranks part, who waits for whom.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.black_box import ERROR, WAITS
from shardwise.doctor.rank_record import Event, Reason, Record, Stack

_GAP_S = 30.0  # between reasons to write: what was before is another trouble, which has passed
_MOVED = 16  # events between two reasons, which say the same: ranks that fail tidy up, and ask each other
_BEFORE_S = 1.0  # an error comes before what is written because of it


@dataclass(frozen=True, slots=True)
class Parting:
    """The first event of a track at which ranks differ.

    Attributes:
        count: of the event on the track.  found: what each rank did there.  before: the last event that they had in common.
        time_s: when the first rank came there.
    """

    track: str
    count: int
    found: Mapping[int, str]
    before: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Behind:
    """Ranks that have come less far on a track than others, up to where all agree.

    Attributes:
        ranks: those that are behind.  count: how far they came.  most: how far the others came.
        last: their last event on the track.  next: what the others did then.  time_s: when they made the last.
    """

    track: str
    ranks: tuple[int, ...]
    count: int
    most: int
    last: str
    next: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank whose last event on its main thread says that it waits.

    Attributes:
        whom: ranks that it waits for; empty if it waits for all.
        where: what it waits at.  since_s: seconds, up to when it wrote.
    """

    rank: int
    whom: tuple[int, ...]
    where: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong on a rank."""

    rank: int
    time_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that can be said.

    Attributes:
        ranks: those with a record.  num_ranks: of the job.  missing: those without a record.
        failures: of the ranks, the earliest first; those that name another rank that failed come after.
        partings, behind: per track, the earliest first.
        blamed: ranks that others wait for and that wait for nobody themselves.
        stacks: per rank, where its main thread was when it wrote first because of its last trouble.
        ends: the same when it wrote last.
        cut: ranks whose record is cut off.
    """

    ranks: tuple[int, ...]
    num_ranks: int
    missing: tuple[int, ...]
    failures: tuple[Failure, ...]
    partings: tuple[Parting, ...]
    behind: tuple[Behind, ...]
    waiting: tuple[Waiting, ...]
    blamed: tuple[int, ...]
    stacks: Mapping[int, Stack]
    ends: Mapping[int, Stack]
    reasons: Mapping[int, tuple[Reason, ...]]
    cut: tuple[int, ...]


def diagnose(records: Sequence[Record]) -> Diagnosis:
    """Return what ``records``, of one job, say together; some may be missing or cut off.

    Of several records of one rank the newest counts.
    """
    by_rank = newest(records)
    num_ranks = max([0, *(each.num_ranks for each in by_rank.values()), *(rank + 1 for rank in by_rank)])
    missing = tuple(rank for rank in range(num_ranks) if rank not in by_rank)
    tracks = _tracks(by_rank)
    partings = [found for name, events in tracks.items() if (found := first_parting(name, events)) is not None]
    parted = {each.track for each in partings}
    behind = [found for name, events in tracks.items() if name not in parted and (found := _behind(name, events))]
    waiting = [found for rank, each in sorted(by_rank.items()) if (found := _waiting(rank, each, by_rank)) is not None]
    stacks = {rank: found for rank, each in sorted(by_rank.items()) if (found := _main_stacks(each))}
    failures = [found for rank, each in by_rank.items() if (found := _failure(rank, each)) is not None]
    return Diagnosis(
        ranks=tuple(sorted(by_rank)),
        num_ranks=num_ranks,
        missing=missing,
        failures=tuple(
            sorted(failures, key=lambda each: (_is_because_of_others(each, failures), each.time_s, each.rank))
        ),
        partings=tuple(sorted(partings, key=lambda each: (each.time_s, each.track))),
        behind=tuple(sorted(behind, key=lambda each: (each.time_s, each.track))),
        waiting=tuple(waiting),
        blamed=_blamed(waiting, tuple(range(num_ranks))),
        stacks={rank: found[0] for rank, found in stacks.items()},
        ends={rank: found[-1] for rank, found in stacks.items()},
        reasons={rank: each.reasons for rank, each in sorted(by_rank.items())},
        cut=tuple(sorted(rank for rank, each in by_rank.items() if each.is_cut)),
    )


def _is_because_of_others(failure: Failure, failures: Sequence[Failure]) -> bool:
    """Return True if ``failure`` names another rank that has failed: its clock may say that it was first."""
    named = {int(number) for number in re.findall(r"\brank (\d+)", failure.text)}
    return any(each.rank in named for each in failures if each.rank != failure.rank)


def first_parting(track: str, events: Mapping[int, Sequence[Event]]) -> Parting | None:
    """Return the first event, by its count, at which two ranks that have it differ; None if there is none.

    Ranks remember different parts of a track: compared is what two of them remember.
    """
    by_count: dict[int, dict[int, Event]] = {}
    for rank, each in events.items():
        for event in each:
            by_count.setdefault(event.count, {})[rank] = event
    before = "nothing that is remembered"
    for count in sorted(by_count):
        found = by_count[count]
        if len({event.text for event in found.values()}) > 1:
            texts = {rank: event.text for rank, event in sorted(found.items())}
            return Parting(track, count, texts, before, min(event.time_s for event in found.values()))
        before = next(iter(found.values())).text
    return None


def newest(records: Sequence[Record]) -> dict[int, Record]:
    """Return the newest of ``records`` of every rank that has one."""
    found: dict[int, Record] = {}
    for record in sorted(records, key=lambda each: each.written_s):
        if record.rank is not None:
            found[record.rank] = record
    return found


def _tracks(by_rank: Mapping[int, Record]) -> dict[str, dict[int, list[Event]]]:
    found: dict[str, dict[int, list[Event]]] = {}
    for rank, record in by_rank.items():
        for event in record.events:
            if event.track:
                found.setdefault(event.track, {}).setdefault(rank, []).append(event)
    return {name: events for name, events in found.items() if len(events) > 1}


def _behind(track: str, events: Mapping[int, Sequence[Event]]) -> Behind | None:
    last = {rank: max(each, key=lambda event: event.count) for rank, each in events.items()}
    least, most = min(e.count for e in last.values()), max(e.count for e in last.values())
    if least == most:
        return None
    ranks = tuple(sorted(rank for rank, event in last.items() if event.count == least))
    following = next((e.text for each in events.values() for e in each if e.count == least + 1), "")
    first = last[ranks[0]]
    return Behind(track, ranks, least, most, first.text, following, max(last[rank].time_s for rank in ranks))


def _waiting(rank: int, record: Record, by_rank: Mapping[int, Record]) -> Waiting | None:
    """Return what the main thread of ``rank`` waited for when it wrote first; errors come after that."""
    written_s = _began_s(record)
    events = [e for e in record.events if e.thread == record.main_thread and e.time_s <= written_s and e.place != ERROR]
    if not events or not events[-1].place.startswith(WAITS):
        return None
    wait = events[-1]
    first = wait
    for event in reversed(events):  # a wait may be looked at again and again
        if event.place != wait.place or event.what != wait.what:
            break
        first = event
    before = next((event.text for event in reversed(events) if not event.place.startswith(WAITS)), "")
    where = " after ".join(part for part in (wait.what, before) if part)
    return Waiting(rank, _whom(wait.place[len(WAITS) :], record, by_rank), where, written_s - first.time_s)


def _whom(text: str, record: Record, by_rank: Mapping[int, Record]) -> tuple[int, ...]:
    kind, _, number = text.partition(" ")
    if not number.isdigit():
        return ()
    if kind == "rank":
        return (int(number),)
    if kind == "process":  # of this host
        found = [rank for rank, each in by_rank.items() if each.pid == int(number) and each.host == record.host]
        absent = [rank for rank in range(record.num_ranks) if rank not in by_rank]
        return tuple(found) or (tuple(absent) if len(absent) == 1 else ())
    return ()


def _blamed(waiting: Sequence[Waiting], ranks: Sequence[int]) -> tuple[int, ...]:
    wait_for = {each.rank: set(each.whom) or set(ranks) - {each.rank} for each in waiting}
    wanted = {rank for whom in wait_for.values() for rank in whom}
    return tuple(sorted(wanted - set(wait_for)))


def _failure(rank: int, record: Record) -> Failure | None:
    since_s = _began_s(record) - _BEFORE_S
    errors = [Failure(rank, e.time_s, e.what) for e in record.events if e.place == ERROR and e.time_s >= since_s]
    told = [
        Failure(rank, each.time_s, each.text)
        for each in record.reasons
        if each.time_s >= since_s and not _is_question(each.text)
    ]
    return min([*errors, *told], key=lambda each: each.time_s, default=None)


def _is_question(text: str) -> bool:
    return text.startswith(("asked by", "nothing has moved"))


def _main_stacks(record: Record) -> list[Stack]:
    """Return where the main thread was whenever the rank wrote because of its last trouble."""
    since_s = _began_s(record)
    return [stack for stack in record.stacks if stack.thread == record.main_thread and stack.time_s >= since_s]


def _began_s(record: Record) -> float:
    """Return when the rank first wrote because of its last trouble."""
    began_s = record.written_s
    for reason in reversed(record.reasons):
        moved = sum(1 for event in record.events if event.track and reason.time_s < event.time_s < began_s)
        if began_s - reason.time_s > _GAP_S or moved > _MOVED:
            break
        began_s = reason.time_s
    return began_s

"""Combine the records of all ranks: who is missing, who failed first, where ranks diverge.  Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.consistency.recorder import NOTHING_MOVES, Event, Reason, Record, Stack, own_line
from shardwise.formatting import format_ranks, ranks_by_text
from shardwise.observe import ERROR

_GAP_S = 30.0  # between two writes: an earlier write belongs to a trouble that has passed
_MOVED = 16  # events between two writes for the same trouble: ranks that fail clean up and query each other
_BEFORE_S = 1.0  # how long before its writes an error may be


@dataclass(frozen=True, slots=True)
class Parting:
    """The first event of a track at which ranks differ.

    Attributes:
        count: of the event on the track.  found: the event of each rank.  before: the last event that they had in
            common.
        time_s: when the first rank got there.
    """

    track: str
    count: int
    found: Mapping[int, str]
    before: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """The first error of a rank."""

    rank: int
    time_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of :func:`diagnose`.

    Attributes:
        ranks: those with a record.  num_ranks: of the job.  missing: those without a record.
        failures: first errors, the earliest first; those that name another failed rank come last.
        partings: per track, the earliest first.
        stacks: per rank, where its main thread was at the first write for its last trouble.
    """

    ranks: tuple[int, ...]
    num_ranks: int
    missing: tuple[int, ...]
    failures: tuple[Failure, ...]
    partings: tuple[Parting, ...]
    stacks: Mapping[int, Stack]
    reasons: Mapping[int, tuple[Reason, ...]]


def diagnose(records: Sequence[Record]) -> Diagnosis:
    """Return what ``records``, of one job, show together; some may be missing or truncated.

    Of several records of one rank the newest counts.
    """
    by_rank = newest(records)
    num_ranks = max([0, *(each.num_ranks for each in by_rank.values()), *(rank + 1 for rank in by_rank)])
    missing = tuple(rank for rank in range(num_ranks) if rank not in by_rank)
    tracks = _tracks(by_rank)
    partings = [found for name, events in tracks.items() if (found := first_parting(name, events)) is not None]
    failures = [found for rank, each in by_rank.items() if (found := _failure(rank, each)) is not None]
    return Diagnosis(
        ranks=tuple(sorted(by_rank)),
        num_ranks=num_ranks,
        missing=missing,
        failures=tuple(
            sorted(failures, key=lambda each: (_is_because_of_others(each, failures), each.time_s, each.rank))
        ),
        partings=tuple(sorted(partings, key=lambda each: (each.time_s, each.track))),
        stacks={rank: found for rank, each in sorted(by_rank.items()) if (found := _main_stack(each)) is not None},
        reasons={rank: each.reasons for rank, each in sorted(by_rank.items())},
    )


def _is_because_of_others(failure: Failure, failures: Sequence[Failure]) -> bool:
    """Return True if ``failure`` names another rank that has failed: a skewed clock may show it as the first."""
    named = {int(number) for number in re.findall(r"\brank (\d+)", failure.text)}
    return any(each.rank in named for each in failures if each.rank != failure.rank)


def first_parting(track: str, events: Mapping[int, Sequence[Event]]) -> Parting | None:
    """Return the first event, by its count, at which two ranks that have it differ; None if there is none.

    Ranks remember different parts of a track; only what two of them remember is compared.
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


def _failure(rank: int, record: Record) -> Failure | None:
    since_s = _began_s(record) - _BEFORE_S
    errors = [Failure(rank, e.time_s, e.what) for e in record.events if e.place == ERROR and e.time_s >= since_s]
    reported = [
        Failure(rank, each.time_s, each.text)
        for each in record.reasons
        if each.time_s >= since_s and not each.text.startswith(("asked by", NOTHING_MOVES))
    ]
    return min([*errors, *reported], key=lambda each: each.time_s, default=None)


def _main_stack(record: Record) -> Stack | None:
    """Return the stack of the main thread at the first write for the last trouble."""
    since_s = _began_s(record)
    mine = (stack for stack in record.stacks if stack.thread == record.main_thread and stack.time_s >= since_s)
    return next(mine, None)


def _began_s(record: Record) -> float:
    """Return when the rank first wrote because of its last trouble."""
    began_s = record.written_s
    for reason in reversed(record.reasons):
        moved = sum(1 for event in record.events if event.track and reason.time_s < event.time_s < began_s)
        if began_s - reason.time_s > _GAP_S or moved > _MOVED:
            break
        began_s = reason.time_s
    return began_s


# ---- A diagnosis in words: what happened, where, and since when. Pure.

_MOST_LISTED, _MOST_PLACES = 8, 16


def in_words(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"{_count(len(diagnosis.ranks), 'record')} of {_count(diagnosis.num_ranks, 'rank')}"
    yield ""
    yield "what happened"
    yield from (f"  {line}" for line in _happened(diagnosis))
    yield ""
    yield "where the program was"
    stacks = list(diagnosis.stacks.items())[:_MOST_PLACES]
    yield from (f"  rank {rank}: {own_line(stack.frames)}" for rank, stack in stacks)


def _happened(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.missing:
        yield (
            f"{format_ranks(diagnosis.missing)} left no record: killed (SIGKILL leaves none: often out of memory), stopped, on "
            "another disk, or never started"
        )
    for parting in diagnosis.partings[:2]:
        yield from _parting(parting)
    for place, failure in enumerate(diagnosis.failures[:_MOST_LISTED]):
        yield _describe_failure(failure, is_first=place == 0 and len(diagnosis.failures) > 1)
    waits = [
        reason.text for reasons in diagnosis.reasons.values() for reason in reasons if NOTHING_MOVES in reason.text
    ]
    if waits:
        yield max(waits, key=len)  # that of the rank which reported who waits for whom
    if not (diagnosis.missing or diagnosis.partings or diagnosis.failures or waits):
        yield "nothing that differs between the ranks, and no error"


def _parting(parting: Parting) -> Iterator[str]:
    yield f"ranks part at event {parting.count} of {parting.track}, {_clock(parting.time_s)}, after {parting.before}:"
    for text, ranks in ranks_by_text(sorted(parting.found.items())).items():
        yield f"    {format_ranks(ranks)}: {text}"


def _describe_failure(failure: Failure, is_first: bool) -> str:
    first_line = failure.text.split("\n")[0][:240]
    return f"rank {failure.rank}{' first' if is_first else ''}, {_clock(failure.time_s)}: {first_line}"


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s * 1000) % 1000:03d}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"

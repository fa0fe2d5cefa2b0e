"""A diagnosis in plain words: what happened, where, since when, and what to look at next.  Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence

from shardwise.doctor.diagnosis import Behind, Diagnosis, Failure, Parting, Waiting
from shardwise.doctor.user_code import own_line

_MOST_LISTED, _MOST_PLACES = 8, 16


def in_words(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"{_count(len(diagnosis.ranks), 'record')} of {_count(diagnosis.num_ranks, 'rank')}"
    if diagnosis.cut:
        yield f"  cut off, read as far as they go: {_ranks(diagnosis.cut)}"
    yield ""
    yield "what happened"
    yield from (f"  {line}" for line in _happened(diagnosis))
    if diagnosis.waiting:
        yield ""
        yield "who waits for whom"
        yield from (f"  {_wait(each)}" for each in diagnosis.waiting[:_MOST_LISTED])
    yield ""
    yield "where the program was"
    yield from (f"  rank {rank}: {_places(diagnosis, rank)}" for rank in list(diagnosis.stacks)[:_MOST_PLACES])
    yield ""
    yield "what to look at next"
    yield from (f"  {line}" for line in advice(diagnosis))


def _happened(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.missing:
        yield (
            f"{_ranks(diagnosis.missing)} left no record: killed (SIGKILL leaves none: often out of memory), stopped, on "
            "another disk, or never started"
        )
    for parting in diagnosis.partings[:2]:
        yield from _parting(parting)
    for behind in diagnosis.behind[:2]:
        yield _behind(behind)
    for place, failure in enumerate(diagnosis.failures[:_MOST_LISTED]):
        yield _failure(failure, is_first=place == 0 and len(diagnosis.failures) > 1)
    if not (diagnosis.missing or diagnosis.partings or diagnosis.behind or diagnosis.failures):
        yield "nothing that differs between the ranks, and no error"


def _parting(parting: Parting) -> Iterator[str]:
    yield f"ranks part at event {parting.count} of {parting.track}, {_clock(parting.time_s)}, after {parting.before}:"
    for text, ranks in _by_text(parting.found).items():
        yield f"    {_ranks(ranks)}: {text}"


def _behind(behind: Behind) -> str:
    verb = "is" if len(behind.ranks) == 1 else "are"
    following = f", where the others went on to {behind.next}" if behind.next else ""
    return (
        f"{_ranks(behind.ranks)} {verb} behind in {behind.track}: event {behind.count} of {behind.most}, "
        f"{behind.last}, {_clock(behind.time_s)}{following}"
    )


def _failure(failure: Failure, is_first: bool) -> str:
    first_line = failure.text.split("\n")[0][:240]
    return f"rank {failure.rank}{' first' if is_first else ''}, {_clock(failure.time_s)}: {first_line}"


def _places(diagnosis: Diagnosis, rank: int) -> str:
    """Say where the main thread was in the program, and where later, if it was elsewhere: it may hang after its error."""
    first, last = diagnosis.stacks[rank], diagnosis.ends[rank]
    where, later = own_line(first.frames), own_line(last.frames)
    seconds = last.time_s - first.time_s
    return where if where == later or seconds < 1 else f"{where}; {seconds:.0f} s later {later}"


def _wait(waiting: Waiting) -> str:
    whom = _ranks(waiting.whom) if waiting.whom else "all ranks"
    where = re.sub(r"^shardwise/\S+", "its word in the store", waiting.where)
    return f"rank {waiting.rank} waited for {whom} for {waiting.since_s:.1f} s at {where or 'a collective'}"


def advice(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield what to look at next, the most likely cause first."""
    if diagnosis.missing:
        who = _ranks(diagnosis.missing)
        yield f"why {who} ended: the kernel's log (dmesg) for 'out of memory', the launcher's output, the host itself"
    raised = [each for each in diagnosis.failures if not each.text.startswith(("DesyncError", "TransportError"))]
    for parting in diagnosis.partings[:1]:
        odd = _odd(parting.found)
        if raised and raised[0].rank in odd:  # it parted from the others because it was leaving
            break
        yield (
            f"what {_ranks(odd)} did otherwise before event {parting.count} of {parting.track}: code that depends on the rank "
            "or its data, another number of microbatches, a layer that is skipped or frozen, another version or config"
        )
    if raised:
        yield f"the error of rank {raised[0].rank}: {raised[0].text.split(chr(10))[0][:160]}"
    if not diagnosis.partings:
        for rank in diagnosis.blamed[:4]:
            if rank in diagnosis.stacks:
                yield f"rank {rank}, which others waited for: it was at {own_line(diagnosis.stacks[rank].frames)}"
    if not (diagnosis.missing or diagnosis.partings or raised or diagnosis.blamed):
        behind = [_ranks(each.ranks) for each in diagnosis.behind[:1]]
        yield f"the stacks of {behind[0]}" if behind else "nothing: these ranks were well when they wrote"


def _odd(found: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that are fewest with what they did."""
    return min(_by_text(found).values(), key=lambda ranks: (len(ranks), -ranks[0]))


def _by_text(found: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    groups: dict[str, tuple[int, ...]] = {}
    for rank, text in sorted(found.items()):
        groups[text] = (*groups.get(text, ()), rank)
    return groups


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_LISTED])) + (", ..." if len(ranks) > _MOST_LISTED else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s * 1000) % 1000:03d}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"

"""The records of all ranks as dumps of torch's FlightRecorder, for the analyzer that torch brings.  Pure.

FlightRecorder sees the calls of torch's process groups, and takes no records of others: what goes through shared memory, or as
messages of ours, is not in it.  Our own events know every collective, whatever carries it.

Source: ``torch.distributed.flight_recorder`` of torch 2.13, which reads these files; the format is that of version 2.10.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.black_box import ERROR, WAITS
from shardwise.doctor.diagnosis import newest
from shardwise.doctor.rank_record import Event, Record
from shardwise.events import Op

PREFIX = "shardwise_rank_"  # of the files, before the number of the rank
_VERSION = "2.10"
_BY = "gloo"  # the analyzer takes names of backends alone; an event does not say what has carried it
_GATHER, _SCATTER, _SUM, _MEET = "all_gather_v", "reduce_scatter_v", "all_reduce", "barrier"  # v: of uneven parts
_OF_UNITS = (Op.UNSHARD.value, Op.REDUCE.value)
_LAUNCHED = {"all-gather": _GATHER, "reduction": _SCATTER}  # waited for later, by what they are about
_MEETINGS = {"agreement": _MEET, "meeting": _GATHER}  # who comes stays until all have come
_OTHERS = _LAUNCHED | _MEETINGS
_ENDS = {Op.WAIT.value: Op.UNSHARD.value, Op.COMMIT.value: Op.REDUCE.value}
_REPLICAS = "replicas"  # what a sum of whole gradients is said to be of

_Act: TypeAlias = "tuple[str, str, str]"  # a track, a place, and what an event there is about


@dataclass(frozen=True, slots=True)
class _Track:
    """A sequence of events of several ranks, from where on all of these that have a record remember it."""

    name: str
    ranks: tuple[int, ...]
    count: int
    time_s: float

    def has(self, event: Event) -> bool:
        return event.count >= self.count and event.time_s >= self.time_s


def to_dumps(records: Sequence[Record]) -> dict[int, dict[str, object]]:
    """Return for each rank with a record what FlightRecorder would have dumped of the collectives on our tracks.

    A track stands for a process group, counts on it are sequence numbers: ranks that did something else at a count, or have
    not come to it, are those that the analyzer says are missing there.  Sizes and types of elements stay empty: events do not
    know them, and the analyzer compares what it is given.
    """
    by_rank = newest(records)
    tracks = _tracks(by_rank)
    named = _named(by_rank)
    return {rank: _dump(rank, record, tracks, named) for rank, record in sorted(by_rank.items())}


def _dump(rank: int, record: Record, tracks: Mapping[str, _Track], named: Mapping[_Act, str]) -> dict[str, object]:
    mine = {name: track for name, track in tracks.items() if rank in track.ranks}
    entries: list[dict[str, object]] = []
    last = {name: [-1, -1] for name in mine}
    for event, ended_s in _collectives(record):
        track = mine.get(event.track)
        is_of_unit = event.place in _OF_UNITS
        name = named.get((event.track, event.place, event.what)) if is_of_unit else _OTHERS[event.place]
        if track is None or name is None or not track.has(event):
            continue
        entries.append(_entry(len(entries), event, ended_s, name))
        last[event.track][0] = event.count
        if ended_s is not None:
            last[event.track][1] = max(last[event.track][1], event.count)
    return {
        "version": _VERSION,
        "comm_lib_version": "",
        "pg_config": {
            name: {"name": name, "desc": "shardwise", "ranks": str(list(track.ranks))} for name, track in mine.items()
        },
        "pg_status": {
            name: {
                "last_enqueued_collective": launched,
                "last_started_collective": launched,
                "last_completed_collective": completed,
            }
            for name, (launched, completed) in last.items()
        },
        "entries": entries,
    }


def _entry(number: int, event: Event, ended_s: float | None, name: str) -> dict[str, object]:
    # The analyzer looks for an entry of the same sequence number, group and description on every other rank, and compares names
    # alone after that: of two units that ranks gather at one count it must not make one collective.
    about = (event.what or "(root)") if event.place in _OF_UNITS else event.text
    began_ns = int(event.time_s * 1e9)
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (event.track, about),
        "collective_seq_id": event.count,
        "p2p_seq_id": 0,
        "op_id": event.count,
        "profiling_name": f"{_BY}:{name}",
        "time_created_ns": began_ns,
        "time_discovered_started_ns": began_ns,
        "time_discovered_completed_ns": None if ended_s is None else int(ended_s * 1e9),
        "input_sizes": [],
        "input_dtypes": [],
        "output_sizes": [],
        "output_dtypes": [],
        "state": "started" if ended_s is None else "completed",
        "retired": ended_s is not None,
        "timeout_ms": 0,
        "is_p2p": False,
        "thread_id": str(event.thread),
        "frames": [],
    }


def _tracks(by_rank: Mapping[int, Record]) -> dict[str, _Track]:
    """Return the tracks of several ranks; without a known group these are the ranks that have been seen on it."""
    groups: dict[str, set[int]] = {}
    first: dict[int, dict[str, int]] = {}
    for rank, record in by_rank.items():
        counts = first[rank] = {}
        for event in record.events:
            if event.track:
                counts[event.track] = min(event.count, counts.get(event.track, event.count))
                groups.setdefault(event.track, {rank}).update(record.groups.get(event.track, (rank,)))
    found: dict[str, _Track] = {}
    for name, ranks in sorted(groups.items()):
        counts = [first[rank][name] for rank in ranks if rank in first and name in first[rank]]
        # A rank may have made its events and forgotten them all since, or before it began to remember.
        began = [
            by_rank[rank].events[0].time_s
            for rank in ranks
            if rank in first and name not in first[rank] and by_rank[rank].events
        ]
        if len(ranks) > 1:
            found[name] = _Track(name, tuple(sorted(ranks)), max(counts), max(began, default=0.0))
    return found


def _collectives(record: Record) -> Iterator[tuple[Event, float | None]]:
    """Yield what became a collective, oldest first, with the time at which it is known to have ended."""
    ended: dict[int, float] = {}  # by the place of the event in the record
    of_units: dict[tuple[str, str, str], list[int]] = {}
    launched: dict[str, list[int]] = {}
    standing: dict[int, list[int]] = {}  # what a thread is in, or waits for
    waiting: set[int] = set()
    for place, event in enumerate(record.events):
        here = standing.setdefault(event.thread, [])
        if event.place.startswith(WAITS):
            waiting.add(event.thread)
            here += launched.pop(event.what, [])
            continue
        if event.place != ERROR or event.thread not in waiting:
            ended |= dict.fromkeys(here, event.time_s)
        here.clear()
        waiting.discard(event.thread)
        if event.track and event.place in _ENDS:
            ended |= dict.fromkeys(of_units.pop((event.track, _ENDS[event.place], event.what), []), event.time_s)
        elif event.track and event.place in _OF_UNITS:
            of_units.setdefault((event.track, event.place, event.what), []).append(place)
        elif event.track and event.place in _LAUNCHED:
            launched.setdefault(event.what, []).append(place)
        elif event.track and event.place in _MEETINGS:
            here.append(place)
    for thread, places in standing.items():
        if thread not in waiting:  # a wait is an event: without one it is over
            ended |= {place: record.events[place].time_s for place in places}
    for place, event in enumerate(record.events):
        if event.track and (event.place in _OF_UNITS or event.place in _OTHERS):
            yield event, ended.get(place)


def _named(by_rank: Mapping[int, Record]) -> dict[_Act, str]:
    """Return as which collective units have done what; the same for all ranks, and not what moved nothing anywhere.

    That a unit has gathered or reduced says its track; as what, the events of the same thread right before.
    """
    found: dict[_Act, set[str]] = {}
    reduced: dict[str, set[str]] = {}
    for record in by_rank.values():
        before: dict[int, list[Event]] = {}
        for event in record.events:
            if not event.track and event.place in _LAUNCHED:
                before.setdefault(event.thread, []).append(event)
            elif event.track and event.place in _OF_UNITS:
                launched = {
                    _LAUNCHED[each.place] if each.what != _REPLICAS else _SUM for each in before.get(event.thread, ())
                }
                seen = launched & ({_GATHER} if event.place == Op.UNSHARD.value else {_SCATTER, _SUM})
                found.setdefault((event.track, event.place, event.what), set()).update(seen)
                if event.place == Op.REDUCE.value:
                    reduced.setdefault(event.track, set()).update(seen)
                before.pop(event.thread, None)
    named: dict[_Act, str] = {}
    for act, seen in found.items():
        if act[1] == Op.REDUCE.value:  # small gradients wait for those of other units, which launch for all of them
            seen = seen or reduced[act[0]]
        if seen:
            named[act] = _SCATTER if _SCATTER in seen else next(iter(seen))
    return named

"""Where a rank is, a sentence about several ranks, and which of them wait for each other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import FrameType

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

from shardwise.consistency.recorder import innermost
from shardwise.formatting import format_ranks
from shardwise.observe import WAITS, Entry, entries, live_tracks

_DISTRIBUTED = "/torch/distributed/"
_WRAPPERS = (" checked", " outside")  # functions around those that user code calls
_JOIN_EXIT = "Join's exit"
# The last frames of a wait for all ranks, and of one that polls until the awaited rank has come.
_COLLECTIVE = re.compile(
    r"/distributed_c10d\.py:\d+ |_functional_collectives\.py:\d+ wait|process_groups\.py:\d+ (await_collective|outlast)$"
)
_POLL = re.compile(r"/shardwise/consistency/store\.py:\d+ wait_until$")
# Calls that wait for one rank of a group.
_OF_PAIRS = re.compile(r"\b(send|recv|isend|irecv|batch_isend_irecv|send_object_list|recv_object_list)\(")


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The position of a rank.

    Attributes:
        rank: global.
        line: "file:line" of user code; empty if there is none.
        call: the function that the user's line has called, such as "save()"; empty if user code runs.
        waits_for: "rank 3" or "all ranks"; empty if it does not wait for others.
        passes: by engine, "forward" and "backward": how many of each have begun.
        running: by engine: which of the two runs, if one does.
        still_s: how long it has been there; 0 if it has moved since the last check.
        raised: the class of the exception that ended the program there; empty while it runs.
        has_ended: the program has ended without an exception.
        polls: it waits for ``waits_for`` until that rank has written something, which it would see at once.
        awaited: names of the process groups of the collective that it may wait in.
        collectives: by process group: how many collectives it has begun.
    """

    rank: int
    line: str = ""
    call: str = ""
    waits_for: str = ""
    passes: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    running: Mapping[str, str] = field(default_factory=dict[str, str])
    still_s: float = 0.0
    raised: str = ""
    has_ended: bool = False
    polls: bool = False
    awaited: tuple[str, ...] = ()
    collectives: Mapping[str, int] = field(default_factory=dict[str, int])

    def to_text(self) -> str:
        """Return the status as one JSON object."""
        return json.dumps(asdict(self))


def status_from_text(text: str) -> RankStatus:
    """Return the status that :meth:`RankStatus.to_text` wrote."""
    return RankStatus(**json.loads(text))


def status_at(rank: int, frames: Sequence[str], last: Entry | None, raised: str = "") -> RankStatus:
    """Return the status of this process, global ``rank``, whose program is at ``frames``, after its event ``last``."""
    place = innermost(frames)
    called = frames[place + 1 :] if place is not None else frames
    call = waits_for = ""
    # The outermost frame is the call that user code makes.
    for frame in called:
        if _DISTRIBUTED in frame and "c10d_logger" not in frame:
            call, waits_for = f"torch.distributed.{frame.rsplit(' ', 1)[-1]}()", "all ranks"
            call = _JOIN_EXIT if call == "torch.distributed.__exit__()" else call
            break
        if "/torch/nn/utils/" in frame:
            call = f"torch.nn.utils.{frame.rsplit(' ', 1)[-1]}()"
            break
        if "/shardwise/" in frame and not frame.endswith(_WRAPPERS):
            call = f"{frame.rsplit(' ', 1)[-1]}()"
            break
    if call and any(_COLLECTIVE.search(frame) for frame in called):
        waits_for = "all ranks"
    elif call and last is not None and last[4].startswith(WAITS):
        waits_for = last[4][len(WAITS) :]
    line = frames[place].rsplit(" ", 1)[0].removeprefix(f"{os.getcwd()}/") if place is not None else ""
    recent = [*dict.fromkeys(entry[2] for entry in reversed(entries()))]  # a process may have other models
    newest = {track.name: track for track in sorted(live_tracks, key=lambda track: track.age)}
    tracks = sorted(
        [track for track in newest.values() if track.num_forwards and track.is_of_several],
        key=lambda track: recent.index(track.name) if track.name in recent else len(recent),
    )
    return RankStatus(
        rank,
        line,
        call,
        waits_for,
        {track.name: {"forward": track.num_forwards, "backward": track.num_backwards} for track in tracks},
        {track.name: track.running for track in tracks if track.running},
        raised=raised,
        polls=any(_POLL.search(frame) for frame in called),
    )


def awaited_groups(frame: FrameType | None) -> tuple[str, ...]:
    """Return the names of the process groups that the functions from ``frame`` outwards to user code work with."""
    found: dict[str, None] = {}
    while frame is not None and innermost([f"{frame.f_code.co_filename}:1 {frame.f_code.co_name}"]) is None:
        values = [*frame.f_locals.values()]
        is_default = "group" in frame.f_locals and frame.f_locals["group"] is None
        values += [dist.group.WORLD] if is_default and _DISTRIBUTED in frame.f_code.co_filename else []
        found |= dict.fromkeys(group.group_name for each in values for group in _groups_of_value(each))
        frame = frame.f_back
    return tuple(found)


def _groups_of_value(value: object) -> Iterator[dist.ProcessGroup]:
    if isinstance(value, dist.ProcessGroup):
        yield value
    elif isinstance(value, DTensor | DeviceMesh):
        yield from (value.device_mesh if isinstance(value, DTensor) else value).get_all_groups()


def statuses_in_words(statuses: Sequence[RankStatus]) -> str:
    """Return one sentence about where these ranks are, and whether they ran different numbers of forwards or backwards.

    Example:
        >>> first = RankStatus(0, "a.py:3", "f()", "rank 1", {"e": {"forward": 4}}, {"e": "forward"}, 30.0)
        >>> statuses_in_words([first, RankStatus(1, "a.py:9", "save()", "", {"e": {"forward": 3}}, {}, 29.0)])
        'rank 0 is in its 4th forward (a.py:3, waits for rank 1, for 30 s); rank 1 is in save() after its 3rd forward (a.py:9, \
for 29 s): they ran different numbers of forwards, which `with Join([model]):` allows'
    """
    is_join = any(each.call == _JOIN_EXIT for each in statuses)  # numbers of passes may differ there
    track, kind = ("", "") if is_join else _difference(statuses)
    alike: dict[str, list[RankStatus]] = {}
    for each in statuses:
        alike.setdefault(_what(replace(each, still_s=0.0), track, kind), []).append(each)
    parts: list[str] = []
    for same in alike.values():
        longest = replace(same[0], still_s=max(each.still_s for each in same))
        parts.append(f"{format_ranks([each.rank for each in same])} {_what(longest, track, kind, len(same) > 1)}")
    if is_join:
        parts[-1] += ": ranks that have left a Join serve forwards, backwards and steps only; make other calls after it"
    # Most often one rank has more batches.
    unlike = f": they ran different numbers of {kind}s, which `with Join([model]):` allows" if kind else ""
    return "; ".join(parts) + unlike


def _difference(statuses: Sequence[RankStatus]) -> tuple[str, str]:
    """Return the engine, and "forward" or "backward", for which waiting ranks have begun different numbers.

    Ranks that compute are not compared: they may just be late.
    """
    still = [each for each in statuses if each.still_s and each.waits_for]
    for track in {name: None for each in still for name in each.passes}:
        for kind in ("forward", "backward"):
            if len({each.passes[track].get(kind, 0) for each in still if track in each.passes}) > 1:
                return track, kind
    return "", ""


def _what(status: RankStatus, track: str, kind: str, is_many: bool = False) -> str:
    track = track or next(iter(status.running), next(iter(status.passes), ""))
    running, passes, its = status.running.get(track, ""), status.passes.get(track, {}), "their" if is_many else "its"
    if status.has_ended:
        doing = "ended without an exception"
        counted = kind or "forward"
        return doing + (f" after {its} {_ordinal(passes[counted])} {counted}" if passes.get(counted) else "")
    if running:
        doing = f"in {its} {_ordinal(passes[running])} {running}"
    else:
        doing = f"in {status.call}" if status.call else "in your code" if status.line else "outside your code"
        counted = kind or "forward"
        doing += f" after {its} {_ordinal(passes[counted])} {counted}" if passes.get(counted) else ""
    verb = f"raised {status.raised}" if status.raised else "are" if is_many else "is"
    notes = [
        status.line,
        f"waits for {status.waits_for}" if status.waits_for and not status.raised else "",
        f"for {status.still_s:.0f} s" if status.still_s else "",
    ]
    return f"{verb} {doing} ({', '.join(filter(None, notes))})".removesuffix(" ()")


def _ordinal(number: int) -> str:
    return f"{number}{'th' if number % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def deadlocked(statuses: Sequence[RankStatus], least_s: float) -> list[int]:
    """Return the ranks that wait for each other, so that none of them can go on; empty if that is not certain.

    A rank is ahead of another if it has begun what the other has not: a collective of a group of both, a forward, a
    wait for a word of the other.  Ranks that make the same calls in the same order can be in many places at a time, while
    messages are in flight, but of two of them only one can be ahead.  So a cycle of ranks that are ahead of each other
    shows that they make different calls.  They count only if each has waited for ``least_s`` seconds: ranks whose calls
    differ on purpose, as the stages of a pipeline do, go on.
    """
    still = {each.rank: each for each in statuses if each.waits_for and each.still_s >= least_s and not each.raised}
    ahead_of = {
        rank: {other for other in still if other != rank and _is_ahead(each, still[other])}
        for rank, each in still.items()
    }
    left = set(still)
    while free := {rank for rank in left if not ahead_of[rank] & left}:
        left -= free
    return sorted(left)


def _is_ahead(mine: RankStatus, other: RankStatus) -> bool:
    if mine.polls and mine.waits_for == f"rank {other.rank}":
        return True
    for track, kind in mine.running.items():
        if track in other.passes and mine.passes[track][kind] > other.passes[track].get(kind, 0):
            return _JOIN_EXIT not in (mine.call, other.call)
    for group in () if _OF_PAIRS.search(mine.call) else mine.awaited:
        more = mine.collectives.get(group, 0) - other.collectives.get(group, 1 << 60)
        is_other_call = group in other.awaited and mine.call != other.call and not _OF_PAIRS.search(other.call)
        if more == 1 or (more == 0 and is_other_call):
            return True
    return False

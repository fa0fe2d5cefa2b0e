"""Where a rank is, and a sentence about several ranks: who waits for whom, at which line of user code.  Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from shardwise.black_box import WAITS, Entry, groups_of, live_tracks
from shardwise.doctor.user_code import innermost

_DISTRIBUTED = "/torch/distributed/"
_WRAPPERS = (" checked", " outside")  # functions around those that user code calls


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where a rank is.

    Attributes:
        rank: global.
        line: "file:line" of user code; empty without any.
        call: the function that the user's line has called, such as "save()"; empty if user code runs.
        waits_for: "rank 3" or "all ranks"; empty if it does not wait for others.
        passes: by engine, "forward" and "backward": how many of each have begun.
        running: by engine: the one of both that runs, if one does.
        still_s: for how long it has been there; 0 if it has moved since the last look.
        raised: the class of the exception that ended the program there; empty while it runs.
    """

    rank: int
    line: str = ""
    call: str = ""
    waits_for: str = ""
    passes: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    running: Mapping[str, str] = field(default_factory=dict[str, str])
    still_s: float = 0.0
    raised: str = ""

    def to_text(self) -> str:
        """Return the status as one JSON object."""
        return json.dumps(asdict(self))


def from_text(text: str) -> RankStatus:
    """Return the status that :meth:`RankStatus.to_text` wrote."""
    return RankStatus(**json.loads(text))


def look(rank: int, frames: Sequence[str], last: Entry | None, raised: str = "") -> RankStatus:
    """Return the status of this process, global ``rank``, whose program is at ``frames``, after its event ``last``."""
    place = innermost(frames)
    call = waits_for = ""
    for frame in (
        frames[place + 1 :] if place is not None else frames
    ):  # the outermost one: the call that user code makes
        if _DISTRIBUTED in frame and "c10d_logger" not in frame:
            call, waits_for = f"torch.distributed.{frame.rsplit(' ', 1)[-1]}()", "all ranks"
            break
        if "/shardwise/" in frame and not frame.endswith(_WRAPPERS):
            call = f"{frame.rsplit(' ', 1)[-1]}()"
            break
    if call and last is not None and last[4].startswith(WAITS):
        waits_for = last[4][len(WAITS) :]
    line = frames[place].rsplit(" ", 1)[0].removeprefix(f"{os.getcwd()}/") if place is not None else ""
    tracks = [
        track for track in list(live_tracks) if track.num_forwards and groups_of([track.name])
    ]  # those of several ranks
    return RankStatus(
        rank,
        line,
        call,
        waits_for,
        {track.name: {"forward": track.num_forwards, "backward": track.num_backwards} for track in tracks},
        {track.name: track.running for track in tracks if track.running},
        raised=raised,
    )


def in_words(statuses: Sequence[RankStatus]) -> str:
    """Return one sentence about where these ranks are, and whether they ran different numbers of forwards or backwards.

    Example:
        >>> first = RankStatus(0, "a.py:3", "f()", "rank 1", {"e": {"forward": 4}}, {"e": "forward"}, 30.0)
        >>> in_words([first, RankStatus(1, "a.py:9", "save()", "", {"e": {"forward": 3}}, {}, 29.0)])
        'rank 0 is in its 4th forward (a.py:3, waits for rank 1, for 30 s); rank 1 is in save() after its 3rd forward (a.py:9, \
for 29 s): they ran different numbers of forwards'
    """
    track, kind = _difference(statuses)
    alike: dict[str, list[RankStatus]] = {}
    for each in statuses:
        alike.setdefault(_what(replace(each, still_s=0.0), track, kind), []).append(each)
    parts: list[str] = []
    for same in alike.values():
        longest = replace(same[0], still_s=max(each.still_s for each in same))
        parts.append(f"{_ranks([each.rank for each in same])} {_what(longest, track, kind, len(same) > 1)}")
    return "; ".join(parts) + (f": they ran different numbers of {kind}s" if kind else "")


def _difference(statuses: Sequence[RankStatus]) -> tuple[str, str]:
    """Return the engine, and "forward" or "backward", of which waiting ranks have begun different numbers.

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


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"

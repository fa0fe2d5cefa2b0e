"""The bulletin of an engine: plans and facts that must be the same on every rank, compared beside the collectives they protect.

A collective that ranks enter with different ideas hangs or, worse, mixes tensors of the same size.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from shardwise.black_box import note_group
from shardwise.comm.alive import LOOK_S
from shardwise.comm.last_words import ASKS, in_short, leave, out_of_reach_in_words, who_left
from shardwise.comm.mending import break_off
from shardwise.comm.posts import GRACE_S, Posts
from shardwise.comm.wait_watch import status_in_words
from shardwise.errors import DesyncError, ShardwiseError, TransportError
from shardwise.torch_private import is_gloo

_RULE = "Ranks must run the same units in the same order, the same number of times."


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is: how many calls it has made, the last ones, and what it says of itself."""

    num_calls: int
    recent: tuple[str, ...]
    note: str = ""

    def to_text(self) -> str:
        """Return the position as one JSON object."""
        return json.dumps({"num_calls": self.num_calls, "recent": self.recent, "note": self.note})

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Return the position that :meth:`to_text` wrote."""
        fields = json.loads(text)
        return cls(fields["num_calls"], tuple(fields["recent"]), fields["note"])


class Bulletin:
    """Posts of the ranks of one engine's collectives.  Every rank compares with the first, and that one with all."""

    def __init__(self, posts: Posts) -> None:
        self._posts = posts
        self._rank = posts.members[posts.rank]  # as errors name it
        number = posts.prefix.rsplit("/", 1)[-1]
        self.topic = f"engine {number} of ranks {min(posts.members)} to {max(posts.members)}"  # the same on all of them
        note_group(self.topic, posts.members)
        self._counts: Counter[str] = Counter()
        self._agreed: set[str] = set()
        self.groups: list[dist.ProcessGroup] = []  # by which the engine talks

    def check_plan(self, calls: Sequence[str], position: Position) -> None:
        """Raise DesyncError on every rank unless all ranks have planned the same ``calls``.

        Plans that have been agreed on before are not compared again.
        """
        text = json.dumps(list(calls))
        if text not in self._agreed:
            self._compare(
                "plan",
                text,
                position,
                lambda other, theirs: _first_difference(calls, json.loads(theirs), self._rank, other),
                lambda others: (
                    f"{others} did not finish a step within {self._posts.timeout_s:g} s of rank {self._rank}"
                    f"{', which has changed its order of units: ' * bool(position.note)}{position.note}"
                ),
            )
            self._agreed.add(text)

    def check_facts(self, what: str, facts: Sequence[str], position: Position) -> None:
        """Raise DesyncError on every rank unless all ranks have the same ``facts`` about ``what``.

        To be called before the first collective whose sizes follow from them: a backend given other sizes than its peers
        may end the process, and given the same by chance mixes tensors without a word.
        """
        mine = [what, *facts]
        self._compare(
            "facts",
            json.dumps(mine),
            position,
            lambda other, theirs: _first_fact(mine, json.loads(theirs), self._rank, other),
            lambda others: f"rank {self._rank} has new {what}, unlike {others}: {_listed(facts)}",
        )

    def post_writes(self, place: str, values: Sequence[str]) -> None:
        """Leave for the others what this rank has written at ``place``; nobody waits."""
        self._posts.post(f"writes/{place}", json.dumps(list(values)))

    def check_writes(self, place: str, values: Sequence[str], position: Position) -> None:
        """Raise DesyncError unless all ranks have left the same ``values`` at ``place``, which all of them have passed."""
        posts = self._posts
        found = posts.collect(f"writes/{place}", posts.peers(), GRACE_S)
        for other in posts.peers():
            theirs = json.loads(found[other]) if other in found else []
            unlike = sorted({*values} ^ {*theirs})
            if unlike:
                problem = (
                    f"ranks have written different values to parameters in forward (an embedding with max_norm changes the "
                    f"rows that its rank looks up): {unlike[0].partition(' with digest')[0]} is not the same on rank "
                    f"{self._rank} and rank {posts.members[other]} after it. Every rank keeps its own rows of a sharded "
                    "parameter, so that all must write the same: gather what the values are made of first, or write on one "
                    "rank and broadcast"
                )
                self._refuse(problem, position)

    def union(self, topic: str, mine: Sequence[str], position: Position) -> set[str]:
        """Return what any rank gives as ``mine``, the same on every rank; all ask at the same place of their program.

        Raises: DesyncError if a rank does not ask.
        """
        posts = self._posts
        self._counts[topic] += 1
        place = f"{topic}/{self._counts[topic]}"
        if posts.rank:
            posts.post(place, json.dumps(list(mine)))
            peers, place, limit_s = (0,), f"{place}/all", posts.timeout_s + GRACE_S
        else:
            peers, limit_s = posts.peers(), posts.timeout_s
        found = posts.collect(place, peers, limit_s)
        absent = [other for other in peers if other not in found]
        if absent:
            problem = posts.absence(
                absent, f"rank {self._rank} has new {topic}, unlike {posts.named(absent)}: {_listed(mine)}"
            )
            self._refuse(problem, position)
        every = {*mine}.union(*(json.loads(theirs) for theirs in found.values()))
        if not posts.rank:
            posts.post(f"{place}/all", json.dumps(sorted(every)))
        return every

    def check_deviation(self, what: str, position: Position) -> None:
        """Raise DesyncError unless all ranks leave their plan here, in the way that ``what`` says.

        To be called before the first collective that is not as planned: sizes may not fit, and a backend given other sizes
        than its peers may overwrite memory.
        """
        left = "left the order of units"
        self._compare(
            "deviation",
            what,
            position,
            lambda other, theirs: f"ranks {left} differently: rank {self._rank}: {what}; rank {other}: {theirs}",
            lambda others: f"rank {self._rank} {left}, unlike {others}: {what}",
        )

    def _compare(
        self,
        topic: str,
        text: str,
        position: Position,
        different: Callable[[int, str], str],
        late: Callable[[str], str],
    ) -> None:
        posts = self._posts
        self._counts[topic] += 1
        place = f"{topic}/{self._counts[topic]}"
        posts.post(place, text)
        peers = (0,) if posts.rank else posts.peers()
        limit_s = posts.timeout_s + (GRACE_S if posts.rank else 0.0)  # the first knows who is missing, and says so
        found = posts.collect(
            place, peers, limit_s, is_enough=lambda found: any(theirs != text for theirs in found.values())
        )
        problem = next((different(posts.members[other], each) for other, each in found.items() if each != text), "")
        if not problem and len(found) < len(peers):
            absent = [other for other in peers if other not in found]
            problem = posts.absence(absent, late(posts.named(absent)))
        if problem:
            self._refuse(problem, position)

    def _refuse(self, problem: str, position: Position) -> NoReturn:
        self.tell(Position(position.num_calls, position.recent, problem))
        raise DesyncError(f"{problem}\n{_RULE}")

    def tell(self, position: Position) -> None:
        """Leave where this rank is, and why it goes no further, for the others to read."""
        with suppress(TransportError):
            self._posts.post("failure", position.to_text())

    def explain(self, error: BaseException, position: Position) -> DesyncError:
        """Return an error that says where every rank was when a collective failed on this one.

        After a backend's own error the engine's groups are good for nothing: their connections are closed, so that nobody
        waits in one for this rank while it asks the others.
        """
        why = str(error) if isinstance(error, ShardwiseError) else in_short(error)
        lines = [f"rank {self._rank} failed at {_describe(position)}: {why}"]
        leave(f"{lines[0]}{ASKS}")
        try:
            self._posts.post("failure", position.to_text())
            if not isinstance(error, ShardwiseError):
                for group in filter(is_gloo, self.groups):
                    with suppress(RuntimeError):
                        break_off(group)
            status = status_in_words(self._posts.members)
            lines += [*filter(None, [status]), *self._reports(str(error)), _RULE]
        except TransportError as gone:
            lines.append(str(gone))
        return DesyncError("\n".join(lines))

    def _reports(self, said: str) -> Iterator[str]:
        """Yield where the other ranks are; of those that are gone what ``said`` does not say already.

        A rank that is gone, or a host that does not answer, is reason enough: the others are not waited for.  Nor is one that
        has left by an exception: it may go on, and would wait for this rank in its next step.
        """
        posts, silent, left = self._posts, list[int](), who_left(said)
        far = posts.out_of_reach(posts.peers(), said)
        is_known = bool(far or posts.gone(posts.peers()))
        # Who compares with the first rank waits longer than a backend does.
        deadline = time.monotonic() + (LOOK_S if is_known else 2 * GRACE_S)
        for other in posts.peers():  # one by one: others may report while one is gone
            rank = posts.members[other]
            limit_s = LOOK_S if rank in left else deadline - time.monotonic()
            text = posts.collect("failure", [other], limit_s).get(other)
            if text is not None:
                yield f"rank {rank} was at {_describe(Position.from_text(text))}"
            elif not posts.gone([other]):
                silent += [other] * (rank not in left)
            elif f"rank {rank} is gone" not in said:
                yield posts.absence([other], "")
        lost = [other for other in silent if other in far]
        if lost:
            yield out_of_reach_in_words([posts.members[other] for other in lost])
        if silent and not is_known:
            yield posts.absence(
                silent, f"{posts.named(silent)} reported nothing: still running, stopped, or on another host"
            )


def _describe(position: Position) -> str:
    last = position.recent[-1] if position.recent else "no call yet"
    note = f" ({position.note})" if position.note else ""
    before = f", after {', '.join(position.recent[:-1])}" if len(position.recent) > 1 else ""
    return f"call {position.num_calls}: {last}{before}{note}"


def _first_difference(mine: Sequence[str], theirs: Sequence[str], rank: int, other: int) -> str:
    for index in range(max(len(mine), len(theirs))):
        left = mine[index] if index < len(mine) else "the end of the step"
        right = theirs[index] if index < len(theirs) else "the end of the step"
        if left != right:
            return f"ranks differ at collective {index} of the step: rank {rank} has {left}, rank {other} has {right}"
    return f"rank {rank} and rank {other} differ"


def _first_fact(mine: Sequence[str], theirs: Sequence[str], rank: int, other: int) -> str:
    if mine[0] != theirs[0]:
        return f"ranks are at different places: rank {rank} compares {mine[0]}, rank {other} compares {theirs[0]}"
    for index in range(1, max(len(mine), len(theirs))):
        left = mine[index] if index < len(mine) else "nothing more"
        right = theirs[index] if index < len(theirs) else "nothing more"
        if left != right:
            return f"ranks have different {mine[0]}: rank {rank} has {left}, rank {other} has {right}"
    return f"rank {rank} and rank {other} differ"


def _listed(facts: Sequence[str]) -> str:
    return ", ".join(facts[:4]) + (f" and {len(facts) - 4} more" if len(facts) > 4 else "")

"""The ranks of one host as one of them sees them: spans that they enter and leave together, and words that they wait for.

Ranks order their accesses to each other's memory by words in the headers of their segments.  That needs stores to be seen in
the order they were made, which x86-64 guarantees and others do not.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.black_box import WAITS, note
from shardwise.comm import alarm
from shardwise.comm.alive import Liveness, is_gone
from shardwise.comm.last_words import cited, gone_in_words, look_next, store_of_job
from shardwise.comm.leaving import farewells
from shardwise.comm.links.arena import ArenaPlace
from shardwise.comm.links.link import SpanKind
from shardwise.comm.links.segment import Segment
from shardwise.errors import TransportError

# Words of a segment's header: written by its owner, polled by the others.  All but the first are stamps, see _stamp.
_EPOCH = 0  # one more whenever this rank, or one that it has heard of, has left a span by an exception
_OPEN = 1  # the span entered last, with the flags below
CLOSED = 2  # the last span that this rank has done its part of
_LEFT = 3  # the last span that this rank has left by an exception
_LATE = 4  # the epoch that this rank left because a peer was late, and, in the low bits, 1 + which
FIRST_FREE = 5  # from here on: words of those who move bytes

_live: weakref.WeakSet[Mates] = weakref.WeakSet()  # those of this process, which leaves them all when it ends

_WANTS_COLLECTIVES, _IN_BACKWARD = 1, 2  # flags of _OPEN
_CALL_BITS, _SPAN_BITS = 20, 24
_YIELDS = 200
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_LIVENESS_S = 0.2


def _stamp(epoch: int, span: int, call: int = 0) -> int:
    """Return a number that grows with the epoch, then with the span in it, then with the call in that."""
    return (epoch << _SPAN_BITS | span) << _CALL_BITS | call


@dataclass(frozen=True, slots=True)
class HostGroup:
    """The ranks of a group that are processes of one host: all of the group, or some.

    Attributes:
        segments: one per rank of this host, in the order of the group: a header, then what they exchange.
        pids: process ids, for telling a rank that is gone from one that is late.
        place: this rank's among them.
        ranks: their numbers in the group.  members: the global rank of each rank of the group, as errors name them.
        places_of: ``places_of(rank, number)`` returns where the sections of ``rank`` (of the group) lie, as it has said for the
            ``number``-th time: for each bucket of the link, in order.
    """

    segments: tuple[Segment, ...]
    pids: tuple[int, ...]
    place: int
    ranks: range
    members: tuple[int, ...]
    places_of: Callable[[int, int], Sequence[ArenaPlace]]


class Mates:
    """This rank's words and those of the others of its host, who are numbered by their places on it.

    Spans are counted from the last exception on: a rank that leaves a span by one enters a new epoch, the others follow with
    an error when they next look at it, and all meet in the first span of that epoch.

    Args:
        host: the ranks.
        timeout_s: how long to wait for a rank that is alive.
        signs: words of those who move bytes that errors tell of, and what each counts.

    Attributes:
        others: the places of the others.  kind: of the last span.
        blamed: the rank that the last error here was about.
    """

    def __init__(self, host: HostGroup, timeout_s: float, signs: Sequence[tuple[int, str]] = ()) -> None:
        assert len(host.segments) == len(host.pids) == len(host.ranks)
        self.others = tuple(place for place in range(len(host.segments)) if place != host.place)
        self.kind: SpanKind = "forward"
        self.blamed = host.ranks[host.place]
        self._ranks, self._pids, self._signs = host.ranks, host.pids, signs
        self._members, self._name = host.members, host.members[self.blamed]
        self._words = tuple(segment.words for segment in host.segments)
        self._mine = self._words[host.place]
        assert max(host.ranks) + 1 < 1 << _CALL_BITS
        self._alive = {place: Liveness(host.pids[place]) for place in self.others}
        self._timeout_s = timeout_s
        self._epoch = self._span = 0
        _live.add(self)

    # ---- spans ----

    def open(self, kind: SpanKind, wants_collectives: bool) -> bool:
        """Enter a span with the others; return True unless one wants collectives.  Who gets an error aborts."""
        what = f"the start of a {kind}"
        self._check_epochs(what)
        self._span += 1
        self.kind = kind
        flags = _IN_BACKWARD * (kind == "backward")
        self._mine[_OPEN] = self.start | flags | wants_collectives
        self.wait_for_all(_OPEN, self.start, what)
        for place in self.others:
            self._check_entered(place, self.start | flags, what)
        return not (wants_collectives or any(self._words[place][_OPEN] & _WANTS_COLLECTIVES for place in self.others))

    def _check_entered(self, place: int, word: int, what: str) -> None:
        words = self._words[place]
        found = words[_OPEN] & ~_WANTS_COLLECTIVES
        if found >> _CALL_BITS != word >> _CALL_BITS:
            if words[_LEFT] >> _CALL_BITS == word >> _CALL_BITS:
                return  # it was there: this rank may come to the same exception, and hears of the other's when it needs it
            if found >> (_CALL_BITS + _SPAN_BITS) != self._epoch:
                self._check_epoch(place, what)
        if found != word:
            other = "forward" if word & _IN_BACKWARD else "backward"
            raise self._blame(
                place,
                f"rank {self.name_of(place)} starts a {other} where rank {self._name} starts a {self.kind}; every rank must "
                "make the same calls in the same order",
            )

    def close(self, waits: Callable[[str], None]) -> None:
        """Leave the span; a backward ends for nobody before all have done their part of it.

        ``waits(what)`` returns when no other reads in this forward what is about to change.
        """
        what = f"the end of a {self.kind}"
        if self.kind == "backward":
            self._mine[CLOSED] = self.start
            self.wait_for_all(CLOSED, self.start, what)
        else:
            waits(what)
        self._check_epochs(what)
        self._mine[CLOSED] = self.start

    def abort(self) -> None:
        """Leave the span by an exception."""
        # One epoch for all that leave because of each other.
        newest = max(self._words[place][_EPOCH] for place in self.others)
        self._mine[_LEFT] = self.start
        self._epoch = newest if newest > self._epoch else self._epoch + 1
        self._span = 0
        self._mine[_EPOCH] = self._epoch

    def meet_after_exception(self, what: str) -> None:
        """Wait until all others have left what this rank has left by an exception: until then they read what was said in it.

        Raises: as :meth:`wait_for_all`.
        """
        for place in self.others:
            if self._words[place][_EPOCH] < self._epoch:
                self.wait_for(place, lambda words=self._words[place]: words[_EPOCH] >= self._epoch, what)

    # ---- words ----

    @property
    def start(self) -> int:
        """The stamp of the span."""
        return _stamp(self._epoch, self._span)

    def stamp(self, index: int) -> int:
        """Return the stamp of collective number ``index`` of its kind in this span; -1: of none yet."""
        return _stamp(self._epoch, self._span, index + 1)

    def long_stamp(self, index: int) -> int:
        """Return the stamp of number ``index`` of what is counted from span to span, from the last exception on."""
        return _stamp(self._epoch, 0) + index + 1

    def say(self, word: int, value: int) -> None:
        """Let the others read ``value``, and all that was written before."""
        self._mine[word] = value

    def hear(self, place: int, word: int) -> int:
        """Return what the rank at ``place`` has said last."""
        return self._words[place][word]

    def have_said(self, word: int, at_least: int) -> bool:
        """True if all others have said ``at_least`` that."""
        return all(self._words[place][word] >= at_least for place in self.others)

    def wait_for_all(self, word: int, at_least: int, what: str) -> None:
        """Wait until all others have said ``at_least`` that.

        Raises: TransportError if one is gone, has left the span by an exception, or does not come in time.
        """
        for place in self.others:
            if self._words[place][word] < at_least:
                words = self._words[place]
                self.wait_for(place, lambda words=words: words[word] >= at_least, what)

    def wait_for(self, place: int, is_there: Callable[[], bool], what: str) -> None:
        """Wait for the rank at ``place`` until ``is_there()``, which reads its words.  Raises: as :meth:`wait_for_all`."""
        for _ in range(_YIELDS):
            if is_there():
                return
            os.sched_yield()
        note(f"{WAITS}rank {self.name_of(place)}", what)
        start = time.monotonic()
        sleep_s, look_s = _FIRST_SLEEP_S, _LIVENESS_S
        while not is_there():
            alarm.look()
            self._check_epochs(what)
            waited_s = time.monotonic() - start
            if waited_s > look_s:
                look_s = waited_s + _LIVENESS_S
                if not self._alive[place].is_alive() and not is_there():
                    raise self._lost(place, f"rank {self._name} waited {waited_s:.1f} s for it at {what}")
                if waited_s > self._timeout_s:
                    self._mine[_LATE] = self._epoch << _CALL_BITS | self._ranks[place] + 1
                    raise self._blame(
                        place,
                        f"rank {self._name} waited {self._timeout_s:g} s for rank {self.name_of(place)} at {what}: "
                        f"{self._last_sign(place)}; every rank must make the same calls in the same order",
                    )
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _check_epochs(self, what: str) -> None:
        for place in self.others:
            self._check_epoch(place, what)

    def _check_epoch(self, place: int, what: str) -> None:
        if self._words[place][_EPOCH] <= self._epoch:
            return
        gone = [each for each in self.others if self._has_stayed(each) and not self._alive[each].is_alive()]
        if gone:  # why the other one has left
            raise self._lost(gone[0], f"rank {self._name} was at {what}")
        for other in self.others:
            epoch, late = divmod(self._words[other][_LATE], 1 << _CALL_BITS)
            if late and epoch == self._epoch < self._words[other][_EPOCH]:
                self.blamed = late - 1
                raise TransportError(
                    f"rank {self.name_of(other)} waited {self._timeout_s:g} s for rank {self._members[late - 1]} while rank "
                    f"{self._name} was at {what}; every rank must make the same calls in the same order"
                )
        its = self.name_of(place)
        raise self._blame(
            place,
            f"rank {its} raised an exception while rank {self._name} was at {what}; "
            f"see the error of rank {its}{cited(store_of_job(), [its])}",
        )

    def name_of(self, place: int) -> int:
        """Return the global rank of the rank at ``place``."""
        return self._members[self._ranks[place]]

    def _blame(self, place: int, problem: str) -> TransportError:
        self.blamed = self._ranks[place]
        return TransportError(problem)

    def _lost(self, place: int, where: str) -> TransportError:
        """Return the error for the rank at ``place``, whose process has ended: what it did last, and what it said."""
        store, name = store_of_job(), self.name_of(place)
        if store is not None:
            is_gone(store, name)  # other hosts hear of it
        text = gone_in_words(store, [name])
        return self._blame(place, f"{text}; {where}: {self._last_sign(place)}. {look_next()}")

    def _last_sign(self, place: int) -> str:
        """Say what the words of the rank at ``place`` show that it has done last."""
        words, name = self._words[place], self.name_of(place)
        span, mine = words[_OPEN] >> _CALL_BITS, self._mine[_OPEN] >> _CALL_BITS
        if not span:
            return f"rank {name} had not begun it"
        which = "the same" if span == mine else "an earlier" if span < mine else "a later"
        kind = "backward" if words[_OPEN] & _IN_BACKWARD else "forward"
        done = [
            f"{words[word] & (1 << _CALL_BITS) - 1} {what}"
            for word, what in self._signs
            if words[word] >> _CALL_BITS == span
        ]
        counts = f" ({', '.join(done)})" if done else ""
        ended = ", which it has finished" if words[CLOSED] >> _CALL_BITS == span else ""
        return f"rank {name} was last in {which} {kind}{counts}{ended}"

    def _has_stayed(self, place: int) -> bool:
        return self._words[place][_EPOCH] <= self._epoch


def _leave_all() -> None:
    for mates in list(_live):
        mates.abort()


farewells.append(_leave_all)

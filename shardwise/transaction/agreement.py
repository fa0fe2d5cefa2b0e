"""How ranks learn that all of them have come to the end of a step, or that one will not.

Without a fault: one word written and the others' read where all ranks share a host, one all-reduce of one number elsewhere.
With one: reports through the store, and connections that are closed, so that who waits in a collective hears it at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from shardwise.black_box import EVERYBODY, Track, note
from shardwise.comm.alive import Liveness
from shardwise.comm.last_words import cited
from shardwise.comm.links.link import default_transport
from shardwise.comm.links.meet import TransportOffer, meet
from shardwise.comm.links.segment import HEADER_BYTES
from shardwise.comm.mending import break_off_all
from shardwise.comm.sync import all_have_come
from shardwise.errors import StepError, TransportError
from shardwise.transaction.first_cause import Report, first_cause

# Words of a segment: the last step that this rank has come to the end of; the one it has failed in; 1 if it failed for good.
_ARRIVED, _FAILED, _ENDED = 0, 1, 2
_YIELDS, _FIRST_SLEEP_S, _LONGEST_SLEEP_S, _LIVENESS_S = 200, 20e-6, 1e-3, 0.2
_LOOK_S = 0.1  # between two questions to the store


class Agreement:
    """The ranks of ``group``, which make the same steps; one step after another, by number.  Making one is collective.

    Attributes:
        members: global ranks.  rank: this one's.
        num_messages: collectives made so far, for agreeing alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.members = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank()
        self.num_messages = 0
        meeting = meet(group, TransportOffer(default_transport(), HEADER_BYTES, "transaction"))
        self._posts = meeting.posts
        shares = len(meeting.mates) == len(self.members)  # some of the ranks alone could not agree for all
        self._segments = meeting.segments if shares else ()
        self._words = tuple(segment.words for segment in self._segments)
        self._mine = self._posts.rank
        self._alive = {peer: Liveness(meeting.pids[peer]) for peer in self._posts.peers()} if self._words else {}
        self._track = Track(self._posts.prefix)
        self._looked = 0.0

    # ---- without a fault ----

    def arrive(self, number: int) -> None:
        """Return once all ranks have come to the end of step ``number``.

        Raises: StepError if one has failed in it, TransportError if one is gone or does not come in time; any RuntimeError
        of the backend.
        """
        self._track.note("agreement", "step")
        if not self._words:
            self.num_messages += 1
            all_have_come(self.group)
            return
        self._words[self._mine][_ARRIVED] = number
        for peer in self._posts.peers():
            if self._words[peer][_ARRIVED] < number:
                self._wait_for(peer, number)

    def _wait_for(self, peer: int, number: int) -> None:
        words = self._words[peer]
        for _ in range(_YIELDS):
            if words[_ARRIVED] >= number:
                return
            os.sched_yield()
        note(EVERYBODY, "the end of a step")
        start = time.monotonic()
        sleep_s, look_s = _FIRST_SLEEP_S, _LIVENESS_S
        while words[_ARRIVED] < number:
            self._check_words(number)
            waited_s = time.monotonic() - start
            if waited_s > look_s:
                look_s = waited_s + _LIVENESS_S
                if not self._alive[peer].is_alive() and words[_ARRIVED] < number:
                    raise TransportError(
                        f"rank {self.members[peer]} is gone; rank {self.rank} waited for it to end its step"
                    )
                if waited_s > self._posts.timeout_s:
                    raise TransportError(
                        f"rank {self.rank} waited {waited_s:.0f} s for rank {self.members[peer]} at the end of a step; every "
                        "rank must make the same transactions in the same order"
                    )
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    # ---- with one ----

    def check(self, number: int) -> None:
        """Raise StepError if a rank has failed in step ``number``, or for good; asks the store once in a while."""
        if self._words:
            self._check_words(number)
            return
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            if self._posts.store.check([self._key(number, "order")]) or self.ended() is not None:
                raise StepError(f"another rank has failed; rank {self.rank} stops its step")

    def _check_words(self, number: int) -> None:
        for peer in self._posts.peers():
            if self._words[peer][_FAILED] == number or self._words[peer][_ENDED]:
                raise StepError(f"rank {self.members[peer]} has failed; rank {self.rank} stops its step")

    def end(self, report: Report) -> None:
        """Say that no step can be undone any more, because of ``report``, and leave the others' collectives."""
        if self.ended() is None:
            self._posts.store.set(f"{self._posts.prefix}/ended", report.to_text())
        if self._words:
            self._words[self._mine][_ENDED] = 1
        self._leave_collectives()

    def ended(self) -> Report | None:
        """Return why no step can be undone any more; None if all is well."""
        text = self._posts.store.peek(f"{self._posts.prefix}/ended")
        return None if text is None else Report.from_text(text)

    def _leave_collectives(self) -> None:
        break_off_all(self.members)

    def claim(self, number: int) -> int:
        """Say that this rank has failed in step ``number``; return how many have said so by now."""
        if self._words:
            self._words[self._mine][_FAILED] = number
        self._posts.post(f"{number - 1}/committed", "")
        return self._posts.store.add(self._key(number, "order"), 1)

    def was_committed(self, number: int) -> bool:
        """Return True if some rank has gone on from step ``number``: then all had come to its end."""
        return any(
            self._posts.store.check([f"{self._posts.prefix}/{number}/committed/{r}"]) for r in self._posts.peers()
        )

    def hear(self, number: int, mine: Report) -> Report | None:
        """Report ``mine``, and return the first cause once all ranks have reported; None if the step was committed, after all.

        Closes this rank's connections, so that nobody waits for it in a collective.
        Raises: TransportError on every rank if one is gone, or does not report in time.
        """
        posts = self._posts
        posts.post(f"{number}/report", mine.to_text())
        self._leave_collectives()

        def is_enough(_: Mapping[int, str]) -> bool:
            return (mine.follows and self.was_committed(number)) or self.ended() is not None

        found = posts.collect(f"{number}/report", range(posts.size), is_enough=is_enough)
        if len(found) < posts.size:
            ended = self.ended()
            if ended is not None:
                return ended
            if mine.follows and self.was_committed(number):
                return None
            absent = [rank for rank in range(posts.size) if rank not in found]
            late = (
                f"{posts.named(absent)} did not finish its step within {posts.timeout_s:g} s of rank "
                f"{mine.rank}, which failed: {mine.kind}: {mine.text}"
            )
            raise self._named(absent, late)
        return first_cause(Report.from_text(text) for text in found.values())

    def meet_again(self, number: int, problem: str) -> None:
        """Wait until all ranks are where they were before step ``number``.

        ``problem``: what kept this rank from it.  Raises: TransportError on every rank if one has a problem or is gone.
        """
        posts = self._posts
        posts.post(f"{number}/back", problem)
        found = posts.collect(f"{number}/back", range(posts.size))
        absent = [rank for rank in range(posts.size) if rank not in found]
        if absent:
            late = f"{posts.named(absent)} did not undo its step within {posts.timeout_s:g} s"
            raise self._named(absent, late)
        wrong = {posts.members[rank]: text for rank, text in found.items() if text}
        if wrong:
            what = "; ".join(f"rank {rank}: {text}" for rank, text in wrong.items())
            raise TransportError(f"the step could not be undone on all ranks; start again from a checkpoint. {what}")

    def _named(self, absent: Sequence[int], late: str) -> TransportError:
        gone = self._posts.gone(absent)
        if not gone:
            return TransportError(self._posts.absence(absent, late))
        names = [self._posts.members[rank] for rank in gone]
        return TransportError(
            f"rank {names[0]} is gone in a transaction{cited(self._posts.notes, names)}; what the others hold of the step is "
            "not undone. Start again from a checkpoint (shardwise train --max-restarts does)"
        )

    def _key(self, number: int, what: str) -> str:
        return f"{self._posts.prefix}/{number}/{what}"

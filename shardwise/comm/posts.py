"""What the ranks of a group post for each other in the store of the job, with one deadline and a name for who does not.

No collective: a thread may post beside training, a rank that has failed can say why while others wait for it, and one that
never comes is named instead of waited for for ever.  Agreements (`board`), the bulletin of an engine (`bulletin`), roll calls
and the meetings of links are orders in which these are written and read.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from shardwise.black_box import EVERYBODY, WAITS, note, note_group
from shardwise.comm import alarm
from shardwise.comm.alive import LOOK_S, announce, is_gone, ranks_in_words
from shardwise.comm.cables import watch_cables
from shardwise.comm.groups import patience_s
from shardwise.comm.last_words import ASKING_S, cited, gone_in_words, leave, look_next, out_of_reach, words_of
from shardwise.comm.leaving import watch_end
from shardwise.comm.peer_owner import check_peers
from shardwise.comm.store import JobStore
from shardwise.comm.wait_watch import status_in_words, watch_waits
from shardwise.torch_private import default_store, process_group_store

GRACE_S = 3.0  # after a rank's own deadline: what others may take to reach theirs and report
_HEED_S = 2.0  # for a rank that is late to say why
ANSWER_S = _HEED_S + ASKING_S  # in which the rank that waits for all asks who is late for the reason
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1e-4, 2e-2  # between two questions to the store

# How often ranks have gone back to the state before a step, by the ranks that did: what they open then is numbered from one
# again, because some had opened more than others.  Per job.
_eras: weakref.WeakKeyDictionary[dist.Store, dict[frozenset[int], int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Posts:
    """One rank's view of what the ranks of one group post about one thing.

    Attributes:
        members: global ranks, as errors name them.  rank: this one's place among them; methods count places.
        timeout_s: how long a rank is waited for that does in a correct program the same at about the same time.
        notes: the store in which ranks leave the numbers of their processes; None: nobody is known to be gone.
    """

    store: JobStore
    prefix: str
    members: tuple[int, ...]
    rank: int
    timeout_s: float
    notes: dist.Store | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def peers(self) -> tuple[int, ...]:
        """Return all ranks but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def post(self, what: str, text: str) -> None:
        """Post this rank's ``what``."""
        self.store.set(f"{self.prefix}/{what}/{self.rank}", text)

    def forget(self, what: str, ranks: Iterable[int]) -> None:
        """Take back what ``ranks`` have posted about ``what``, so that long runs do not fill the store."""
        for rank in ranks:
            self.store.delete(f"{self.prefix}/{what}/{rank}")

    def collect(
        self,
        what: str,
        ranks: Sequence[int],
        limit_s: float | None = None,
        is_enough: Callable[[Mapping[int, str]], bool] | None = None,
        needs: Sequence[int] = (),
    ) -> dict[int, str]:
        """Return what ``ranks`` post about ``what``: of fewer ranks where waiting for the others is over.

        That is after ``limit_s`` seconds for all of them together (default: the timeout), as soon as the process of one that
        is missing, or of one in ``needs``, has gone, and once ``is_enough`` says so of what has come (asked of late ranks).
        Raises: TransportError if the store does not answer, or another user has connected; what :func:`alarm.look` raises.
        Cost: one or two questions per rank, then one per look.
        """
        if self.notes is not None:
            check_peers()  # before it waits, too: the rank that it waits for may have found another user, and stopped
        start = looked = time.monotonic()
        limit_s, pause_s = self.timeout_s if limit_s is None else limit_s, _LEAST_PAUSE_S
        found: dict[int, str] = {}
        missing = list(ranks)
        is_noted = False
        while True:
            while missing and (text := self._peek(what, missing[0])) is not None:
                found[missing.pop(0)] = text
            if missing and not is_noted:
                is_noted = True
                note(f"{WAITS}rank {self.members[missing[0]]}" if len(missing) == 1 else EVERYBODY, what)
            if missing:
                alarm.look()
            now = time.monotonic()
            is_over = now - start >= limit_s
            if missing and now - looked >= LOOK_S:
                looked = now
                is_over = is_over or bool(self.gone([*missing, *needs]))
            if missing and pause_s > _MOST_PAUSE_S and is_enough is not None:
                is_over = is_over or is_enough(found)
            if is_over or not missing:
                if not missing and self.notes is not None:
                    watch_cables(self.notes)  # all who are here have said where they are
                    check_peers()
                late = [(rank, self._peek(what, rank)) for rank in missing]  # posted before they went, or out of order
                return found | {rank: text for rank, text in late if text is not None}
            time.sleep(min(pause_s, max(start + limit_s - now, 0.0)))
            pause_s = pause_s if pause_s > _MOST_PAUSE_S else 1.5 * pause_s

    def named(self, ranks: Iterable[int]) -> str:
        """Return ``ranks`` in words, as the job names them."""
        return ranks_in_words([self.members[rank] for rank in ranks])

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Return which of ``ranks`` were processes of this host that have ended, as far as it can be known."""
        return [] if self.notes is None else [rank for rank in ranks if is_gone(self.notes, self.members[rank])]

    def out_of_reach(self, ranks: Iterable[int], error: str) -> list[int]:
        """Return which of ``ranks`` are on hosts that do not answer, as ``error`` or the last words of a rank say."""
        places = {self.members[rank]: rank for rank in ranks}
        return [places[name] for name in out_of_reach(self.notes, list(places), error)]

    def absence(self, ranks: Sequence[int], late: str) -> str:
        """Return what to say of ``ranks`` that have posted nothing: which are gone, if any is; else ``late``.

        Both with the last errors of these ranks: they may have followed another, or wait for it and give up a moment later.
        """
        names = [self.members[rank] for rank in ranks]
        end = time.monotonic() + (_HEED_S if self.notes is not None else 0.0)
        while not (gone := [self.members[rank] for rank in self.gone(ranks)]) and time.monotonic() < end:
            if all(words_of(self.notes, name) for name in names):
                break
            alarm.look()
            time.sleep(_MOST_PAUSE_S)
        if not gone:
            status = status_in_words(self.members)
            return late + cited(self.notes, names) + (f"; {status}" if status else "")
        waited = f"rank {self.members[self.rank]} waited for {'it' if len(gone) == 1 else 'them'}"
        return f"{gone_in_words(self.notes, gone)}; {waited}. {look_next()}"

    def _peek(self, what: str, rank: int) -> str | None:
        return self.store.peek(f"{self.prefix}/{what}/{rank}")


def open_posts(group: dist.ProcessGroup, topic: str) -> Posts:
    """Return the posts of ``group`` about the next ``topic``: the n-th call on each of its ranks opens the same."""
    members = tuple(dist.get_process_group_ranks(group))
    return number_posts(process_group_store(group), topic, members, dist.get_rank(group), patience_s(group))


def number_posts(store: dist.Store, topic: str, members: tuple[int, ...], rank: int, timeout_s: float) -> Posts:
    """Return the posts of ``members`` about the next ``topic`` in ``store``, for ranks that have no group of their own."""
    notes = default_store()
    if notes is not None:
        announce(notes, dist.get_rank())
        watch_end(notes)
        watch_waits(notes)
    job = JobStore(store, timeout_s)
    place = f"shardwise/{topic}/{hashlib.sha256(repr(members).encode()).hexdigest()[:12]}"
    era = _era_of(members)
    if era:
        place = f"{place}/era {era}"
    number = job.add(f"{place}/opened/{rank}", 1)
    note_group(f"{place}/{number}", members)
    return Posts(job, f"{place}/{number}", members, rank, timeout_s, notes)


def begin_era(members: Iterable[int]) -> None:
    """Number what groups of global ranks ``members`` open from one again; all of these ranks call it, between two steps."""
    store = default_store()
    if store is not None:
        eras, ranks = _eras.setdefault(store, {}), frozenset(members)
        eras[ranks] = eras.get(ranks, 0) + 1
        leave("")  # what has been said is undone


def _era_of(members: Iterable[int]) -> int:
    store, ranks = default_store(), frozenset(members)
    return 0 if store is None else sum(era for among, era in _eras.get(store, {}).items() if ranks <= among)

"""Agreement among the ranks of one group, and their failure reports, over the store; no collective is needed.

Ranks communicate through the key-value store of the process group.  So a rank that failed can report why while the
collectives of other ranks still wait for it, and waiting ranks can report for whom they wait.  A step without errors
runs none of this.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NoReturn

import torch.distributed as dist

from shardwise.consistency import store as alarm
from shardwise.consistency.failure_report import (
    ASKS,
    cited,
    forget_deadlock,
    gone_in_words,
    in_short,
    look_next,
    publish_failure,
    report_of,
    status_in_words,
    watch_end,
    watch_waits,
    why_failed,
)
from shardwise.consistency.process_groups import announce, check_peers, enable_keepalive, is_gone, patience_s
from shardwise.consistency.store import LOOK_S, JobStore, default_store, wait_until
from shardwise.errors import DesyncError, ShardwiseError, StateError, TransportError
from shardwise.formatting import format_ranks, ranks_by_text
from shardwise.observe import WAITS, Track, note
from shardwise.torch_private import is_gloo, store_of

# ---- What the ranks of a group post for each other in the job's store, with one deadline and the names of absent
# ranks.
# The store needs no collective: a thread can post during training, a failed rank can report why while others wait for
# it, and an absent rank is named instead of awaited forever. Agreements, the mismatch check of an engine, gathers over
# the store and the setup of links differ in the order in which they write and read.

GRACE_S = 3.0  # after a rank's own deadline: time for the others to reach theirs and report
_HEED_S = 2.0  # time for a late rank to report why
# Neighbouring ranks share a host: each checks whether that many on each side are gone, so that a poll makes few requests.
_NEAR = 8
_SOON_S = 0.05  # ranks that arrive within it are not late
IsEnough = Callable[[Mapping[int, str]], bool]  # whether the texts of some ranks make those of the others superfluous

# How often ranks have restored the state before a step, by the set of ranks: exchanges that they open later are
# numbered from one again, because some ranks had opened more than others. Per job.
_generations: weakref.WeakKeyDictionary[dist.Store, dict[frozenset[int], int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class StoreExchange:
    """One rank's view of what the ranks of one group post about one topic.

    Attributes:
        members: global ranks, as errors name them.  rank: index of this one among them; methods use indices.
        timeout_s: how long to wait for a rank, which in a correct program does the same at about the same time.
        notes: the store with the process ids of ranks; without it no rank is known to be gone.
        rounds: number of gathers about each topic.
    """

    store: JobStore
    prefix: str
    members: tuple[int, ...]
    rank: int
    timeout_s: float
    notes: dist.Store | None = None
    rounds: Counter[str] = field(default_factory=Counter[str], init=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def peers(self) -> tuple[int, ...]:
        """Return all ranks but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def post(self, what: str, text: str) -> None:
        """Post this rank's ``what``; "place#number": at a place that rounds share, with the number of this one."""
        place, _, number = what.partition("#")
        self.store.set(f"{self.prefix}/{place}/{self.rank}", f"{number} {text}" if number else text)

    def gather(self, topic: str, text: str, is_enough: IsEnough | None = None) -> dict[int, str]:
        """Return the texts of all ranks in their next round about ``topic``, the same on all ranks.

        Texts are missing, so that :meth:`absent` names their ranks, if ranks are gone or late, or if ``is_enough``
        accepted fewer.  Rounds use two places in turn, so that long runs do not fill the store: a rank that posts in a
        round has read all of the last one, so no rank that is in time still reads the one before.
        Cost: the first rank reads the texts of the others, and these read what it has found.
        """
        self.rounds[topic] += 1
        number = self.rounds[topic]
        what, everything = (f"{topic}/{number % 2}{each}#{number}" for each in ("", "/all"))
        self.post(what, text)
        if self.rank:
            return self._gathered(what, everything, is_enough)

        def with_own(found: Mapping[int, str]) -> bool:
            return is_enough is not None and is_enough({0: text, **found})

        found = {0: text, **self.collect(what, self.peers(), None, with_own)}
        self.post(everything, json.dumps(found))
        return found

    def _gathered(self, what: str, everything: str, is_enough: IsEnough | None) -> dict[int, str]:
        """Return what the first rank has found, or what there is of the others if the first rank does not come."""
        near = [rank for rank in self.peers() if abs(rank - self.rank) <= _NEAR]
        # The first rank finds out who is missing, so the others wait longer than it does.
        answer = self.collect(everything, [0], self.timeout_s + GRACE_S, is_enough, near)
        found = {} if answer else self.collect(what, range(self.size), 0.0)
        if 0 in found and (len(found) == self.size or not self.gone(near)):
            # One has ended after it posted, or the first rank is on another host, from which it does not see who is gone.
            answer = self.collect(everything, [0], GRACE_S, is_enough)
        if not answer:
            return {rank: text for rank, text in found.items() if rank or len(found) < self.size}
        return {int(rank): text for rank, text in json.loads(answer[0]).items()}

    def collect(
        self,
        what: str,
        ranks: Sequence[int],
        limit_s: float | None = None,
        is_enough: IsEnough | None = None,
        needs: Sequence[int] = (),
    ) -> dict[int, str]:
        """Return what ``ranks`` have posted under ``what``, possibly of fewer ranks once the wait is over.

        The wait ends after ``limit_s`` seconds for all ranks together (default: the timeout), when the process of a
        missing rank or of one in ``needs`` is gone, and when ``is_enough`` accepts the texts that have arrived (called
        if ranks are late).
        Raises: TransportError if the store does not answer, or another user has connected; what :func:`alarm.look`
            raises.
        Cost: one or two store requests per rank, then one per poll.
        """
        if self.notes is not None:
            check_peers()  # also before it waits: the awaited rank may have found another user and stopped
        start, limit_s = time.monotonic(), self.timeout_s if limit_s is None else limit_s
        found: dict[int, str] = {}
        missing = list(ranks)
        awaited: int | None = None

        def take() -> bool:
            nonlocal awaited
            while missing and (text := self.peek(what, missing[0])) is not None:
                found[missing.pop(0)] = text
            if missing and missing[0] != awaited:
                awaited = missing[0]
                note(f"{WAITS}rank {self.members[awaited]}", what)
            return not missing

        def is_over() -> bool:
            return take() or (is_enough is not None and time.monotonic() - start > _SOON_S and is_enough(found))

        if not take():
            wait_until(is_over, limit_s, alarm.look, lambda: self.gone([*missing, *needs]))
        if not missing and self.notes is not None:
            enable_keepalive(self.notes)  # all ranks have posted their addresses by now
            check_peers()
        late = [(rank, self.peek(what, rank)) for rank in missing]  # they may have been posted in another order
        return found | {rank: text for rank, text in late if text is not None}

    def named(self, ranks: Iterable[int]) -> str:
        """Return ``ranks`` in words, as global ranks."""
        return format_ranks([self.members[rank] for rank in ranks])

    def absent(self, found: Container[int]) -> list[int]:
        """Return the ranks that are not in ``found``."""
        return [rank for rank in range(self.size) if rank not in found]

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Return which of ``ranks`` are known to be processes that have ended."""
        return [] if self.notes is None else [rank for rank in ranks if is_gone(self.notes, self.members[rank])]

    def absence(self, ranks: Sequence[int], late: str) -> str:
        """Return a text about ``ranks`` that have posted nothing: which of them are gone, if any is, else ``late``.

        Either text cites the last errors of these ranks: they may have left because of another rank, or give up a
        moment later.
        """
        if self.rank in ranks:
            late = f"rank {self.members[self.rank]} came after the others had given up: {late}"
            ranks = [rank for rank in ranks if rank != self.rank]
        names = [self.members[rank] for rank in ranks]
        publish_failure(late + ASKS)  # other ranks may wait for the report of this one
        if self.notes is not None:
            wait_until(lambda: self.gone(ranks) or all(report_of(self.notes, n) for n in names), _HEED_S, alarm.look)
        gone = [self.members[rank] for rank in self.gone(ranks)]
        if not gone:
            status = status_in_words(self.members)
            return late + cited(self.notes, names) + (f"; {status}" if status else "")
        waited = f"rank {self.members[self.rank]} waited for {'it' if len(gone) == 1 else 'them'}"
        return f"{gone_in_words(self.notes, gone)}; {waited}. {look_next()}"

    def peek(self, what: str, rank: int) -> str | None:
        """Return what the member number ``rank`` has posted, None if there is nothing, or another round."""
        place, _, number = what.partition("#")
        text = self.store.peek(f"{self.prefix}/{place}/{rank}")
        if not number or text is None:
            return text
        of_round, _, text = text.partition(" ")
        return text if of_round == number else None


def open_exchange(group: dist.ProcessGroup, topic: str) -> StoreExchange:
    """Return the exchange of ``group`` for the next ``topic``: the n-th call on each of its ranks opens the same one."""
    members = tuple(dist.get_process_group_ranks(group))
    return open_numbered_exchange(store_of(group), topic, members, dist.get_rank(group), patience_s(group))


def open_numbered_exchange(
    store: dist.Store, topic: str, members: tuple[int, ...], rank: int, timeout_s: float
) -> StoreExchange:
    """Return the exchange of ``members`` for the next ``topic`` in ``store``, for ranks without a group of their own."""
    notes = default_store()
    if notes is not None:
        announce(notes, dist.get_rank())
        watch_end()
        watch_waits(notes)
    job = JobStore(store, timeout_s)
    generation = _generation_of(members)
    place = f"shardwise/{topic}/{hashlib.sha256(repr(members).encode()).hexdigest()[:12]}/generation {generation}"
    number = job.add(f"{place}/opened/{rank}", 1)
    return StoreExchange(job, f"{place}/{number}", members, rank, timeout_s, notes)


def begin_generation(members: Iterable[int]) -> None:
    """Restart the numbers of what groups of global ranks ``members`` open; all of them call it, between two steps."""
    store = default_store()
    if store is not None:
        generations, ranks = _generations.setdefault(store, {}), frozenset(members)
        generations[ranks] = generations.get(ranks, 0) + 1
        publish_failure("")  # earlier reports are obsolete
        forget_deadlock(store)


def _generation_of(members: Iterable[int]) -> int:
    store, ranks = default_store(), frozenset(members)
    generations = {} if store is None else _generations.get(store, {})
    return sum(generation for among, generation in generations.items() if ranks <= among)


# ---- The mismatch check of an engine: plans and facts that must be equal on all ranks, compared apart from the
# collectives that they protect.
# A collective that ranks enter with different plans hangs or, worse, mixes tensors of the same size.

_MOST_AGREED = 1024  # plans that ranks have compared, and need not compare again
_RULE = (
    "Ranks must run the same units in the same order, the same number of times, unless the root has "
    "set_allow_rank_divergence(True)."
)


class MismatchCheck:
    """The mismatch check of one engine."""

    def __init__(self, exchange: StoreExchange) -> None:
        self._exchange = exchange
        self.rank = exchange.members[exchange.rank]  # as errors name it
        self.members = exchange.members
        number = exchange.prefix.rsplit("/", 1)[-1]
        # The same on all of them.
        self.topic = f"engine {number} of ranks {min(exchange.members)} to {max(exchange.members)}"
        self._agreed: dict[str, None] = {}  # digests of plans, the newest last
        self.groups: list[dist.ProcessGroup] = []  # those that the engine uses

    def check_plan(self, calls: Sequence[str], left_order: str = "", again: bool = False) -> None:
        """Raise DesyncError on every rank unless all ranks have planned the same ``calls``.

        Plans that ranks have agreed on before are not compared ``again``.  ``left_order``: how this rank has deviated.
        """
        text = json.dumps(["collectives in a step", *calls])
        digest = _digest([text])
        if again or digest not in self._agreed:
            why = f", which has changed its order of units: {left_order}" * bool(left_order)
            within = f"within {self._exchange.timeout_s:g} s of rank {self.rank}{why}"
            self._compare("plan", text, lambda others: f"{others} did not finish a step {within}")
            self._agreed = dict.fromkeys([*[*self._agreed][1 - _MOST_AGREED :], digest])

    def check_facts(self, what: str, facts: Sequence[str]) -> None:
        """Raise DesyncError on every rank unless all ranks have the same ``facts`` about ``what``.

        Call it before the first collective whose sizes depend on them: a backend that gets other sizes than its peers
        may end the process, and equal sizes by chance silently mix tensors.
        """
        new = f"rank {self.rank} has new {what}"
        self._compare("facts", json.dumps([what, *facts]), lambda others: f"{new}, unlike {others}: {_listed(facts)}")

    def post(self, what: str, text: str) -> None:
        """Post this rank's ``what``, which others see afterwards; no rank waits."""
        self._exchange.post(what, text)
        # A TCPStore confirms no set: only the answer to a later query says that it has arrived.
        self.posted(what, self.rank)

    def posted(self, what: str, rank: int) -> str | None:
        """Return what ``rank`` has posted about ``what``, None if there is nothing; does not wait."""
        return self._exchange.peek(what, self.members.index(rank))

    def check_writes(self, place: str, values: Sequence[str]) -> None:
        """Raise DesyncError unless all ranks have posted the same ``values`` at ``place``, which all have passed."""
        exchange = self._exchange
        found = exchange.collect(f"writes/{place}", exchange.peers(), GRACE_S)
        for other in exchange.peers():
            theirs = json.loads(found[other]) if other in found else []
            unlike = sorted({*values} ^ {*theirs})
            if unlike:
                name = unlike[0].partition(" with digest")[0]
                raise DesyncError(
                    "ranks have written different values to parameters in forward (an embedding with max_norm changes the rows "
                    f"that its rank looks up): {name} is not the same on rank {self.rank} and rank {exchange.members[other]} "
                    "after it. Every rank keeps its own rows of a sharded parameter, so that all must write the same: gather "
                    f"what the values are made of first, or write on one rank and broadcast\n{_RULE}"
                )

    def union(self, topic: str, mine: Sequence[str]) -> set[str]:
        """Return the union of all ranks' ``mine``, the same on every rank; all call it at the same place of their program.

        Raises: DesyncError if a rank does not call it.
        """
        exchange = self._exchange
        found = exchange.gather(topic, json.dumps(list(mine)))
        if absent := exchange.absent(found):
            late = f"rank {self.rank} has new {topic}, unlike {exchange.named(absent)}: {_listed(mine)}"
            raise DesyncError(f"{exchange.absence(absent, late)}\n{_RULE}")
        return set[str]().union(*map(json.loads, found.values()))

    def check_deviation(self, what: str) -> None:
        """Raise DesyncError unless all ranks deviate from their plan here, in the way that ``what`` describes.

        Call it before the first unplanned collective: its sizes may differ, and a backend that gets other sizes than
        its peers may overwrite memory.
        """
        text = json.dumps(["deviations from the order of units", what])
        left = f"rank {self.rank} left the order of units, unlike"
        self._compare("deviation", text, lambda others: f"{left} {others}: {what}")

    def _compare(self, topic: str, text: str, late: Callable[[str], str]) -> None:
        """Raise DesyncError unless all ranks post the same ``text``, a JSON list: a name, then what it is made of."""
        exchange = self._exchange
        found = exchange.gather(topic, text, lambda found: len(set(found.values())) > 1)
        if len({*found.values()}) > 1:
            facts = {exchange.members[rank]: list[str](json.loads(each)) for rank, each in sorted(found.items())}
            names = {each[0] for each in facts.values()}
            what = names.pop() if len(names) == 1 else "comparisons"  # they are at different places of the program
            raise DesyncError(f"ranks have different {what}: {first_difference(facts)}\n{_RULE}")
        if absent := exchange.absent(found):
            raise DesyncError(f"{exchange.absence(absent, late(exchange.named(absent)))}\n{_RULE}")

    def explain(self, error: BaseException, position: str) -> DesyncError:
        """Return the error for a collective that failed on this rank at ``position``, with what is known of the others.

        After a backend's own error the engine's groups are unusable: their connections are closed, so that no rank
        waits there for this one while it queries the others.
        """
        if alarm.deadlock:
            return DesyncError(alarm.deadlock[0])
        why = str(error) if isinstance(error, ShardwiseError) else in_short(error)
        failed = f"rank {self.rank} failed at {position}: {why}"
        others = why_failed(failed, error, self.members, self.rank, self._exchange.notes, self.groups)
        return DesyncError("\n".join(filter(None, [failed, others, _RULE])))


def _listed(facts: Sequence[str]) -> str:
    return ", ".join(facts[:4]) + (f" and {len(facts) - 4} more" if len(facts) > 4 else "")


# ---- Gathers over the store: each rank posts a text, and all ranks read all texts. No collective: a thread can call it
# during training, and a rank that is gone is named.


class StoreGather:
    """Gathers in one order on all ranks; without an exchange this process is the only one."""

    def __init__(self, exchange: StoreExchange | None) -> None:
        self._exchange = exchange
        self.rank, self.size = (exchange.rank, exchange.size) if exchange is not None else (0, 1)
        self._track = Track(exchange.prefix if exchange is not None else "")

    def call(self, said: str) -> list[str]:
        """Return every rank's text, in rank order, once all have called.

        Raises: TransportError on every live rank if a rank is gone or is not in time.
        """
        exchange = self._exchange
        if exchange is None:
            return [said]
        self._track.note("meeting")
        found = exchange.gather("call", said)
        if absent := exchange.absent(found):
            late = (
                f"{exchange.named(absent)} did not make this call within {exchange.timeout_s:g} s; save and load are "
                "collective: call them on every rank"
            )
            raise TransportError(exchange.absence(absent, late))
        return list(found.values())


def open_store_gather(group: dist.ProcessGroup | None, topic: str) -> StoreGather:
    """Return the next gather about ``topic`` of ``group`` (None: all ranks, or this process only without a process group).

    Every rank opens those of one topic in the same order.  Raises: StateError outside ``group``.
    """
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        return StoreGather(None)
    if dist.get_rank(group) < 0:
        raise StateError("this process is not a member of the process group that saves or loads the checkpoint")
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return StoreGather(None)
    return StoreGather(open_exchange(group, topic))


DETAIL_LIMIT = 400  # characters of one rank's fact in an error


class GroupAgreement:
    """One rank's view of the agreement about one object (``topic``); all ranks must open theirs in the same order.

    ``rank`` and ``size`` are those of ``group``; ``name`` is the global rank, as errors name it.  ``has_peers`` is
    False if no other rank could answer (one rank, or torch's "fake" backend).  Keys are deleted after agreement, so
    that long runs do not fill the store.
    """

    def __init__(self, group: dist.ProcessGroup, exchange: StoreExchange, has_peers: bool) -> None:
        self.group, self.exchange, self.has_peers = group, exchange, has_peers
        self.rank, self.size, self.name = exchange.rank, exchange.size, exchange.members[exchange.rank]
        self.track, self.num_renewals = Track(exchange.prefix), 0
        # The track's count when this rank last raised an error that the program may catch.
        self.count_of_own_error = -1

    def agree(self, what: str, facts: Sequence[str] = (), error: BaseException | None = None) -> None:
        """Return once every rank has called this with the same ``what`` and ``facts``; else raise on all ranks.

        ``error`` is an exception of this rank before the call: it is re-raised here, and the other ranks get a
        DesyncError that names this rank and cites it.  Cost: about four store operations. Raises: DesyncError naming
        the ranks and the first fact that differs, or the ranks that are not in time.
        """
        try:
            if self.has_peers:
                self._compare(what, facts, error)
            if error is not None:
                raise error
        finally:
            del error  # the error references this frame: without this each would keep the other alive

    def gather(self, what: str, text: str) -> list[str]:
        """Return every rank's ``text``, in rank order and the same on all ranks, once all have called with this ``what``.

        Raises: DesyncError like :meth:`agree`, but not for texts that differ.
        """
        return self._compare(what, (), None, text) if self.has_peers else [text] * self.size

    def renew(self) -> None:
        """Restart without posts and agreements, after ranks have restored the state before a step."""
        self.num_renewals += 1
        prefix = self.exchange.prefix.partition(" renewed ")[0]
        self.exchange = replace(self.exchange, prefix=f"{prefix} renewed {self.num_renewals}")

    def report_failure(self, text: str, may_be_caught: bool = False) -> None:
        """Report to ranks that wait for this one why it will not take part; only the first report counts.

        ``may_be_caught``: the program may catch the error and continue.  If it does on all ranks, the report is
        obsolete in later calls, so this rank ignores reports of this call from now on.
        """
        if self.has_peers and self.failure() is None:
            self.exchange.store.set(f"{self.exchange.prefix}/failure", f"{self.track.count} {text}")
        if may_be_caught:
            self.count_of_own_error = self.track.count

    def failure(self) -> str | None:
        """Return the first reported failure, None if there is none; does not wait."""
        count, _, text = (self.exchange.store.peek(f"{self.exchange.prefix}/failure") or "").partition(" ")
        return text if count and int(count) > self.count_of_own_error else None

    def explain(self, what: str, error: BaseException) -> DesyncError | TransportError:
        """Return the error for a collective in ``what`` that failed on this rank (timeout, closed connection).

        A TransportError if the backend refused the call on every rank; then the group is still usable.
        """
        try:
            return self._explain(what, error)
        except TransportError as gone:
            return DesyncError(f"{what} cannot finish on rank {self.name}: {gone}")

    def _explain(self, what: str, error: BaseException) -> DesyncError | TransportError:
        if alarm.deadlock:
            return DesyncError(alarm.deadlock[0])
        failure = self.failure()
        if failure is not None:
            return DesyncError(f"{what} cannot finish on rank {self.name}: {failure}")
        if not isinstance(error, ShardwiseError) and is_gloo(self.group) and self._is_refused_by_all(what, error):
            return TransportError(f"{what}: the backend refused the call on every rank: {in_short(error)}")
        failed, members = f"{what} on rank {self.name}: {in_short(error)}", self.exchange.members
        others = why_failed(failed, error, members, self.name, self.exchange.notes, [self.group])
        failure = self.failure()  # a report that arrived meanwhile knows more than this rank
        if failure is not None:
            return DesyncError(f"{what} cannot finish on rank {self.name}: {failure}")
        text = (
            f"{what}: {others or 'the collective failed on every rank'} (timeout {self.exchange.timeout_s:g} s). Every rank "
            f"must make the same calls in the same order; first error: {in_short(error)}"
        )
        self.report_failure(f"rank {self.name} was in {text}")
        return DesyncError(text)

    def _is_refused_by_all(self, what: str, error: BaseException) -> bool:
        """Return True if ``error`` is about the arguments of the call, which then has sent nothing, on every rank."""
        if any(word in str(error).lower() for word in ("gloo/", "connection", "timed out")):
            return False
        self.exchange.rounds["refused"] += 1
        place = f"refused/{self.exchange.rounds['refused']}"
        self.exchange.post(place, what)
        found = self.exchange.collect(place, range(self.size), LOOK_S, self._has_failure)
        return not self.exchange.absent(found) and set(found.values()) == {what}

    def _names(self, ranks: Sequence[int]) -> str:
        members = self.exchange.members
        whole = self.size if members == tuple(range(self.size)) else f"the group of {format_ranks(members)}"
        return f"{self.exchange.named(ranks)} of {whole}"

    def _compare(
        self, what: str, facts: Sequence[str], error: BaseException | None, said: str | None = None
    ) -> list[str]:
        self.track.note("agreement", what)
        text = f"{type(error).__name__}: {error}" if error is not None else ""
        found = self.exchange.gather("agree", json.dumps([what, _digest(facts), text, said]), self._has_failure)
        if absent := self.exchange.absent(found):
            self._explain_absence(what, absent)
        calls, digests, errors, texts = zip(*map(json.loads, found.values()), strict=True)
        if error is None and any(errors):
            failed = [(rank, each) for rank, each in zip(self.exchange.members, errors, strict=True) if each]
            causes = "; ".join(f"rank {rank} raised {_short(text)}" for rank, text in failed)
            raise DesyncError(f"{what} stopped on rank {self.name} because {causes}")
        if error is None and len({*zip(calls, digests, strict=True)}) > 1:
            self._raise_disagreement(calls, facts)
        return [each or "" for each in texts]

    def _raise_disagreement(self, calls: Sequence[str], facts: Sequence[str]) -> NoReturn:
        members = self.exchange.members
        if len(set(calls)) > 1:
            elsewhere = self._names([rank for rank, call in enumerate(calls) if call != calls[0]])
            listing = _listing(ranks_by_text(zip(members, calls, strict=True)))
            raise DesyncError(f"{calls[0]}: {elsewhere} are in another call: {listing}")
        found = self.exchange.gather("detail", json.dumps(list(facts)), self._has_failure)
        facts_of = {members[rank]: list(map(str, json.loads(text))) for rank, text in found.items()}
        raise DesyncError(f"{calls[0]}: ranks disagree. {first_difference(facts_of)}")

    def _explain_absence(self, what: str, absent: Sequence[int]) -> NoReturn:
        failure = self.failure()
        if failure is not None:
            raise DesyncError(f"{what} cannot finish on rank {self.name}: {failure}")
        late = (
            f"{self._names(absent)} did not make this call within {self.exchange.timeout_s:g} s. Every rank must make the same "
            "calls in the same order"
        )
        text = f"{what}: {self.exchange.absence(absent, late)}"
        self.report_failure(f"rank {self.name} made a call alone: {text}")
        raise DesyncError(text)

    def _has_failure(self, _: Mapping[int, str]) -> bool:
        return self.failure() is not None


def open_agreement(group: dist.ProcessGroup | None, topic: str) -> GroupAgreement:
    """Return the agreement about the next object about ``topic`` in ``group``: the n-th call on each rank opens the same one.

    None stands for the default group.  Raises: StateError without a process group, or outside ``group``.
    """
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise StateError(f"{topic} needs torch.distributed.init_process_group() first")
    if dist.get_rank(group) < 0:
        raise StateError(f"this process is not a member of the process group given to {topic}")
    has_peers = dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"
    return GroupAgreement(group, open_exchange(group, topic), has_peers)


def first_difference(facts: dict[int, list[str]]) -> str:
    """Return the first fact in order that differs between the ranks, with the value of each rank.

    Example:
        >>> first_difference({0: ["2 tensors", "(3,)"], 1: ["2 tensors", "(4,)"]})
        'rank 0: (3,); rank 1: (4,)'
    """
    for values in zip_longest(*facts.values(), fillvalue="nothing"):
        if len(set(values)) > 1:
            return _listing(ranks_by_text(zip(facts, values, strict=True)))
    return "the facts differ but their report did not arrive from every rank"


def _digest(facts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _short(text: str) -> str:
    return text if len(text) <= DETAIL_LIMIT else text[:DETAIL_LIMIT] + " ..."


def _listing(groups: dict[str, list[int]]) -> str:
    return "; ".join(f"{format_ranks(ranks)}: {_short(value)}" for value, ranks in groups.items())

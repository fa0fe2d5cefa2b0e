"""A notice board for the ranks of one group: agreement and failure reports that need no collective.

Ranks talk through the key-value store that the process group was made with.  A rank that failed can so tell the others
why while their collectives still wait for it, and ranks that wait can say for whom.  Nothing here runs in a step
that goes well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from shardwise.black_box import Track
from shardwise.comm.alive import LOOK_S, ranks_in_words
from shardwise.comm.last_words import cited, gone_in_words, in_short, out_of_reach_in_words
from shardwise.comm.mending import break_off
from shardwise.comm.posts import ANSWER_S, GRACE_S, Posts, open_posts
from shardwise.comm.wait_watch import status_in_words
from shardwise.errors import DesyncError, ShardwiseError, StateError, TransportError
from shardwise.torch_private import is_gloo

DETAIL_LIMIT = 400  # characters of one rank's fact that an error quotes


@dataclass(slots=True)
class Board:
    """One rank's view of the board of one object (``topic``); all ranks must open their boards in the same order.

    ``rank`` and ``size`` are those of ``group``, ``name`` is the global rank, as errors name it; ``has_peers`` is False
    where nobody else could answer (one rank, or
    torch's "fake" backend).  What has been agreed on is forgotten again, so that long runs do not fill the store.
    """

    group: dist.ProcessGroup
    posts: Posts
    has_peers: bool
    rank: int = field(init=False)
    size: int = field(init=False)
    name: int = field(init=False)
    num_agreements: int = field(default=0)
    num_renewals: int = field(default=0)
    count_of_own_error: int = field(default=-1)  # of the track, when this rank last raised an error that it may catch
    track: Track = field(default_factory=lambda: Track(""))

    def __post_init__(self) -> None:
        self.rank, self.size = self.posts.rank, self.posts.size
        self.name = self.posts.members[self.rank]

    def agree(self, what: str, facts: Sequence[str] = (), error: BaseException | None = None) -> None:
        """Return once every rank has called this with the same ``what`` and ``facts``; else raise on all ranks.

        ``error`` is what went wrong on this rank before the call: it is re-raised here, and the other ranks get a
        DesyncError that names this rank and quotes it.  Cost: about four store operations.
        Raises: DesyncError naming the ranks and the first fact that differs, or the ranks that did not come in time.
        """
        try:
            if self.has_peers:
                self._compare(what, facts, error)
            if error is not None:
                raise error
        finally:
            del error  # the error refers to this frame: without this each would keep the other alive

    def gather(self, what: str, text: str) -> list[str]:
        """Return every rank's ``text``, in rank order and the same on all ranks, once all have called with this ``what``.

        Raises: DesyncError like :meth:`agree`, but not for texts that differ.
        """
        return self._compare(what, (), None, text) if self.has_peers else [text] * self.size

    def renew(self) -> None:
        """Begin again with nothing posted and no agreement made: after ranks have gone back to the state before a step."""
        self.num_renewals += 1
        self.posts = replace(
            self.posts, prefix=f"{self.posts.prefix.partition(' renewed ')[0]} renewed {self.num_renewals}"
        )
        self.num_agreements = 0

    def report_failure(self, text: str, may_be_caught: bool = False) -> None:
        """Tell ranks that wait for this one why it will not take part; the first report stays.

        ``may_be_caught``: the program may go on after this error.  If it does on all ranks, the report means nothing in
        what comes next, so this rank ignores reports of this call from now on.
        """
        if self.has_peers and self.failure() is None:
            self.posts.store.set(f"{self.posts.prefix}/failure", f"{self.track.count} {text}")
        if may_be_caught:
            self.count_of_own_error = self.track.count

    def failure(self) -> str | None:
        """Return the first reported failure, None if there is none; does not wait."""
        count, _, text = (self.posts.store.peek(f"{self.posts.prefix}/failure") or "").partition(" ")
        return text if count and int(count) > self.count_of_own_error else None

    def explain(self, what: str, error: BaseException) -> DesyncError:
        """Return the error to raise where a collective in ``what`` failed on this rank (timeout, closed connection)."""
        try:
            return self._explain(what, error)
        except TransportError as gone:
            return DesyncError(f"{what} cannot finish on rank {self.name}: {gone}")

    def _explain(self, what: str, error: BaseException) -> DesyncError:
        failure = self.failure()
        if failure is not None:
            return DesyncError(f"{what} cannot finish on rank {self.name}: {failure}")
        self.posts.post("stuck", what)
        if not isinstance(error, ShardwiseError) and is_gloo(self.group):
            with suppress(RuntimeError):  # a backend's own: nobody may wait for this rank while it asks
                break_off(self.group)
        far = self.posts.out_of_reach(self.posts.peers(), str(error))  # they will not say where they are
        found = self._collect("stuck", LOOK_S if far else GRACE_S)
        failure = self.failure()  # one that was reported meanwhile knows more than this rank
        if failure is not None:
            return DesyncError(f"{what} cannot finish on rank {self.name}: {failure}")
        absent = [rank for rank in range(self.size) if rank not in found]
        elsewhere = {rank: place for rank, place in found.items() if place != what}
        cause = "; ".join(f"rank {self.posts.members[rank]} was in {place}" for rank, place in elsewhere.items())
        lost = [rank for rank in absent if rank in far]
        if lost:
            cause = "; ".join(
                part for part in (out_of_reach_in_words([self.posts.members[rank] for rank in lost]), cause) if part
            )
        elif absent:
            others = f"{self._names(absent)} did not take part"
            cause = "; ".join(part for part in (self._lost(absent), others, cause) if part)
        status = status_in_words(self.posts.members)
        text = (
            f"{what}: {cause or 'the collective failed on every rank'} (timeout {self.posts.timeout_s:g} s). "
            f"{f'{status}. ' * bool(status)}Every rank must make the same calls in the same order; first error: "
            f"{in_short(error)}"
        )
        self.report_failure(f"rank {self.name} was in {text}")
        return DesyncError(text)

    def _lost(self, ranks: Sequence[int]) -> str:
        """Say which of ``ranks`` were processes of this host that have ended, and what they or the others said last."""
        names = [self.posts.members[rank] for rank in ranks]
        gone = [self.posts.members[rank] for rank in self.posts.gone(ranks)]
        return gone_in_words(self.posts.notes, gone) if gone else cited(self.posts.notes, names).removeprefix("; ")

    def _names(self, ranks: Sequence[int]) -> str:
        members = self.posts.members
        whole = self.size if members == tuple(range(self.size)) else f"the group of {ranks_in_words(members)}"
        return f"rank(s) {', '.join(str(members[rank]) for rank in ranks)} of {whole}"

    def _compare(
        self, what: str, facts: Sequence[str], error: BaseException | None, said: str | None = None
    ) -> list[str]:
        number = self.num_agreements
        self.num_agreements += 1
        self.track.note("agreement", what)
        place = f"agree/{number}"
        text = f"{type(error).__name__}: {error}" if error is not None else ""
        self.posts.post(place, json.dumps([what, _digest(facts), text, said]))
        if self.rank == 0:
            self._judge(place, what)
        verdict = self._collect(f"{place}/verdict", self.posts.timeout_s + GRACE_S, [0]).get(0)
        if verdict is None and self.failure() is None and self._collect(place, 0.0, [0]):
            verdict = self._collect(f"{place}/verdict", ANSWER_S, [0]).get(0)  # it asks who is late for the reason
        texts: list[str] = []
        if verdict is None:
            self._explain_absence(what, self._collect(place, 0.0))
        elif verdict.startswith("ok"):
            texts = json.loads(verdict[2:] or "[]")
        elif error is None:
            self._raise_disagreement(place, json.loads(verdict), facts, what)
        if number >= 1:
            self.posts.forget(f"agree/{number - 1}", [self.rank])
        if number >= 2 and self.rank == 0:
            self.posts.forget(f"agree/{number - 2}/verdict", [0])
        return texts

    def _judge(self, place: str, what: str) -> None:
        notes = self._collect(place, self.posts.timeout_s)
        if len(notes) < self.size:
            self._explain_absence(what, notes)
        parsed = {rank: _Note(*json.loads(text)) for rank, text in notes.items()}
        same = len({(note.what, note.digest) for note in parsed.values()}) == 1
        if same and not any(note.error for note in parsed.values()):
            said = [parsed[rank].said for rank in range(self.size)]
            self.posts.post(f"{place}/verdict", "ok" if None in said else f"ok{json.dumps(said)}")
        else:
            rows = [[rank, note.what, note.digest, note.error] for rank, note in sorted(parsed.items())]
            self.posts.post(f"{place}/verdict", json.dumps(rows))

    def _raise_disagreement(self, place: str, rows: list[list[str]], facts: Sequence[str], what: str) -> None:
        failed = [(rank, text) for rank, _, _, text in rows if text]
        if failed:
            causes = "; ".join(
                f"rank {self.posts.members[int(rank)]} raised {_short(str(text))}" for rank, text in failed
            )
            raise DesyncError(f"{what} stopped on rank {self.name} because {causes}")
        members = self.posts.members
        calls = _by_value({members[int(rank)]: str(call) for rank, call, _, _ in rows})
        if len(calls) > 1:
            elsewhere = self._names([int(rank) for rank, call, _, _ in rows if call != rows[0][1]])
            raise DesyncError(f"{rows[0][1]}: {elsewhere} are in another call: {_listing(calls)}")
        self.posts.post(f"{place}/detail", json.dumps(list(facts)))
        found = self._collect(f"{place}/detail", GRACE_S + self.posts.timeout_s)
        raise DesyncError(
            f"{what}: ranks disagree. "
            + first_difference(
                {members[rank]: [str(fact) for fact in json.loads(text)] for rank, text in found.items()}
            )
        )

    def _explain_absence(self, what: str, notes: dict[int, str]) -> None:
        failure = self.failure()
        if failure is not None:
            raise DesyncError(f"{what} cannot finish on rank {self.name}: {failure}")
        absent = [rank for rank in range(self.size) if rank not in notes] or [0]
        late = (
            f"{self._names(absent)} did not make this call within {self.posts.timeout_s:g} s. Every rank must make the same "
            "calls in the same order"
        )
        text = f"{what}: {self.posts.absence(absent, late)}"
        self.report_failure(f"rank {self.name} made a call alone: {text}")
        self.posts.post("stuck", what)
        raise DesyncError(text)

    def _collect(self, what: str, limit_s: float, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """Return what has come once a rank has reported a failure, too, or one of any rank is gone."""
        everybody = range(self.size)
        wanted = everybody if ranks is None else ranks
        return self.posts.collect(what, wanted, limit_s, lambda _: self.failure() is not None, needs=everybody)


def open_board(group: dist.ProcessGroup | None, topic: str) -> Board:
    """Return the board of the next object about ``topic`` in ``group``: the n-th call on each rank opens the same.

    None stands for the default group.  Raises: StateError without a process group, or outside of ``group``.
    """
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise StateError(f"{topic} needs torch.distributed.init_process_group() first")
    if dist.get_rank(group) < 0:
        raise StateError(f"this process is not a member of the process group given to {topic}")
    has_peers = dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"
    posts = open_posts(group, topic)
    return Board(group, posts, has_peers, track=Track(posts.prefix))


def first_difference(facts: dict[int, list[str]]) -> str:
    """Say which fact, the first in order, differs between the ranks, and what each rank has.

    Example:
        >>> first_difference({0: ["2 tensors", "(3,)"], 1: ["2 tensors", "(4,)"]})
        'rank 0: (3,); rank 1: (4,)'
    """
    for index in range(max((len(rows) for rows in facts.values()), default=0)):
        values = {rank: rows[index] if index < len(rows) else "nothing" for rank, rows in facts.items()}
        if len(set(values.values())) > 1:
            return _listing(_by_value(values))
    return "the facts differ but their report did not arrive from every rank"


@dataclass(frozen=True, slots=True)
class _Note:
    what: str
    digest: str
    error: str
    said: str | None


def _digest(facts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _short(text: str) -> str:
    return text if len(text) <= DETAIL_LIMIT else text[:DETAIL_LIMIT] + " ..."


def _by_value(values: dict[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _listing(groups: dict[str, list[int]]) -> str:
    def names(ranks: list[int]) -> str:
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

    return "; ".join(f"{names(ranks)}: {_short(value)}" for value, ranks in groups.items())

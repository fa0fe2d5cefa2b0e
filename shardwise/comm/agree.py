"""Facts that must be the same on every rank: compared through the store, beside the collectives that they protect.

A collective that ranks enter with different ideas hangs or, worse, mixes tensors of the same size.  The store is no
collective: each rank posts its fact and reads the others', so one that never posts is named instead of waited for for ever.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from shardwise.comm.alive import is_gone, read_post
from shardwise.comm.store import JobStore
from shardwise.errors import DesyncError, TransportError

_REPORT_WAIT_S = 3.0  # how long a rank that has failed waits for the reports of the others


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
    """Posts of the ranks that carry out one engine's collectives.

    Args:
        store: shared by all ranks of the job.
        ranks: global ranks of the engine's mesh.  rank: this one's.
        timeout_s: how long to wait for a post that a correct program makes at about the same time.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        self._store = JobStore(store)
        self._ranks = tuple(ranks)
        self._rank = rank
        self._timeout_s = timeout_s
        digest = hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:12]
        number = self._store.add(f"shardwise/{digest}/engines/{rank}", 1)
        self._prefix = f"shardwise/{digest}/{number}"
        self.topic = f"engine {number} of ranks {min(self._ranks)} to {max(self._ranks)}"  # the same on all of them
        self._num_plans = self._num_facts = 0
        self._num_deviations = 0
        self._agreed: set[str] = set()

    def check_plan(self, calls: Sequence[str], position: Position) -> None:
        """Raise DesyncError on every rank unless all ranks have planned the same ``calls``.

        Every rank compares with the first one of the mesh, and that one with all; plans that have been agreed on before
        are not compared again.
        """
        text = json.dumps(list(calls))
        if text in self._agreed:
            return
        self._num_plans += 1
        self._post(f"plan/{self._num_plans}", text)
        for other in self._peers():
            theirs = self._read(f"plan/{self._num_plans}", other, self._timeout_s)
            if theirs is None:
                self._fail(
                    self._gone(other)
                    or f"rank {other} has not changed its order of units, rank {self._rank} has: {position.note}",
                    position,
                )
            elif theirs != text:
                self._fail(_first_difference(calls, json.loads(theirs), self._rank, other), position)
        self._agreed.add(text)

    def check_facts(self, what: str, facts: Sequence[str], position: Position) -> None:
        """Raise DesyncError on every rank unless all ranks have the same ``facts`` about ``what``.

        To be called before the first collective whose sizes follow from them: a backend given other sizes than its peers
        may end the process, and given the same by chance mixes tensors without a word.
        """
        self._num_facts += 1
        self._post(f"facts/{self._num_facts}", json.dumps([what, *facts]))
        for other in self._peers():
            theirs = self._read(f"facts/{self._num_facts}", other, self._timeout_s)
            if theirs is None:
                self._fail(
                    self._gone(other)
                    or f"rank {self._rank} comes with new {what}, rank {other} does not: {_listed(facts)}",
                    position,
                )
            found = [str(fact) for fact in json.loads(theirs)]
            if found != [what, *facts]:
                self._fail(_first_fact([what, *facts], found, self._rank, other), position)

    def check_deviation(self, what: str, position: Position) -> None:
        """Raise DesyncError unless all ranks leave their plan here, in the way that ``what`` says.

        To be called before the first collective that is not as planned: sizes may not fit, and a backend given other sizes
        than its peers may overwrite memory.
        """
        self._num_deviations += 1
        self._post(f"deviation/{self._num_deviations}", what)
        for other in self._peers():
            theirs = self._read(f"deviation/{self._num_deviations}", other, self._timeout_s)
            if theirs is None:
                self._fail(
                    self._gone(other) or f"rank {self._rank} left the order of units, rank {other} has not: {what}",
                    position,
                )
            elif theirs != what:
                self._fail(
                    f"ranks left the order of units differently: rank {self._rank}: {what}; rank {other}: {theirs}",
                    position,
                )

    def _peers(self) -> tuple[int, ...]:
        first = self._ranks[0]
        return self._ranks[1:] if self._rank == first else (first,)

    def explain(self, error: BaseException, position: Position) -> DesyncError:
        """Return an error that says where every rank was when a collective failed on this one."""
        lines = [f"rank {self._rank} failed at {_describe(position)}: {error}"]
        try:
            self._post("failure", position.to_text())
        except TransportError as gone:
            return DesyncError(f"{lines[0]}\n{gone}")
        for other in self._ranks:
            if other == self._rank:
                continue
            text = self._read("failure", other, _REPORT_WAIT_S)
            if text is None:
                lines.append(self._gone(other) or f"rank {other} has not reported: it is still running, or gone")
            else:
                lines.append(f"rank {other} was at {_describe(Position.from_text(text))}")
        lines.append("Ranks must run the same units in the same order, the same number of times.")
        return DesyncError("\n".join(lines))

    def _fail(self, what: str, position: Position) -> NoReturn:
        with suppress(TransportError):
            self._post("failure", Position(position.num_calls, position.recent, what).to_text())
        raise DesyncError(f"{what}\nRanks must run the same units in the same order, the same number of times.")

    def _gone(self, other: int) -> str:
        return f"rank {other} is gone" if is_gone(self._store.inner, other) else ""

    def _post(self, key: str, text: str) -> None:
        self._store.set(f"{self._prefix}/{key}/{self._rank}", text)

    def _read(self, key: str, rank: int, timeout_s: float) -> str | None:
        full = f"{self._prefix}/{key}/{rank}"
        try:
            return read_post(self._store.inner, full, rank, timeout_s)
        except (TimeoutError, TransportError):  # TransportError: that rank is gone, or the store is
            return None


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
        return f"ranks are at different places: rank {rank} brings {mine[0]}, rank {other} brings {theirs[0]}"
    for index in range(1, max(len(mine), len(theirs))):
        left = mine[index] if index < len(mine) else "nothing more"
        right = theirs[index] if index < len(theirs) else "nothing more"
        if left != right:
            return f"ranks have different {mine[0]}: rank {rank} has {left}, rank {other} has {right}"
    return f"rank {rank} and rank {other} differ"


def _listed(facts: Sequence[str]) -> str:
    return ", ".join(facts[:4]) + (f" and {len(facts) - 4} more" if len(facts) > 4 else "")

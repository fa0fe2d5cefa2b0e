"""Areas whose cases are programs of their own: drawn, run several at a time on the ranks of a pool, shrunk, and replayed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from fuzz.case import decode, encode
from fuzz.shrink import smallest
from shardwise.testing.pool import WorkerPool


class OnRanks(Protocol):
    """A program, as far as it is looked into here."""

    @property
    def num_ranks(self) -> int: ...


C = TypeVar("C", bound=OnRanks)


@dataclass(frozen=True)
class Programs(Generic[C]):
    """One such area.

    Attributes:
        kind: the class of a program.  draw: returns that of a seed for a number of ranks.
        candidates: smaller programs than one.
        run_rank: runs programs on a rank; returns what it has found of each.  arguments: what it gets for some programs.
        in_words: the failure of a program, whose first line tells kinds apart, from what ranks have found; "" for none.
        preload: a module with all that ranks import.
        batch: programs per call of the pool.  limit_s: seconds of a call.  more_s: and for each program; a rank that has not
            returned then hangs.
        tries: of a failure until it is small enough.
        refused: counts programs that our API refuses.
    """

    kind: type[C]
    draw: Callable[[int, int], C]
    candidates: Callable[[C], Iterable[C]]
    run_rank: Callable[..., list[Any]]
    arguments: Callable[[list[C]], dict[str, Any]]
    in_words: Callable[[list[Any]], str]
    preload: str
    batch: int
    limit_s: float
    more_s: float
    tries: int
    refused: Counter[str] = field(default_factory=Counter)

    def to_json(self, case: C) -> str:
        """Return ``case`` as one line of JSON."""
        return json.dumps(encode(case))

    def from_json(self, text: str) -> C:
        """Return the case that :meth:`to_json` wrote."""
        return decode(self.kind, json.loads(text))

    def shrink(self, case: C, fails: Callable[[C], bool], tries: int) -> C:
        """Return a smaller program that fails, too, after at most ``tries`` runs."""
        return smallest(case, fails, self.candidates, tries)

    def pool(self, max_ranks: int) -> WorkerPool:
        return WorkerPool(max_ranks, preload=("torch", "torch.distributed.tensor", self.preload))

    def failures_of(self, pool: WorkerPool, cases: list[C]) -> list[str]:
        """Run ``cases``, of one number of ranks; return the failure of each; "" if there is none."""
        num_ranks = cases[0].num_ranks
        answers = pool.attempt(
            self.run_rank,
            num_ranks=num_ranks,
            timeout_s=self.limit_s + self.more_s * len(cases),
            group_timeout_s=60.0,
            **self.arguments(cases),
        )
        errors = [answer.error for answer in answers if answer.error]
        if not errors:
            return [self.in_words([answer.value[number] for answer in answers]) for number in range(len(cases))]
        pool.replace()
        pool.attempt(self.run_rank, num_ranks=num_ranks, **self.arguments([]))  # the start counts for no case
        if len(cases) > 1:
            return [self.failures_of(pool, [case])[0] for case in cases]
        raised = [error.strip().splitlines()[-1] for error in errors if "did not return" not in error]
        raised.sort(key=lambda line: "TransportError" in line or "RuntimeError" in line)
        return ["\n".join([f"raises {raised[0]}" if raised else "hangs", *errors])]

    def run_for(self, seconds: float, max_cases: int, seed: int, sizes: list[int]) -> bool:
        """Run programs from ``seed`` on, on each number of ranks in ``sizes``; 100 without a limit.

        The first failure of each kind is shrunk.  Returns True if any failed.
        """
        end, count, kinds = time.monotonic() + seconds, 0, Counter[str]()
        max_cases = max_cases or (not seconds) * 100
        with self.pool(max(sizes)) as pool:
            while (not seconds or time.monotonic() < end) and (not max_cases or count < max_cases):
                for size in sizes:
                    cases = [self.draw(each, size) for each in range(seed, seed + self.batch)]
                    for number, failure in enumerate(self.failures_of(pool, cases)):
                        count += 1
                        kinds[kind_of(failure)] += bool(failure)
                        if failure:
                            print(f"seed {seed + number}, {size} ranks: {failure[:400]}", flush=True)
                        if failure and kinds[kind_of(failure)] == 1:
                            self._show_smallest(pool, cases[number], kind_of(failure))
                seed += self.batch
        kinds = +kinds
        print(f"{count} cases; the next seed is {seed}; failures: {dict(kinds)}; refused: {dict(self.refused)}")
        return bool(kinds)

    def _show_smallest(self, pool: WorkerPool, case: C, kind: str) -> None:
        tries = self.tries // 10 if kind == "hangs" else self.tries
        small = self.shrink(case, lambda each: kind_of(self.failures_of(pool, [each])[0]) == kind, tries)
        print(f"{self.failures_of(pool, [small])[0][:1500]}\nreplay: {self.to_json(small)}\n", flush=True)

    def replay(self, path: Path) -> bool:
        """Run the program in a file; return True if it fails."""
        case = self.from_json(path.read_text())
        with self.pool(case.num_ranks) as pool:
            failure = self.failures_of(pool, [case])[0]
        print(failure or "equal")
        return bool(failure)


def kind_of(failure: str) -> str:
    """Return what failures of one kind have in common."""
    return "".join(each for each in failure.split("\n")[0][:90] if not each.isdigit())

"""``python -m fuzz.divergence``: draw programs whose ranks take different ways, and compare them with one process."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.case import decode, encode
from fuzz.divergence.case import Case, draw, shrink
from fuzz.divergence.program import alone, run_rank
from shardwise.testing.pool import WorkerPool

BATCH = 5  # cases per call of the pool
LIMIT_S, MORE_S = 12.0, 3.0  # of a call, and for each case; a rank that has not returned then hangs


@dataclass
class Tally:
    """Counts of a run, and its failures: signatures and cases."""

    cases: Counter[int] = field(default_factory=Counter)
    found: dict[str, list[Case]] = field(default_factory=dict)


def failure_of(pool: WorkerPool, case: Case) -> str:
    """Run ``case`` alone; return how it fails: the first line tells kinds of failures apart.  "" if it does not."""
    return failures_of(pool, [case])[0]


def failures_of(pool: WorkerPool, cases: list[Case]) -> list[str]:
    """Run ``cases``; return the failure of each, as :func:`failure_of` does."""
    expected = [alone(case) for case in cases]
    answers = pool.attempt(
        run_rank,
        num_ranks=cases[0].num_ranks,
        timeout_s=LIMIT_S + MORE_S * len(cases),
        group_timeout_s=60.0,
        cases=cases,
        expected=expected,
    )
    errors = [answer.error for answer in answers if answer.error]
    if not errors:
        every = [[answer.value[number] for answer in answers] for number in range(len(cases))]
        return [_in_words(ranks) for ranks in every]
    pool.replace()
    pool.attempt(run_rank, num_ranks=cases[0].num_ranks, cases=[], expected=[])  # the start counts for no case
    if len(cases) > 1:
        return [failure_of(pool, case) for case in cases]
    raised = [error.strip().splitlines()[-1] for error in errors if "did not return" not in error]
    raised.sort(key=lambda line: "TransportError" in line or "RuntimeError" in line)
    return ["\n".join([f"raises {raised[0]}" if raised else "hangs", *errors])]


def _in_words(ranks: list[list[str]]) -> str:
    every = [f"rank {rank}: {line}" for rank, lines in enumerate(ranks) for line in lines]
    if not every:
        return ""
    kinds = sorted({line.split(": ")[1 if "output" in line else 2].split(" of ")[0].split(".")[0] for line in every})
    return "\n".join([f"differs in {' '.join(kinds)}", *every[:12]])


def signature(failure: str) -> str:
    """Return what failures of one kind have in common."""
    line = failure.split("\n")[0][:90]
    return "".join(each for each in line if not each.isdigit())


def to_json(case: Case) -> str:
    """Return ``case`` as one line of JSON."""
    return json.dumps(encode(case))


def from_json(text: str) -> Case:
    """Return the case that :func:`to_json` wrote."""
    return decode(Case, json.loads(text))


def run(pool: WorkerPool, ranks: list[int], seed: int, seconds: float, max_cases: int) -> Tally:
    """Run cases from ``seed`` on for so long (0: no limit), or so many; shrink the first failure of each kind."""
    tally, end = Tally(), time.monotonic() + seconds
    while (not seconds or time.monotonic() < end) and (not max_cases or sum(tally.cases.values()) < max_cases):
        for num_ranks in ranks:
            cases = [draw(each, num_ranks) for each in range(seed, seed + BATCH)]
            for case, failure in zip(cases, failures_of(pool, cases), strict=True):
                tally.cases[num_ranks] += 1
                if failure:
                    _report(pool, case, failure, tally)
        seed += BATCH
    kinds = {kind: len(cases) for kind, cases in tally.found.items()}
    print(f"cases per number of ranks: {dict(tally.cases)}; the next seed is {seed}; failures: {kinds}")
    return tally


def _report(pool: WorkerPool, case: Case, failure: str, tally: Tally) -> None:
    kind = signature(failure)
    known = tally.found.setdefault(kind, [])
    known.append(case)
    print(f"seed {case.seed}, {case.num_ranks} ranks: {failure.splitlines()[0]}", flush=True)
    if len(known) > 1:
        return
    tries = 15 if kind == "hangs" else 150
    small = shrink(case, lambda each: signature(failure_of(pool, each)) == kind, tries)
    repeat = "repeat: python -m fuzz.divergence --replay FILE, with FILE:"
    print(f"{failure_of(pool, small)}\n{repeat}\n{to_json(small)}\n", flush=True)


def _pool() -> WorkerPool:
    return WorkerPool(4, preload=("torch", "torch.distributed.tensor", "fuzz.divergence.program"))


def run_for(seconds: float, max_cases: int, seed: int, max_ranks: int) -> bool:
    """Run cases on 2, and on 4 ranks unless ``max_ranks`` is less; 100 without a limit.  Returns True if any failed."""
    with _pool() as pool:
        return bool(run(pool, [2, 4] if max_ranks >= 4 else [2], seed, seconds, max_cases or (not seconds) * 100).found)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.divergence", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so many; 0: no limit")
    parser.add_argument("--cases", type=int, default=0, help="stop after so many (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--replay", type=Path, help="run the case in this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with _pool() as pool:
        if args.replay is not None:
            failure = failure_of(pool, from_json(args.replay.read_text()))
            print(failure or "equal")
            sys.exit(bool(failure))
        ranks = [int(each) for each in args.ranks.split(",")]
        tally = run(pool, ranks, args.seed, args.seconds, args.cases)
    sys.exit(bool(tally.found))


if __name__ == "__main__":
    main()

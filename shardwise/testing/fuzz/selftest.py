"""Show that the fuzzer finds what it is there for: plant a fault, or take a fix back; count the cases until it is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice

from shardwise.testing.fuzz.case import Case, Node
from shardwise.testing.fuzz.draw import draw
from shardwise.testing.fuzz.faults import FAULTS
from shardwise.testing.fuzz.runner import Runner
from shardwise.testing.fuzz.taken_back import FIXES

LIMIT_S = 8.0
# Where a fault shows, and a few areas where it may.
PLACES: dict[str, tuple[str, ...]] = {
    "gathers are stale": ("structure", "accumulation", "changes"),
    "gradients of a rank are dropped": ("structure", "optimizers"),
    "the divisor is wrong": ("structure", "optimizers"),
    "aliases are broken": ("aliases",),
    "buffers are not synced": ("doors",),
    "zero_grad forgets a gradient": ("structure", "accumulation"),
    "a rank calls one collective more": ("structure",),
    "buckets of DDP lie in the parameters' memory order": ("doors",),
    "modules that follow a parameter are told": ("structure",),
    "a unit ends when backward has left all its passes": ("checkpointing", "structure"),
    "a unit that lends a weight ends after the borrower": ("checkpointing", "structure"),
    "owned gradients are clipped by the norm of all": ("optimizers",),
    "what is done to full forms reaches the shards": ("changes", "byhand"),
    "memory that somebody holds stays where it is": ("aliases",),
}


def find(fault: str, max_cases: int, num_ranks: int, say: Callable[[str], None], seed: int = 0) -> int:
    """Return how many cases it took to find ``fault``, 0 if ``max_cases`` did not.

    Cases that fail without the fault do not count as finding it, and are passed over.
    """
    with Runner(limit_s=LIMIT_S) as sound, Runner(limit_s=LIMIT_S, fault=fault) as faulty:
        for number, case in enumerate(_cases(fault, max_cases, num_ranks, seed), start=1):
            failures = faulty.run(case).failures
            if failures and not sound.run(case).failures:
                contender, verdict = next(iter(failures.items()))
                say(f"{fault}: case {number}, {contender.name}: {verdict.kind}: {verdict.text.splitlines()[0][:160]}")
                return number
    say(f"{fault}: not found in {max_cases} cases")
    return 0


def _cases(fault: str, max_cases: int, num_ranks: int, seed: int) -> Iterator[Case]:
    areas = PLACES[fault]
    drawn = (draw(seed + number // len(areas), areas[number % len(areas)], num_ranks) for number in count())
    return islice((case for case in drawn if fault != "buffers are not synced" or _syncs_buffers(case)), max_cases)


def _syncs_buffers(case: Case) -> bool:
    # One case in seven does, of which half have buffers: without looking, most of the time would go to others.
    kinds = _kinds(case.model.root)
    return case.settings.sync_buffers and case.num_ranks > 1 and not kinds.isdisjoint(("Norm", "Tally"))


def _kinds(node: Node) -> set[str]:
    return {node.kind}.union(*(_kinds(child) for child in node.children))


def run_self_test(max_cases: int, num_ranks: int, say: Callable[[str], None], seed: int = 0) -> bool:
    """Plant one fault after another, then take back one fix after another; return True if all were found."""
    found = [find(fault, max_cases, num_ranks, say, seed) > 0 for fault in FAULTS | FIXES]
    return all(found)

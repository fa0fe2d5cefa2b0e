"""Show that the fuzzer finds what it is there for: plant a fault; count the cases until it is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from fuzz.case import Case, Node
from fuzz.draw import draw
from fuzz.runner import Runner

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
}


def find(fault: str, max_cases: int, num_ranks: int, say: Callable[[str], None], seed: int = 0) -> int:
    """Return how many cases it took to find ``fault``, 0 if ``max_cases`` did not.

    Cases that fail without the fault do not count as finding it, nor those that fail once, as on a machine that is busy.
    """
    with Runner(limit_s=LIMIT_S) as sound, Runner(limit_s=LIMIT_S, fault=fault) as faulty:
        for number, case in enumerate(_cases(fault, max_cases, num_ranks, seed), start=1):
            failures = faulty.run(case).failures
            if failures and not sound.run(case).failures and faulty.run(case).failures:
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


def run_self_test(names: Sequence[str], max_cases: int, say: Callable[[str], None], seed: int = 0) -> dict[str, int]:
    """Plant the faults that are called ``names`` on two ranks, one after another; return :func:`find` of each."""
    return {name: find(name, max_cases, 2, say, seed) for name in names}

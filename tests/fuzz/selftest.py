"""Show that the fuzzer finds what it is there for: plant a fault, or take a fix back; count the cases until it is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

from fuzz.case import Case, Node
from fuzz.draw import draw
from fuzz.faults import FAULTS
from fuzz.runner import Runner

LIMIT_S = 8.0
BEGIN, END = "<!-- found -->", "<!-- end of found -->"
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
    "a unit ends when backward has left all its modules": ("checkpointing", "structure"),
    "a unit that lends a weight ends after the borrower": ("checkpointing", "structure"),
    "owned gradients are clipped by the norm of all": ("optimizers",),
    "nothing gathered is read after its shards have changed": ("byhand", "changes", "accumulation"),
    "partial sums of deferred backwards count": ("meshes",),
    "names of parameters are no entry of param groups": ("resume",),
    "what has no elements is not sent": ("structure", "doors"),
    "gradients that nobody has averaged are refused": ("doors",),
    "optimizers with state per block see whole blocks": ("optimizers",),
    "hooks on streams need no accelerator": ("accumulation", "byhand"),
    "hooks are not traced where blocks are compiled": ("compiled",),
    "shards that one seed has drawn are refused": ("meta",),
    "what has no values is refused": ("meta",),
    "what is on meta shares no memory": ("meta",),
    "graphs within transforms count": ("losses",),
    "weights that hooks hold stay": ("losses",),
    "torch's replicate leaves units alone": ("around",),
    "attributes follow": ("groups",),
    "buffers that differ are not saved": ("saves",),
    "ranks begin alike": ("beside",),
    "options reach the step beside another group": ("groups",),
    "gradients of joined ranks lie as parameters do": ("joins",),
    "copies ignore what the model ignores": ("copies",),
    "a recomputed unit ends with its checkpoint": ("sizes",),
}
NEEDS_FOUR = ("partial sums of deferred backwards count",)  # ranks: replicas of shards


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
    """Plant the faults, and take back the fixes, that are called ``names``, one after another; return :func:`find` of each.

    Two ranks are enough for all but :data:`NEEDS_FOUR`.
    """
    return {name: find(name, max_cases, 4 if name in NEEDS_FOUR else 2, say, seed) for name in names}


def table_of(found: Mapping[str, int], max_cases: int, seed: int) -> str:
    """Return the cases it took to find each fault as a table of Markdown."""
    kinds = {name: "fault" if name in FAULTS else "fix taken back" for name in found}
    lines = [
        f"Written by `python -m fuzz --self-test --seed {seed} --table FILE`: {max_cases} cases at most.",
        "",
        "| planted, or what holds no more | kind | ranks | areas | cases until found |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, number in found.items():
        ranks = 4 if name in NEEDS_FOUR else 2
        lines.append(f"| {name} | {kinds[name]} | {ranks} | {', '.join(PLACES[name])} | {number or 'not found'} |")
    return "\n".join(lines)


def put_table(path: Path, table: str) -> None:
    """Replace what lies between the marks in the page at ``path``.  Raises: ValueError if it has none."""
    head, mark, rest = path.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r}, between which the table goes")
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")

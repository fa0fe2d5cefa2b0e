"""Many cases after one another: draw, run, judge, shrink what fails, count everything."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.case import Case, Contender, Node, to_json
from fuzz.draw import draw
from fuzz.judge import Verdict
from fuzz.render import render
from fuzz.runner import Outcome, Runner
from fuzz.shrink import only, shrink

ALIKE = 3  # failures that look alike before they are shrunk; further ones are only counted
STRIDE = 1_000_000  # seeds of cases between those of two campaigns


@dataclass(frozen=True, slots=True)
class Found:
    """A failure, shrunk.

    Attributes:
        signature: what tells it from others.  seed: of the case that showed it first.
        is_steady: it fails in fresh processes too.
    """

    signature: str
    case: Case
    seed: int
    contender: Contender
    verdict: Verdict
    is_steady: bool
    path: str = ""


@dataclass(slots=True)
class Tally:
    """Counts of a campaign.

    Attributes:
        cases: per area.  kinds: verdicts per area and kind.  refusals: texts of named errors.  torch: how torch's own
            classes differed from one process.
    """

    cases: Counter[str] = field(default_factory=Counter[str])
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    refusals: Counter[str] = field(default_factory=Counter[str])
    as_torch: Counter[str] = field(default_factory=Counter[str])
    torch: Counter[str] = field(default_factory=Counter[str])
    found: dict[str, Found] = field(default_factory=dict[str, Found])
    repeats: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0

    @property
    def num_cases(self) -> int:
        """All cases so far."""
        return sum(self.cases.values())

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count a case."""
        self.cases[case.area] += 1
        for verdict in outcome.verdicts.values():
            self.kinds[case.area, verdict.kind] += 1
            if verdict.kind == "refused":
                self.refusals[gist(verdict.text)] += 1
            if verdict.kind == "as torch":
                self.as_torch[gist(verdict.text)] += 1
        for contender, verdict in outcome.torch_differs.items():
            self.torch[f"{contender.name}: {verdict.kind}"] += 1


def gist(text: str) -> str:
    """Return the beginning of a message without its numbers and names, so that alike ones are counted together."""
    words = []
    for word in text.split()[:24]:
        words.append("#" if any(letter.isdigit() for letter in word) else word)
    return " ".join(words)[:160]


def kinds_in(node: Node) -> set[str]:
    """Return the kinds, forms and ways of recomputation in a tree."""
    found = {node.kind if node.kind != "Oddments" else f"Oddments {node.form}"}
    if node.kind in ("Boxed", "Touched", "Hooked"):
        found = {f"{node.kind} {node.form}"}
    found |= {segment.recompute for segment in node.segments if segment.recompute}
    if any(len(set(s.children)) < len(s.children) for s in node.segments):
        found.add("twice")
    for child in node.children:
        found |= kinds_in(child)
    return found


def uses(case: Case, names: Sequence[str]) -> bool:
    """True if ``case`` has one of ``names``: kinds of modules, parts, forms, actions, changes or settings."""
    words: set[str] = set()
    for kind in kinds_in(case.model.root):
        words |= {kind, *kind.split()}
    for action in case.actions:
        fields = [getattr(action, name) for name in ("how", "what", "method") if hasattr(action, name)]
        words |= {type(action).__name__, *(str(each) for each in fields)}
    words |= {case.settings.mesh, case.settings.optim.name, case.settings.compute, "columns" * case.settings.columns}
    return bool(words & set(names))


def signature_of(case: Case, contender: Contender, verdict: Verdict) -> str:
    """Return what tells failures apart: kind, API, what the smallest case needs."""
    actions = sorted({repr(action) for action in case.actions if type(action).__name__ not in ("Forward", "Backward")})
    kinds = sorted(kinds_in(case.model.root) - {"Mlp", "Stack"})
    text = gist(verdict.text) if verdict.kind != "numbers" else verdict.what
    return " | ".join([verdict.kind, contender.api, text, " ".join(kinds), " ".join(actions)])


class Campaign:
    """Runs cases until time or number is up.

    Args:
        folder: where scripts of failures go.  say: takes lines about progress.  avoid: names that cases may not use.
    """

    def __init__(
        self, runner: Runner, folder: Path | None, say: Callable[[str], None], avoid: Sequence[str] = ()
    ) -> None:
        self._runner = runner
        self._folder = folder
        self._say = say
        self._avoid = tuple(avoid)
        self._alike: Counter[str] = Counter()
        self.tally = Tally()

    def run(self, areas: Sequence[str], seed: int, max_ranks: int, minutes: float, max_cases: int = 0) -> Tally:
        """Carry out cases of ``areas`` in turn; ``max_cases`` of 0: only time ends it."""
        start = time.monotonic()
        number = 0
        while (not max_cases or self.tally.num_cases < max_cases) and (
            not minutes or time.monotonic() - start < 60 * minutes
        ):
            case = draw(seed * STRIDE + number // len(areas), areas[number % len(areas)], max_ranks)
            number += 1
            if self._avoid and uses(case, self._avoid):
                continue
            self.take(case)
        self.tally.seconds = time.monotonic() - start
        return self.tally

    def take(self, case: Case) -> Outcome:
        """Carry out one case and look into what fails."""
        outcome = self._runner.run(case)
        self.tally.add(case, outcome)
        for contender, verdict in outcome.failures.items():
            alike = f"{verdict.kind} {contender.api} {verdict.what} {gist(verdict.text)[:40]} {case.area}"
            self._alike[alike] += 1
            if self._alike[alike] > ALIKE:
                self.tally.repeats[alike] += 1
                continue
            self._look_into(case, contender, verdict)
        return outcome

    def _look_into(self, case: Case, contender: Contender, verdict: Verdict) -> None:
        self._say(
            f"{self.tally.num_cases} cases; looking into {case.area} seed {case.seed}: {contender.name}: {verdict.kind}"
        )
        alone = only(case, contender)
        steady = self._runner.confirm(render(alone), contender)
        if not steady.is_failure:
            self._keep(
                Found(f"not steady: {verdict.kind} {gist(verdict.text)}", case, case.seed, contender, verdict, False)
            )
            return
        last = steady

        def fails(candidate: Case) -> bool:
            nonlocal last
            try:
                found = self._runner.run(candidate).verdicts[contender]
            except Exception:  # a candidate that cannot even be built
                return False
            same = found.kind == steady.kind and (found.kind == "numbers" or found.what == steady.what)
            if same:
                last = found
            return same

        small = alone
        for self._runner.is_careful in (False, True):
            small = shrink(alone, fails, 40 if steady.kind == "gone" or self._runner.is_careful else 250)
            if self._runner.confirm(render(small), contender).is_failure:
                break
        self._runner.is_careful = False
        self._keep(Found(signature_of(small, contender, last), small, case.seed, contender, last, True))

    def _keep(self, found: Found) -> None:
        if found.signature in self.tally.found:
            self.tally.repeats[found.signature] += 1
            return
        self.tally.found[found.signature] = found
        self._say(f"FOUND {found.case.area} seed {found.seed}: {found.signature}")
        self._say(f"      {found.contender.name}: {found.verdict.kind}: {found.verdict.text[:400]}")
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"{found.case.area}_{found.seed}_{found.contender.api}_{found.verdict.kind.replace(' ', '_')}"
            path = self._folder / f"{name}.py"
            path.write_text(script_of(found))
            self._say(f"      {path}")


def script_of(found: Found) -> str:
    """Return the failure as a script of its own."""
    steady = "" if found.is_steady else "\nIt did not fail again in fresh processes."
    about = (
        f"{found.contender.name} against one process: {found.verdict.kind}.\n\n"
        f"Found in area {found.case.area!r} with seed {found.seed}, then shrunk.{steady}\n\n"
        f"{found.verdict.text.strip()}\n\nAs a case, for --replay:\n{to_json(found.case)}\n"
    )
    return render(found.case, inline=True, about=about.replace("\\", "/").replace('"""', "'''"))

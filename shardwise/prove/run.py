"""Run a script as it is, as the plain thing and once more moved by rounding, and say whether it is right."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwise.errors import ConfigError
from shardwise.loop.launch import ProgramOutcome, UserProgram, describe, noted_signals, run_program
from shardwise.one_host import PREFIX
from shardwise.prove.compare import Finding, Recording, Rounding, compare, compare_initial, compare_ranks, notes_of
from shardwise.prove.record import Terms

RIGHT, DIFFERS, CANNOT = 0, 1, 2
LIMIT, LIMIT_S = 8.0, 600.0
_END_S = 20.0  # what ranks that have made their steps may take to end
_MOST_COPIED, _MOST_FILES = 1 << 20, 20_000  # bytes of a file, files of a folder
_MOST_SHOWN = 3
_MOST_LOGGED = 25  # lines of a run's output
ROLES = {"tested": "as it is", "plain": "as the plain thing", "moved": "as the plain thing, moved by rounding"}


@dataclass(frozen=True)
class ProveOptions:
    """What is asked of a proof.

    Attributes:
        steps: of each optimizer.  limit: how many times what rounding does is a fault.  only: a pattern of names.
        keep: the folder that keeps the recordings.  init: compare initial values, too.  exact: to the bit.
        strict: notes about the script are faults.  limit_s: of each run.
    """

    steps: int = 3
    limit: float = LIMIT
    only: str | None = None
    keep: Path | None = None
    init: bool = False
    exact: bool = False
    strict: bool = False
    limit_s: float = LIMIT_S


@dataclass
class Verdict:
    """Whether a script is right.

    Attributes:
        code: 0: right, 1: it differs, 2: it cannot be proven.  reason: why it cannot.
        findings: faults, in the order of the step.  notes: what a script may mean.
        times: what tensors differ by until the first fault, in multiples of rounding, by stage and name; inf: a fault.
        units: of the plain run.
    """

    code: int = RIGHT
    reason: str = ""
    findings: list[Finding] = field(default_factory=list[Finding])
    notes: list[Finding] = field(default_factory=list[Finding])
    times: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    units: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def lines(self) -> list[str]:
        """Return the verdict in words."""
        if self.reason:
            return [f"cannot be proven: {self.reason}"]
        found: list[str] = []
        for kind in sorted({each.kind for each in self.findings}, key=["ranks", "wrapper", "script"].index):
            faults = [each for each in self.findings if each.kind == kind]
            if kind == "wrapper":
                found += [str(faults[0]), *(f"  {each}" for each in self._around(faults))]
            else:
                heading = "between ranks, in the plain run: " if kind == "ranks" else "in both runs: "
                found += [f"{heading}{faults[0]}", *(f"  {each}" for each in faults[1:_MOST_SHOWN])]
        found += [f"note: {each}" for each in self.notes]
        return found if self.findings else [*found, f"right: {self._equal()}"]

    def _equal(self) -> str:
        names = {
            "output": "outputs",
            "step gradient": "gradients",
            "parameter": "parameters",
            "state": "optimizer states",
        }
        parts: list[str] = []
        for stage, what in names.items():
            times = self.times.get(stage, {})
            good = [each for each in times.values() if math.isfinite(each)]
            if times:
                most = f" within {max(good):.1f}x rounding" if good and max(good) else ""
                parts.append(f"{len(good)} of {len(times)} {what} equal{most}")
        return "; ".join(parts)

    def _around(self, faults: Sequence[Finding]) -> list[str]:
        wrong = list(dict.fromkeys(each.name for each in faults if each.name))
        found = [self._equal()]
        if len(wrong) > 1:
            found[0] += f"; first wrong: {', then '.join(wrong[:_MOST_SHOWN])}"
        for unit in self.units:
            if faults[0].name in unit["names"] and unit["axes"]:
                axes = "".join(f'"{each}", ' for each in unit["axes"]).rstrip()
                sizes = " x ".join(map(str, unit["sizes"]))
                found.append(f"{faults[0].name} is of unit {unit['unit']} on mesh ({axes}), of {sizes} rank(s)")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for JSON."""
        return {
            "code": self.code,
            "reason": self.reason,
            "findings": [each.as_dict() for each in self.findings],
            "notes": [each.as_dict() for each in self.notes],
            "equal": {
                stage: [sum(map(math.isfinite, found.values())), len(found)] for stage, found in self.times.items()
            },
        }


def compare_folders(tested: Path, reference: Path, options: ProveOptions) -> Verdict:
    """Compare two recordings that were made by hand."""
    runs: list[Recording] = []
    for folder in (tested, reference):
        runs.append(Recording.read(folder))
        if not runs[-1].ranks:
            raise ConfigError(f"{folder}: no recording: it has no rank-0.jsonl, which shardwise.recorded(...) writes")
    return judge(runs[0], Rounding(runs[1], None, options.limit), options)


def judge(tested: Recording, rounding: Rounding, options: ProveOptions) -> Verdict:
    """Return the verdict on two recordings."""
    plain, verdict = rounding.reference, Verdict()
    if not tested.steps or not plain.steps:
        verdict.code, verdict.reason = CANNOT, "no optimizer made a step"
        return verdict
    names = [{name for row in run.rows.values() for name in row.of("parameter")} for run in (tested, plain)]
    if not names[0] & names[1]:
        verdict.code, verdict.reason = CANNOT, "no parameter has the same name in both runs"
        return verdict
    differences, verdict.times = compare(tested, rounding, options.only, options.exact)
    if differences and differences[0].step == 1 and ("input of" in differences[0].what):
        verdict.code = CANNOT
        verdict.reason = (
            f"{differences[0]}. The data differ between the two runs: they are random without a seed, or the loader depends on "
            "time. Seed it, and prove again"
        )
        return verdict
    if not verdict.times:
        verdict.code, verdict.reason = CANNOT, f"nothing is called {options.only}"
        return verdict
    verdict.findings = [*differences, *compare_ranks(plain)]
    told: set[tuple[str, str]] = set()
    for note, is_refused in notes_of(plain):
        kind = note.what, note.text.partition("by")[0]
        if kind not in told:  # steps do the same
            told.add(kind)
            (verdict.findings if is_refused and options.strict else verdict.notes).append(note)
    verdict.units = next(
        (facts["units"] for row in plain.steps for facts in row.facts.values() if "units" in facts), []
    )
    if verdict.findings:
        verdict.code = DIFFERS
    return verdict


def prove(kind: str, words: Sequence[str], nproc: int, options: ProveOptions, quiet: bool = False) -> Verdict:
    """Run a script three times on ``nproc`` ranks, and return the verdict.

    Args:
        kind: "script" or "module".  words: its name and arguments.
        quiet: do not show what the first run prints.
    """
    with noted_signals() as received, TemporaryDirectory(prefix=PREFIX) as scratch:
        kept = Path(scratch) if options.keep is None else options.keep
        folders = {role: (kept / role).absolute() for role in ROLES}
        files = {role: Path(scratch, f"files-{role}") for role in ROLES if role != "tested"}
        for each in files.values():
            copy_files(Path.cwd(), each)  # before the first run writes checkpoints that the others would find
        for number, (role, folder) in enumerate(folders.items()):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            terms = Terms(str(folder), options.steps, options.exact, keeps_initial=not number)
            if number:
                terms = replace(terms, place=str(files[role]), initial=str(folders["tested"]), moves=role == "moved")
            log = Path(scratch, f"{role}.log") if quiet or number else None
            run = _Run(folder, nproc, options.limit_s, received)
            reason = run.start(terms, (kind, *words), Path(scratch), log)
            if reason:
                return _partial(folder, f"{reason} {ROLES[role]}", log)
        runs = {role: Recording.read(folder) for role, folder in folders.items()}
        verdict = judge(runs["tested"], Rounding(runs["plain"], runs["moved"], options.limit), options)
        if options.init and verdict.code != CANNOT:
            verdict.findings[:0] = compare_initial(runs["tested"], runs["plain"], options.limit)
            verdict.code = DIFFERS if verdict.findings else RIGHT
        return verdict


@dataclass
class _Run:
    """One run of the script: it ends with the script, when all ranks have made their steps, or at a limit."""

    folder: Path
    nproc: int
    limit_s: float
    received: list[int]
    ends_s: float = math.inf
    is_late: bool = False

    def start(self, terms: Terms, words: Sequence[str], scratch: Path, log: Path | None) -> str:
        """Run it; return why there is no recording of all steps, or an empty text."""
        begin_s = time.monotonic()

        def look() -> None:
            if self._is_done():
                self.ends_s = min(self.ends_s, time.monotonic() + _END_S)
            self.is_late = self.is_late or time.monotonic() > begin_s + self.limit_s
            if (self.is_late or time.monotonic() > self.ends_s) and len(self.received) < 2:
                self.received += [signal.SIGTERM] * 2

        with ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("wb")).fileno()
            packed = ("shardwise.prove.bootstrap", json.dumps(asdict(terms)), *words)
            program = UserProgram("module", packed, output, look)
            outcome = run_program(program, self.nproc, self.received, scratch, len([*scratch.glob("failed-*")]))
        if self.is_late or self.ends_s < math.inf:
            self.received.clear()
        return self._why(outcome)

    def _is_done(self) -> bool:
        return len([*self.folder.glob("done-*")]) >= self.nproc

    def _why(self, outcome: ProgramOutcome) -> str:
        if self._is_done():
            is_recorded = len([*self.folder.glob("rank-*.jsonl")]) == self.nproc
            return "" if is_recorded else "no model was called on every rank by the script"
        for path in sorted(self.folder.glob("unprovable-*")):
            return f"{path.read_text()}: run"
        if self.is_late:
            return f"the script has not made its steps within {self.limit_s:g} s (it hangs, or --limit-s is too short)"
        if self.received:
            return "the script was interrupted"
        return "the script fails" + (f" ({describe(outcome.failure)})" if outcome.failure is not None else "")


def _partial(folder: Path, reason: str, log: Path | None) -> Verdict:
    """Return the verdict on a run that has not ended: ranks may have made other steps."""
    run = Recording.read(folder)
    # A rank that fails makes fewer steps than others.
    found = [each for each in compare_ranks(run) if run.steps and each.what != "the number of steps"]
    if found:
        return Verdict(DIFFERS, findings=found, notes=[Finding("ranks", 0, "the run", reason)])
    if log is not None and log.exists():
        reason += "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-_MOST_LOGGED:])
    return Verdict(CANNOT, reason)


def copy_files(source: Path, target: Path) -> None:
    """Make ``target`` look like ``source`` for a run that writes files: copy small ones, link others and hidden folders."""
    num_files = 0
    for at, folders, names in os.walk(source):
        place = target / Path(at).relative_to(source)
        place.mkdir(parents=True)
        num_files += len(names)
        for name in [each for each in folders if each.startswith(".") or num_files > _MOST_FILES]:
            (place / name).symlink_to(Path(at, name))
            folders.remove(name)
        for path in (Path(at, name) for name in names):
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= _MOST_COPIED:
                shutil.copy2(path, place / path.name)
            else:
                (place / path.name).symlink_to(path)

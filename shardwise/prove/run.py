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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwise.errors import ConfigError
from shardwise.loop.launch import LaunchContext, UserProgram, describe, noted_signals, run_program
from shardwise.one_host import PREFIX
from shardwise.prove.compare import (
    CANNOT,
    DIFFERS,
    RIGHT,
    Comparison,
    Finding,
    ProveOptions,
    Recording,
    compare_ranks,
    notes_of,
)
from shardwise.prove.record import Terms

_END_S = 20.0  # what ranks that have made their steps may take to end
_MOST_COPIED, _MOST_FILES = 1 << 20, 2_000  # bytes of a file, entries of a folder
_MOST_SHOWN = 3
_MOST_LOGGED = 25  # lines of a run's output
_ROLES = {"tested": "as it is", "plain": "as the plain thing", "moved": "as the plain thing, moved by rounding"}
_HEADINGS = {"ranks": "between ranks, in the plain run: ", "wrapper": "", "script": "in both runs: "}
_SHOWN = {"output": "outputs", "step gradient": "gradients", "parameter": "parameters", "state": "optimizer states"}


@dataclass
class Verdict:
    """Whether a script is right.

    Attributes:
        code: 0: right, 1: it differs, 2: it cannot be proven.  reason: why it cannot.
        findings: faults, in the order of the step.  notes: what a script may mean.
        times: what tensors differ by until the first fault, in multiples of rounding, by stage and name; inf: a fault.
        plain: the recording of the plain run.
    """

    code: int = RIGHT
    reason: str = ""
    findings: list[Finding] = field(default_factory=list[Finding])
    notes: list[Finding] = field(default_factory=list[Finding])
    times: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    plain: Recording = field(default_factory=Recording)

    def lines(self) -> list[str]:
        """Return the verdict in words."""
        if self.reason:
            return [f"cannot be proven: {self.reason}"]
        good = {stage: [*filter(math.isfinite, self.times[stage].values())] for stage in _SHOWN if stage in self.times}
        equal = "; ".join(
            f"{len(found)} of {len(self.times[stage])} {_SHOWN[stage]} equal"
            + (f" within {max(found):.1f}x rounding" if any(found) else "")
            for stage, found in good.items()
        )
        lines: list[str] = []
        for kind, heading in _HEADINGS.items():
            faults = [each for each in self.findings if each.kind == kind]
            lines += [f"{heading}{each}" for each in faults[:1]]
            if kind != "wrapper":
                lines += [f"  {each}" for each in faults[1:_MOST_SHOWN]]
            elif faults:
                wrong = [*dict.fromkeys(each.name for each in faults if each.name)][:_MOST_SHOWN]
                lines.append(f"  {equal}" + f"; first wrong: {', then '.join(wrong)}" * (len(wrong) > 1))
                unit = self.plain.unit(faults[0].name)
                if unit["axes"]:
                    where = f"{unit['unit']} on mesh {tuple(unit['axes'])}, of {' x '.join(map(str, unit['sizes']))} rank(s)"
                    lines.append(f"  {faults[0].name} is of unit {where}")
        lines += [f"note: {each}" for each in self.notes]
        return lines if self.findings else [*lines, f"right: {equal}"]

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for JSON."""
        equal = {stage: [sum(map(math.isfinite, each.values())), len(each)] for stage, each in self.times.items()}
        found = {name: [asdict(each) for each in getattr(self, name)] for name in ("findings", "notes")}
        return {"code": self.code, "reason": self.reason, **found, "equal": equal}


def compare_folders(tested: Path, reference: Path, options: ProveOptions) -> Verdict:
    """Compare two recordings that were made by hand."""
    runs = [Recording.read(folder) for folder in (tested, reference)]
    for folder, run in zip((tested, reference), runs, strict=True):
        if not run.ranks:
            raise ConfigError(f"{folder}: no recording: it has no rank-0.jsonl, which shardwise.recorded(...) writes")
    return judge(Comparison(runs[0], runs[1], None, options))


def judge(both: Comparison) -> Verdict:
    """Return the verdict on two recordings."""
    runs, differences = (both.tested, both.plain), both.findings()
    names = [{name for place in run.rows for name in run.of(place, "parameter")} for run in runs]
    first = next((each for each in differences if each.step), None)
    other_data = (
        f"{first}. The data differ between the two runs: they are random without a seed, or the loader depends on time. "
        "Seed it, and prove again"
    )
    reasons = {
        "two versions of shardwise recorded them": runs[0].facts.get("signs") != runs[1].facts.get("signs"),
        "no optimizer made a step": not all(run.steps for run in runs),
        "no parameter has the same name in both runs": not names[0] & names[1],
        other_data: first is not None and first.step == 1 and "input of" in first.what,
        f"nothing is called {both.options.only}": not both.times,
    }
    for reason, is_found in reasons.items():
        if is_found:
            return Verdict(CANNOT, reason)
    verdict = Verdict(RIGHT, "", [*differences, *compare_ranks(both.plain)], [], both.times, both.plain)
    told: set[tuple[str, str]] = set()
    for note, is_refused in notes_of(both.plain):
        kind = note.what, note.text.partition("by")[0]
        if kind not in told:  # steps do the same
            told.add(kind)
            (verdict.findings if is_refused and both.options.strict else verdict.notes).append(note)
    verdict.code = DIFFERS if verdict.findings else RIGHT
    return verdict


def prove(words: Sequence[str], nproc: int, options: ProveOptions, quiet: bool = False) -> Verdict:
    """Run a script three times on ``nproc`` ranks, and return the verdict.

    Args:
        words: the script and its arguments.  quiet: do not show what the first run prints.
    """
    runs: list[Recording] = []
    with noted_signals() as received, TemporaryDirectory(prefix=PREFIX) as scratch:
        files = {role: Path(scratch, f"files-{role}") for role in _ROLES if role != "tested"}
        for each in files.values():
            copy_files(Path.cwd(), each)  # before the first run writes checkpoints that the others would find
        for role in _ROLES:
            folder = (options.keep or Path(scratch)).absolute() / role
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            terms = Terms(str(folder), role, options.steps, options.exact, str(files.get(role, "")))
            log = Path(scratch, f"{role}.log") if quiet or role != "tested" else None
            reason = _run(terms, words, nproc, options.limit_s, received, log)
            runs.append(Recording.read(folder))
            if reason:
                return _partial(runs[-1], f"{reason} {_ROLES[role]}", log)
    tested, plain, moved = runs
    return judge(Comparison(tested, plain, moved, options))


def _run(terms: Terms, words: Sequence[str], nproc: int, limit_s: float, received: list[int], log: Path | None) -> str:
    """Run the script until it ends, all ranks have made their steps, or a limit; return why its recording is not whole."""
    folder, end_s = Path(terms.folder), time.monotonic() + limit_s
    is_ended = False

    def names(what: str) -> list[Path]:
        return sorted(folder.glob(f"{what}-*"))

    def look() -> None:
        nonlocal end_s, is_ended
        if len(names("done")) == nproc:
            end_s = min(end_s, time.monotonic() + _END_S)
        if time.monotonic() > end_s and not is_ended:
            is_ended = True
            received.extend([signal.SIGTERM] * 2)

    with ExitStack() as stack:
        place = LaunchContext(output=log and stack.enter_context(log.open("wb")).fileno(), each_poll=look)
        program = UserProgram("module", ("shardwise.prove.bootstrap", json.dumps(asdict(terms)), *words), place)
        outcome = run_program(program, nproc, received, folder)
    was_stopped = bool(received) and not is_ended
    received.clear()
    if len(names("done")) == nproc:
        return "" if len(names("rank")) == nproc else "no model was called on every rank by the script"
    for path in names("unprovable"):
        return f"{path.read_text()}: run"
    if is_ended:
        return f"the script has not made its steps within {limit_s:g} s (it hangs, or --limit-s is too short)"
    if was_stopped:
        return "the script was interrupted"
    return "the script fails" + (f" ({describe(outcome.failure)})" if outcome.failure is not None else "")


def _partial(run: Recording, reason: str, log: Path | None) -> Verdict:
    """Return the verdict on a run that has not ended: ranks may have made other steps."""
    # A rank that fails makes fewer steps than others.
    found = [each for each in compare_ranks(run) if run.steps and each.what != "the number of steps"]
    if found:
        return Verdict(DIFFERS, findings=found, notes=[Finding("ranks", 0, "the run", reason)])
    if log is not None and log.exists():
        reason += "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-_MOST_LOGGED:])
    return Verdict(CANNOT, reason)


def copy_files(source: Path, target: Path) -> None:
    """Make ``target`` look like ``source`` for a run that writes files: copy small ones, link others and hidden folders."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        place, is_link = target / path.name, path.is_symlink()
        if path.is_dir() and not is_link and path.name[0] != "." and len(os.listdir(path)) <= _MOST_FILES:
            copy_files(path, place)
        elif path.is_file() and not is_link and path.stat().st_size <= _MOST_COPIED:
            shutil.copy2(path, place)
        else:
            place.symlink_to(path)

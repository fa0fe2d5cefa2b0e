"""Whether a job ended as it should: every rank with a named error, or all with the numbers of an undisturbed run.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.job import Ending, Job
from chaos.program import diverges

_ENDS_PROCESS = {"kill": -9, "terminate": -15}
_NUM = r"(?:rank|ranks|rank\(s\)) "


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with how a job ended.

    Attributes:
        faults: in words, one per rank at most; none if all is well.
        how: "recovered" if every rank has the numbers of an undisturbed run, else "named".
        seconds: until the last rank had ended with its error or its numbers.
        message: of what another rank than the struck one has raised, the first line that names the struck one, or the first.
    """

    faults: tuple[str, ...]
    how: str
    seconds: float
    message: str


def judge(job: Job, endings: Sequence[Ending], undisturbed: Sequence[str]) -> Verdict:
    """Return what is wrong with ``endings``; ``undisturbed``: the digests of the same program without a fault."""
    seconds = max((each.seconds for each in endings if each.seconds is not None), default=0.0)
    others = [each for rank, each in enumerate(endings) if rank != job.struck and each.error]
    message = _line_about(job.struck, others[0].text) if others else ""
    if all(each.digest for each in endings):
        is_same = [each.digest for each in endings] == list(undisturbed)
        is_allowed = is_same or (job.divergence and not diverges(job.program, job.divergence, job.num_ranks))
        faults = () if is_allowed else ("every rank ended as if nothing had happened, with other numbers",)
        return Verdict(faults, "recovered" if is_same else "allowed", seconds, message)
    if job.must_recover:
        rank, ending = next((rank, each) for rank, each in enumerate(endings) if not each.digest)
        reason = _ended_badly(ending) or _first(ending)
        return Verdict((f"rank {rank}: the transaction did not undo it: {reason}",), "named", seconds, message)
    faults = [
        f"rank {rank}: {reason}"
        for rank, ending in enumerate(endings)
        if (reason := _struck_wrongly(job, ending) if rank == job.struck else _wrong(job, ending, undisturbed[rank]))
    ]
    return Verdict(tuple(faults), "named", seconds, message)


def _struck_wrongly(job: Job, ending: Ending) -> str:
    """Return what is wrong with the end of the rank that was struck, an empty text if nothing is."""
    kind = job.fault.kind if job.fault is not None else "diverge"
    if kind in _ENDS_PROCESS:
        return (
            "" if ending.code == _ENDS_PROCESS[kind] else f"ended with code {ending.code} although it was sent {kind}"
        )
    if kind == "stop":
        return ""
    if kind == "interrupt" and ending.error == "KeyboardInterrupt":
        return ""
    if kind == "raise" and "injected: " in ending.text:
        return ""
    if kind in ("diverge", "drop") and ending.digest:
        return ""  # it is the others that miss something
    return _ended_badly(ending) or ("" if _is_allowed(job, ending) else _raw(ending))


def _wrong(job: Job, ending: Ending, undisturbed: str) -> str:
    bad = _ended_badly(ending)
    if bad:
        return bad
    if ending.digest:
        if ending.digest == undisturbed:
            return ""  # what it needed of the other was there before
        return "returned other numbers than an undisturbed run"
    if not _is_allowed(job, ending):
        return _raw(ending)
    if not re.search(rf"{_NUM}(?:\d+, )*{job.struck}\b", ending.text):
        return f"does not name rank {job.struck}: {_first(ending)}"
    return ""


def _ended_badly(ending: Ending) -> str:
    if ending.error or ending.digest:
        return ""
    if ending.code is None:
        return "hung"
    return f"ended by signal {-ending.code}" if ending.code < 0 else f"ended with code {ending.code} and no word"


def _is_allowed(job: Job, ending: Ending) -> bool:
    """Return True for an error of ours, and for one of torch's where a rank waited in torch's own code."""
    if ending.is_ours or "in new_group" in ending.trace:
        return True
    if job.program.api != "zero1":
        return False
    return "torch/nn/parallel" in ending.trace or ("autograd" in ending.trace and "shardwise/zero" not in ending.trace)


def _line_about(rank: int, text: str) -> str:
    lines = text.split("\n")
    return next((line for line in lines if re.search(rf"{_NUM}(?:\d+, )*{rank}\b", line)), lines[0])


def _raw(ending: Ending) -> str:
    return f"raw {_first(ending)}"


def _first(ending: Ending) -> str:
    return f"{ending.error}: {ending.text.split(chr(10))[0][:240]}"

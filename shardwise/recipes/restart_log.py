"""Restarts of a run: what a rank is told of one, what the run folder keeps of all, and how far a run has come meanwhile."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.safe_files import open_append, parse_object, read_text

RESTARTS = "restarts.jsonl"
_STEP_BYTES = 8


@dataclass(frozen=True, slots=True)
class Restart:
    """The ``number``-th time that a run was started again by itself, and why."""

    number: int
    cause: str


def note_restart(folder: Path, restart: Restart, step: int, num_ranks: int) -> None:
    """Write down that the run goes on after ``step`` on ``num_ranks`` ranks.  Only rank 0 calls it."""
    line = {"kind": "restart", "step": step, "ranks": num_ranks, "number": restart.number, "cause": restart.cause}
    with open_append(folder, RESTARTS) as file:
        file.write(json.dumps(line | {"time": round(time.time(), 3)}) + "\n")


def read_restarts(folder: Path) -> list[dict[str, float | str]]:
    """Return what was written down, oldest first."""
    try:
        return [parse_object(line, str(folder / RESTARTS)) for line in whole_lines(folder, RESTARTS)]
    except FileNotFoundError:
        return []


def whole_lines(folder: Path, name: str) -> list[str]:
    """Return the lines of a file that were written to their end."""
    return [line for line in read_text(folder, name).splitlines(keepends=True) if line.endswith("\n")]


class StepFile:
    """A file that says how many steps a run has done, for who watches its processes; one short write per step."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, step: int) -> None:
        """Say that ``step`` steps are done."""
        os.pwrite(self._fd, step.to_bytes(_STEP_BYTES, "little"), 0)

    def close(self) -> None:
        """Write nothing more."""
        os.close(self._fd)


def steps_in(path: Path) -> int:
    """Return how many steps the processes that wrote ``path`` had done; 0 before their first."""
    try:
        return int.from_bytes(path.read_bytes()[:_STEP_BYTES], "little")
    except FileNotFoundError:
        return 0

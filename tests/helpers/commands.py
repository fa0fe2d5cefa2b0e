"""``shardwise train`` as a user starts it: words, environment, and the processes below it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

COMMAND = [sys.executable, "-m", "shardwise.cli.main", "train", "--device", "cpu"]
SMALL = {
    "layers": 1, "width": 32, "heads": 2, "context": 32, "batch": 12, "warmup": 2, "lr": 2e-2, "steps": 20,
    "log-every": 4, "eval-every": 5, "eval-windows": 9, "save-every": 5, "sample-bytes": 8, "keep": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


OF_TESTS = ("TORCH_CPP_LOG_LEVEL",)  # the command chooses it itself


def clean_environment() -> dict[str, str]:
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SHARDWISE_LAUNCHER_PID", *OF_TESTS)
    return {name: value for name, value in os.environ.items() if name not in outer}


def options(**changes: object) -> list[str]:
    """Return the words of a small run with ``changes``, e.g. ``save_every=5``."""
    changed = {name.replace("_", "-"): value for name, value in changes.items()}
    return [word for name, value in (SMALL | changed).items() for word in (f"--{name}", str(value))]


def run(words: Sequence[str], **more: str) -> Ended:
    done = subprocess.run(
        words,
        env=clean_environment() | more,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def start(words: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command whose errors can be read."""
    return subprocess.Popen(
        words,
        env=clean_environment() | dict(environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid: int) -> list[int]:
    """Return the processes below ``pid``, found through the kernel's table."""
    below: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == pid:
            child = int(status.parent.name)
            below += [child, *children(child)]
    return below


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Process(Protocol):
    """What a started command tells."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


def wait_for_training(process: Process, run: Path) -> list[int]:
    """Wait for the first checkpoint; return the processes of the job below ``process``."""
    deadline = time.monotonic() + 150
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None, "the command has ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return children(process.pid)

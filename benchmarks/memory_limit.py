"""Train the demo's ``small`` model under a limit that the kernel enforces, and beside it without one.

Run, as a user who may make memory cgroups (version 1): ``python benchmarks/memory_limit.py [--steps 50] [--out FILE]``.

Bytes are those that the cgroup of all ranks and their launcher is charged for and that cannot be dropped: private and
shared memory.  Those above the process are more than the peak of the same command with a model of one block of width 8.
The limited run has a share of what the plain one has above the process, and must have its losses to the bit.  ``least``
is the least ``--memory`` that a plan takes; shares are tried until one is enough.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARES = (0.25, 0.3, 0.35, 0.4, 0.5)
MODEL = ("--model", "small", "--eval-every", "1000", "--save-every", "1000", "--log-every", "1", "--sample-bytes", "16")
TINY = ("--layers", "1", "--width", "8", "--heads", "1", "--context", "8", "--batch", "2")


class Cgroup:
    """A memory cgroup below that of this process; ``peak``: the most bytes that could not be dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.peak = folder, 0
        self._is_over = threading.Event()

    def limit(self, num_bytes: int) -> None:
        (self.folder / "memory.limit_in_bytes").write_text(str(num_bytes))

    def join(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def watch(self) -> None:
        """Sample until :meth:`end`."""
        while not self._is_over.wait(0.002):
            rows = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
            found = {name: int(value) for name, value in rows}
            self.peak = max(self.peak, found["total_rss"] + found["total_shmem"])

    def end(self) -> None:
        self._is_over.set()


@contextmanager
def cgroup() -> Generator[Cgroup, None, None]:
    own = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    folder = Path(f"/sys/fs/cgroup/memory{own}/shardwise-{os.getpid()}")
    folder.mkdir()
    made = Cgroup(folder)
    thread = threading.Thread(target=made.watch)
    thread.start()
    try:
        yield made
    finally:
        made.end()
        thread.join()
        folder.rmdir()


@dataclass(frozen=True)
class Ran:
    """A run of the command: what it said, what the kernel measured."""

    code: int
    text: str
    peak: int
    losses: tuple[float, ...] = ()
    step_s: float = 0.0
    resident: float = 0.0
    planned_s: float = 0.0
    planned_bytes: float = 0.0


def train(words: Sequence[str], limit: int | None = None) -> Ran:
    with cgroup() as group, tempfile.TemporaryDirectory() as folder:
        if limit is not None:
            group.limit(limit)
        command = [
            sys.executable,
            "-m",
            "shardwise.cli.main",
            "train",
            "--out",
            f"{folder}/run",
            "--nproc",
            "2",
            *words,
        ]
        done = subprocess.run(command, preexec_fn=group.join, capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        if done.returncode:
            return Ran(done.returncode, text, group.peak)
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        steps = [line for line in lines if line["kind"] == "train"]
        seconds = [after["time"] - before["time"] for before, after in itertools.pairwise(steps)]
    took, planned = (
        re.search(each, text) for each in (r"peak of the process .*", r"Take .*: (\S+ m?s) a step, (\S+ .B) at")
    )
    resident = max(map(num_bytes_of, re.findall(r"[\d.]+ .B", took[0]))) if took else 0
    return Ran(
        done.returncode,
        text,
        group.peak,
        tuple(line["loss"] for line in steps),
        statistics.median(seconds[2:]),
        resident,
        seconds_of(planned[1]) if planned else 0.0,
        num_bytes_of(planned[2]) if planned else 0.0,
    )


def num_bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def seconds_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


def figures(run: Ran, process: int) -> dict[str, Any]:
    return {
        "MB above the process": round((run.peak - process) / 1e6, 1),
        "resident MB of a rank": run.resident / 1e6,
        "planned MB": run.planned_bytes / 1e6,
        "planned / resident": round(run.planned_bytes / run.resident, 3),
        "s per step": round(run.step_s, 3),
        "planned / measured s": round(run.planned_s / run.step_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    steps = ("--steps", str(options.steps))
    process = train((*MODEL, *TINY, "--steps", "5", "--memory", "64GiB")).peak
    plain = train((*MODEL, *steps, "--memory", "64GiB"))
    told = {"process MB": round(process / 1e6, 1), "plain": figures(plain, process)}
    print(json.dumps(told, indent=2), flush=True)
    refused = train((*MODEL, *steps, "--memory", "1MiB"))
    found = re.search(r"devices with (\S+ .B)", refused.text)
    assert found is not None, refused.text
    least = int(1.01 * num_bytes_of(found[1]))
    told["least --memory, MB"] = round(least / 1e6, 1)
    for share in SHARES:
        limit = int(process + share * (plain.peak - process))
        ran = train((*MODEL, *steps, "--memory", str(least)), limit)
        told[f"{share:.0%} of the peak above the process"] = (
            figures(ran, process) | {"equal losses": ran.losses == plain.losses}
            if not ran.code
            else ran.text.strip().splitlines()[-1]
        )
        print(json.dumps(told, indent=2), flush=True)
        if not ran.code:
            break
    if options.out:
        options.out.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Peak and time of runs that ``shardwise train --memory`` makes fit, beside their plans and the limit of a memory cgroup.

Run: ``python benchmarks/memory_limit.py [--only NAME ...] [--steps 50] [--out FILE]``; figures in FILE that are not measured
again stay.  "quarter" needs the right to make memory cgroups (version 1): the demo's ``small`` model under a limit that the
kernel enforces, with a quarter of what the plain run needs above its processes, beside the plain run.  Bytes there are those
of all ranks and their launcher that the kernel cannot drop, private and shared; those of the processes are the peak of the
same command with a model of one block of width 8.  The other cases are plans of a rank's resident memory and a step's time
beside what was measured, each with room for everything, with some for less, and with the least that a plan takes.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = str(Path(__file__).parent.parent / "shardwise")
TRAIN = (sys.executable, "-m", "shardwise.cli.main", "train", "--data", TEXT, "--log-every", "1", "--sample-bytes", "4")
RARELY = ("--eval-every", "1000", "--eval-windows", "2", "--save-every", "1000")
TINY = ("--layers", "1", "--width", "8", "--heads", "1", "--context", "8", "--batch", "2")
SIZES = {
    "small": ("--model", "small", "--batch", "8"),
    "wide": ("--layers", "3", "--width", "640", "--heads", "10", "--context", "128", "--batch", "8"),
}
ROOM = {"plain": 1.0, "some": 0.5, "least": 0.0}  # of what the plain run needs more than the least
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "s": 1.0, "ms": 1e-3}


@dataclass(frozen=True, slots=True)
class Ran:
    """A run: its output, the losses and seconds of its steps, and the bytes that the kernel could not drop, if asked for."""

    text: str
    losses: Sequence[float]
    seconds: Sequence[float]
    peak: int = 0


def train(*words: str, start: Callable[[], None] | None = None) -> Ran:
    """Run the command; ``start`` is called in its process."""
    with tempfile.TemporaryDirectory() as folder:
        command = (*TRAIN, *RARELY, *words, "--out", f"{folder}/run")
        done = subprocess.run(command, preexec_fn=start, capture_output=True, text=True, check=False)
        metrics = Path(folder, "run", "metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [line for line in lines if line["kind"] == "train"]
    seconds = [after["time"] - before["time"] for before, after in itertools.pairwise(steps)]
    return Ran(done.stdout + done.stderr, [line["loss"] for line in steps], seconds)


def train_in_cgroup(*words: str, limit: int | None = None) -> Ran:
    """Run the command in a memory cgroup below that of this process."""
    own = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    folder, peak, is_over = Path(f"/sys/fs/cgroup/memory{own}/shardwise-{os.getpid()}"), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.002):
            found = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            peak = max(peak, int(found["total_rss"]) + int(found["total_shmem"]))

    folder.mkdir()
    try:
        if limit is not None:
            (folder / "memory.limit_in_bytes").write_text(str(limit))
        thread = threading.Thread(target=watch)
        thread.start()
        ran = train(*words, start=lambda: print(os.getpid(), file=(folder / "cgroup.procs").open("w")))
        is_over.set()
        thread.join()
    finally:
        folder.rmdir()
    return Ran(ran.text, ran.losses, ran.seconds, peak)


def size_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


def planned(ran: Ran) -> dict[str, Any]:
    """Return the figures of a run that was planned, beside those that were measured."""
    found = re.search(r"Take (.*): (\S+ m?s) a step, (\S+ .B) at most", ran.text)
    row = re.search(r"peak of the process.*", ran.text)
    if found is None or row is None:
        return {"ended with": ran.text.strip().splitlines()[-1]}
    way, seconds, peak = found[1], size_of(found[2]), size_of(found[3])
    measured, step = max(map(size_of, re.findall(r"[\d.]+ .B", row[0]))), statistics.median(ran.seconds[1:])
    return {
        "way": way,
        "planned MB": round(peak / 1e6),
        "resident MB": round(measured / 1e6),
        "planned / resident": round(peak / measured, 3),
        "planned s": round(seconds, 3),
        "s per step": round(step, 3),
        "planned / measured s": round(seconds / step, 3),
    }


def least_of(*words: str) -> float:
    """Return the least --memory that a plan takes, in bytes, and a little more, since processes differ."""
    text = train(*words, "--memory", "1MiB").text
    return 1.01 * size_of(text.partition("devices with ")[2].partition(",")[0])


def accuracy(size: str, ranks: int, steps: int) -> dict[str, Any]:
    words = (*SIZES[size], "--nproc", str(ranks), "--steps", str(steps))
    told = {"plain": planned(train(*words, "--memory", "64GiB"))}
    least = least_of(*words)
    for name, part in ROOM.items():
        if name not in told:
            limit = least + part * (1e6 * told["plain"]["planned MB"] - least)
            told[name] = planned(train(*words, "--memory", str(int(limit))))
    return told


def quarter(steps: int) -> dict[str, Any]:
    words = ("--nproc", "2", "--steps", str(steps), "--model", "small")
    process = train_in_cgroup(*words, *TINY).peak
    plain = train_in_cgroup(*words)
    least, limit = least_of(*words), process + (plain.peak - process) // 4
    ran = train_in_cgroup(*words, "--memory", str(int(least)), limit=limit)
    return {
        "MB of the processes": round(process / 1e6, 1),
        "MB of the plain run": round(plain.peak / 1e6, 1),
        "s per step of the plain run": round(statistics.median(plain.seconds[1:]), 3),
        "limit in MB": round(limit / 1e6, 1),
        "peak in MB": round(ran.peak / 1e6, 1),
        "part of what the plain run needs above the processes": round((ran.peak - process) / (plain.peak - process), 3),
        "equal losses": ran.losses == plain.losses,
        **planned(ran),
    }


CASES: dict[str, Callable[[int], dict[str, Any]]] = {"quarter": quarter} | {
    f"{size}, {ranks} rank{'s'[: ranks - 1]}": lambda steps, size=size, ranks=ranks: accuracy(size, ranks, steps)
    for size in SIZES
    for ranks in (1, 2)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for name in options.only:
        told[name] = CASES[name](options.steps)
        print(json.dumps({name: told[name]}, indent=2), flush=True)
        if options.out:
            options.out.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()

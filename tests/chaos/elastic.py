"""Elastic runs whose processes are killed, hang or are interrupted at random.

``python -m chaos.elastic SEED`` makes one; it returns 1 if the run is wrong, or has left something behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from helpers import elastic_program
from helpers.commands import COMMAND, children
from helpers.forked_commands import start_forked

from shardwise.one_host import read_proc

RUN = [*COMMAND[: COMMAND.index("train")], "run", "--elastic"]
LIMIT_S, HANG_S = 120.0, 5.0  # of a run; what its --hang-after is, and it costs a few seconds more
KINDS = *["reproducible"] * 3, "fully_shard", "replicate", "zero"  # of the first, the order of sums counts


@dataclass(frozen=True, slots=True)
class ElasticOutcome:
    """How a run ended.

    Attributes:
        is_right: it ended by itself, with the parameters of one process to the bit.
        text: the run in one line.  details: its settings and what it has printed.
        num_ranks, is_replaced: of the start, and whether processes were started in place of lost ones.
        num_dead: processes that were killed, hung or interrupted, of which num_hung hung.
        num_passes, num_steps: of steps, and steps.
        recoveries_s: of the last process to be rank 0, from each notice of a loss until the state was loaded.
    """

    is_right: bool
    text: str
    details: str
    num_ranks: int
    is_replaced: bool
    num_dead: int
    num_hung: int
    num_passes: int
    num_steps: int
    recoveries_s: list[float]


def _run(words: list[str], folder: str) -> tuple[int, str]:
    """Return the exit code, -1 if it has not ended, and what was printed: then also where each process is."""
    with start_forked(words, {"TMPDIR": folder}) as command:
        try:
            _, err = command.communicate(timeout=LIMIT_S)
        except AssertionError:
            for pid in children(command.pid):
                caught = int(read_proc(f"{pid}/status").partition("SigCgt:")[2].split()[0], 16)
                if caught >> (signal.SIGUSR2 - 1) & 1:
                    os.kill(pid, signal.SIGUSR2)
            time.sleep(1.0)
            command.kill()
            return -1, f"it has not ended within {LIMIT_S:g} s: {command.errors()}"
        assert command.returncode is not None
        return command.returncode, err


def run_elastic(noise: random.Random) -> ElasticOutcome:
    """Make a run that ``noise`` draws."""
    num_ranks, is_replaced = noise.choice((2, 3, 4)), noise.random() < 0.6
    kind, transport = noise.choice(KINDS), noise.choice(("auto", "gloo", "collective"))
    num_new = noise.randint(4, 16) if is_replaced else 0
    num_spares = noise.randint(0, min(2, num_new))
    # One always goes on: a rank that hangs is ended because another one waits for it.
    mortal = range(1, num_new) if is_replaced else noise.sample(range(num_ranks), num_ranks - 1)
    num_steps = 80 if is_replaced else 25
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        drawn = {"seed": noise.randrange(2**31), "rate": noise.choice((0.03, 0.06, 0.15)), "others": 0.4}
        settings: dict[str, Any] = {"kind": kind, "transport": transport, "num_steps": num_steps}
        settings |= {"out": f"{folder}/out", "log": folder}
        settings["random"] = {**drawn, "immune": sorted(set(range(100)) - set(mortal))}
        words = [
            "--hang-after",
            str(HANG_S),
            "-n",
            str(num_ranks),
            "--spares",
            str(num_spares),
            "--max-restarts",
            str(num_new - num_spares),
        ]
        code, err = _run([*RUN, *words, elastic_program.__file__, json.dumps(settings)], folder)
        found, more = torch.load(f"{folder}/out") if code == 0 else ({}, {"seconds": [], "recoveries": []})
        expected = elastic_program.undisturbed(num_steps, kind)
        is_right = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        names = os.listdir(folder)
        left = [name for name in names if name.startswith(("shardwise-", "pymp-")) and "-records-" not in name]
        left += _processes_of(folder)
        is_right &= not left
    passes = max((int(name.split("-")[2]) for name in names if name.startswith("ended-")), default=0)
    count = {
        word: sum(name.startswith(f"{word}-") for name in names) for word in ("started", "left", "interrupted", "hung")
    }
    num_dead = count["started"] - count["left"] + count["interrupted"]
    seconds, lost = time.monotonic() - begin_s, err.count(" ended") - err.count("have ended")
    text = f"{num_ranks} ranks {kind} {transport} {num_spares} of {num_new} spare: "
    text += (
        f"{num_dead} lost ({count['hung']} hung, {count['interrupted']} interrupted), {lost} losses, {seconds:.1f} s"
    )
    text += ", stuck" * err.count("after a loss, and was ended") + f", left behind: {left}" * bool(left)
    details = "\n".join([json.dumps(settings), *words, str(code), err])
    pairs = zip(more["seconds"], more["recoveries"], strict=True)
    recoveries_s = [sum(parts.values(), 0.0) for parts, cause in pairs if "was ended" in cause]
    return ElasticOutcome(
        is_right, text, details, num_ranks, is_replaced, num_dead, count["hung"], passes, num_steps, recoveries_s
    )


def _processes_of(folder: str) -> list[str]:
    """Return the processes that were told of ``folder`` and still run."""
    pids = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    return [pid for pid in pids if f"{folder}/" in read_proc(f"{pid}/environ")]


if __name__ == "__main__":
    outcome = run_elastic(random.Random(int(sys.argv[1])))
    print(outcome.text if outcome.is_right else f"{outcome.text}\n{outcome.details}")
    sys.exit(not outcome.is_right)

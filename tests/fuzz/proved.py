"""Random programs held against the plain thing as ``shardwise prove`` does, on pools of ranks: it must call each right.

The other areas compare gradients and parameters with one process, element by element.  This one compares what they do not see:
outputs inside of the model, what each backward added, states of optimizers.  And it finds right programs that ``prove`` calls
wrong.  A program that fails by itself shows nothing here; the other areas look into those.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from shardwise.prove import plain
from shardwise.prove.compare import Comparison, ProveOptions, Recording
from shardwise.prove.record import RunRecorder, Terms
from shardwise.prove.run import judge
from shardwise.testing.pool import WorkerPool

# No file of the fuzzer is imported above: in the processes of the plain run wrappers are replaced first.
LIMIT_S = 60.0


@functools.cache
def replace_wrappers() -> None:
    """Replace the wrappers of this process."""
    plain.replace_wrappers()


def record(text: str, folder: str, role: str) -> None:
    """Carry out the first phase of the case ``text`` on this rank, as the first of its contenders that is ours, recorded."""
    terms = Terms(f"{folder}/{role}", role, rank=dist.get_rank())
    if role == "tested":
        recorder = RunRecorder(terms)
    else:
        replace_wrappers()
        plain._wraps.clear()  # pyright: ignore[reportPrivateUsage]  prove runs one script per process
        plain._moves.clear()  # pyright: ignore[reportPrivateUsage]
        recorder = plain.PlainRecorder(terms)
    from fuzz.eligible import is_ours
    from fuzz.phases import Play, Seat
    from fuzz.play import make_side

    play = Play.load(text)
    seat = Seat.of(dist.get_rank(), dist.get_world_size(), play.settings.mesh)
    with recorder.install():
        for _ in play.phases[0].program(make_side(play, seat, next(filter(is_ours, play.contenders)), "cpu")):
            pass


class Prover:
    """Pools of ranks for the run as it is, and for the plain one, per number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], WorkerPool] = {}

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def prove(self, text: str, num_ranks: int) -> tuple[str, list[str]]:
        """Return whether the program of a case is "right", "wrong", "not proven" or "fails by itself", and why in lines."""
        with tempfile.TemporaryDirectory(prefix="shardwise-fuzz-") as folder:
            for role in ("tested", "plain", "moved"):
                Path(folder, role).mkdir()
                key = num_ranks, role == "tested"
                if key not in self._pools:
                    self._pools[key] = WorkerPool(num_ranks, LIMIT_S, keeps_group=True, preload=("torch", "shardwise"))
                pool = self._pools[key]
                answers = pool.attempt(record, num_ranks=num_ranks, text=text, folder=folder, role=role)
                if errors := [each.error for each in answers if each.error]:
                    pool.replace()
                    own = [each for each in errors if "TransportError" not in each] or errors
                    return "fails by itself" if role == "tested" else "not proven", own[0].splitlines()[-12:]
            runs = [Recording.read(Path(folder, role)) for role in ("tested", "plain", "moved")]
            verdict = judge(Comparison(*runs, ProveOptions()))
        return ("right", "wrong", "not proven")[verdict.code], verdict.lines()


def run_for(seconds: float, max_cases: int, seed: int, max_ranks: int, folder: Path) -> bool:
    """Prove programs of all areas from ``seed`` on, 100 without a limit; return True if one is called wrong.

    ``folder`` gets the texts of those.
    """
    from fuzz.areas import AREAS
    from fuzz.campaign import uses
    from fuzz.draw import draw
    from fuzz.eligible import is_ours
    from fuzz.render import render

    end, told, number = time.monotonic() + seconds, Counter[str](), 0
    max_cases = max_cases or (not seconds) * 100
    with Prover() as prover:
        while (not seconds or time.monotonic() < end) and (not max_cases or number < max_cases):
            case = draw(seed + number // len(AREAS), [*AREAS][number % len(AREAS)], max_ranks)
            number += 1
            # What changes reduced gradients differs from the plain thing, and ranks differ in what is ignored.
            if not any(map(is_ours, case.contenders)) or uses(case, ["Hook"]) or case.settings.ignored:
                continue
            text = render(case)
            kind, lines = prover.prove(text, case.num_ranks)
            told[kind] += 1
            if kind in ("wrong", "not proven"):
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"proved_{case.area}_{case.seed}.py"
                path.write_text(text)
                print(f"{path} on {case.num_ranks} rank(s): {kind}", *lines, sep="\n    ", flush=True)
    print(f"{number} cases: {dict(told)}")
    return bool(told["wrong"])

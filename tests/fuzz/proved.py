"""Random programs held against the plain thing as ``shardwise prove`` does, on pools of ranks: it must call each right.

The other areas compare gradients and parameters with one process, element by element.  This one compares what they do not see:
outputs inside of the model, what each backward added, states of optimizers.  And it finds right programs that ``prove`` calls
wrong.  A program that fails by itself shows nothing here; the other areas look into those.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz.actions import Hook, HookGradient
from fuzz.areas import AREAS
from fuzz.case import Case
from fuzz.draw import draw
from fuzz.eligible import is_ours
from fuzz.recorded import record
from fuzz.render import render
from shardwise.prove.compare import Comparison, ProveOptions, Recording
from shardwise.prove.run import judge
from shardwise.testing.pool import WorkerPool

LIMIT_S = 60.0
ROLES = "tested", "plain", "moved"


class Prover:
    """Pools of ranks for the run as it is, and for the plain ones, per number of ranks."""

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
            for role in ROLES:
                Path(folder, role).mkdir()
                key = num_ranks, role == "tested"
                if key not in self._pools:
                    self._pools[key] = WorkerPool(num_ranks, LIMIT_S, keeps_group=True, preload=("torch", "shardwise"))
                answers = self._pools[key].attempt(record, num_ranks=num_ranks, text=text, folder=folder, role=role)
                if errors := [each.error for each in answers if each.error]:
                    self._pools[key].replace()
                    own = [each for each in errors if "TransportError" not in each] or errors
                    return "fails by itself" if role == "tested" else "not proven", own[0].splitlines()[-12:]
            tested, plain, moved = [Recording.read(Path(folder, role)) for role in ROLES]
            verdict = judge(Comparison(tested, plain, moved, ProveOptions()))
        return ("right", "wrong", "not proven")[verdict.code], verdict.lines()


def is_unlike_plain(case: Case) -> bool:
    """Return True where the plain thing does something else: with hooks on reduced gradients, and where ranks are to differ."""
    hooks = [
        each for each in case.actions if isinstance(each, Hook) or (isinstance(each, HookGradient) and not each.follows)
    ]
    return bool(hooks) or bool(case.settings.ignored)


def run_for(seconds: float, max_cases: int, seed: int, max_ranks: int, folder: Path) -> bool:
    """Prove programs of all areas from ``seed`` on, 100 without a limit; return True if one is called wrong.

    ``folder`` gets the texts of those.
    """
    end, told, number = time.monotonic() + seconds, Counter[str](), 0
    max_cases = max_cases or (not seconds) * 100
    with Prover() as prover:
        while (not seconds or time.monotonic() < end) and (not max_cases or number < max_cases):
            case = draw(seed + number // len(AREAS), [*AREAS][number % len(AREAS)], max_ranks)
            number += 1
            if not any(map(is_ours, case.contenders)) or is_unlike_plain(case):
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

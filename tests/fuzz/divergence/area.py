"""The area ``divergence``: programs whose ranks take different ways, compared with one process."""

from __future__ import annotations

from fuzz.divergence.case import Case, candidates, draw, is_valid
from fuzz.divergence.program import alone, run_rank
from fuzz.programs import Programs


def _in_words(ranks: list[list[str]]) -> str:
    every = [f"rank {rank}: {line}" for rank, lines in enumerate(ranks) for line in lines]
    if not every:
        return ""
    kinds = sorted({line.split(": ")[1 if "output" in line else 2].split(" of ")[0].split(".")[0] for line in every})
    return "\n".join([f"differs in {' '.join(kinds)}", *every[:12]])


DIVERGENCE = Programs(
    kind=Case,
    draw=draw,
    candidates=lambda case: filter(is_valid, candidates(case)),
    run_rank=run_rank,
    arguments=lambda cases: {"cases": cases, "expected": [alone(case) for case in cases]},
    in_words=_in_words,
    preload="fuzz.divergence.program",
    batch=5,
    limit_s=12.0,
    more_s=3.0,
    tries=150,
)

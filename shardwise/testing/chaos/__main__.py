"""Run chaos: ``python -m shardwise.testing.chaos --minutes 30 --seed 0``, or ``--matrix`` for every job once."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from shardwise.testing.chaos.campaign import Campaign, Result, draw, matrix, until
from shardwise.testing.chaos.job import Job
from shardwise.testing.chaos.outcomes import embed, line_of, summary_of, tables_of


def main() -> int:
    """Run jobs and say how each ended; return 1 if one ended as none should."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no job is begun (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--most", type=int, help="number of jobs after which to end")
    parser.add_argument(
        "--matrix", action="store_true", help="every door, transport, fault and place once, in random order"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="world sizes of the matrix (default: 2)")
    parser.add_argument("--only", default="", help="jobs whose line has this text")
    parser.add_argument("--table", type=Path, help="write the results into this page, between its markers")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    jobs: Iterable[Job] = (draw(rng) for _ in count())
    if arguments.matrix:
        every = list(matrix(arguments.ranks))
        jobs = rng.sample(every, len(every))
    title = f"{f'Of the {len(jobs):,} jobs of the matrix' if isinstance(jobs, list) else 'Random jobs'}, seed {arguments.seed}"
    results: list[Result] = []
    for result in _run(until(jobs, arguments.minutes, arguments.most), arguments.only):
        results.append(result)
        print(line_of(result), flush=True)
    print(summary_of(results))
    if arguments.table is not None:
        arguments.table.write_text(embed(arguments.table.read_text(), tables_of(results, title)))
    return int(any(result.verdict.faults for result in results))


def _run(jobs: Iterable[Job], only: str) -> Iterator[Result]:
    campaign = Campaign()
    for job in jobs:
        if only in job.text:
            yield campaign.run(job)


if __name__ == "__main__":
    sys.exit(main())

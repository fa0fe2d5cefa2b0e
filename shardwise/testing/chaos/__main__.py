"""Run chaos: ``python -m shardwise.testing.chaos --minutes 30 --seed 0``, or ``--matrix`` for every job once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from shardwise.testing.chaos.campaign import Campaign, Result, matrix, random_jobs
from shardwise.testing.chaos.job import Job
from shardwise.testing.chaos.table import embed, line_of, summary_of, tables_of


def main() -> int:
    """Run jobs and say how each ended; return 1 if one ended as none should."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of random jobs (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the random jobs (default: 0)")
    parser.add_argument("--most", type=int, help="number of random jobs after which to end")
    parser.add_argument("--matrix", action="store_true", help="every door, transport, fault and place once instead")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="world sizes of the matrix (default: 2)")
    parser.add_argument("--every", type=int, default=1, help="with --matrix: every n-th job")
    parser.add_argument("--only", default="", help="jobs whose line has this text")
    parser.add_argument("--table", type=Path, help="write the results into this page, between its markers")
    arguments = parser.parse_args()
    jobs: Iterable[Job] = random_jobs(arguments.minutes, arguments.seed)
    if arguments.matrix:
        jobs = islice(matrix(arguments.ranks), 0, None, arguments.every)
    results: list[Result] = []
    for result in _run(islice(jobs, arguments.most), arguments.only):
        results.append(result)
        print(line_of(result), flush=True)
    print(summary_of(results))
    if arguments.table is not None:
        arguments.table.write_text(embed(arguments.table.read_text(), tables_of(results)))
    return int(any(result.verdict.faults for result in results))


def _run(jobs: Iterable[Job], only: str) -> Iterator[Result]:
    campaign = Campaign()
    for job in jobs:
        if only in job.text:
            yield campaign.run(job)


if __name__ == "__main__":
    sys.exit(main())

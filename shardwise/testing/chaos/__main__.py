"""Run chaos: ``python -m shardwise.testing.chaos --minutes 30 --seed 0``, or ``--matrix`` for every job once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwise.testing.chaos.beside import Draw, run_beside
from shardwise.testing.chaos.campaign import Result, matrix
from shardwise.testing.chaos.outcomes import embed, line_of, summary_of, tables_of


def main() -> int:
    """Run jobs and say how each ended; return 1 if one ended as none should."""
    arguments = _parse()
    sizes = tuple(arguments.ranks) if arguments.matrix else ()
    what = Draw(arguments.seed, arguments.minutes, sizes, arguments.most, arguments.only)
    results: list[Result] = []
    for result in run_beside(what, arguments.at_once):
        results.append(result)
        print(line_of(result), flush=True)
    print(summary_of(results))
    if arguments.table is not None:
        table = tables_of(results, _title(what, arguments.at_once))
        arguments.table.write_text(embed(arguments.table.read_text(), table))
    return int(any(result.verdict.faults for result in results))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no job is begun (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--most", type=int, help="number of jobs after which to end")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="jobs that run beside each other; limits of time grow with it (default: 1)",
    )
    parser.add_argument(
        "--matrix", action="store_true", help="every door, transport, fault and place once, in random order"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="world sizes of the matrix (default: 2)")
    parser.add_argument("--only", default="", help="jobs whose line has this text")
    parser.add_argument("--table", type=Path, help="write the results into this page, between its markers")
    return parser.parse_args()


def _title(what: Draw, at_once: int) -> str:
    of = f"Of the {len(list(matrix(what.sizes))):,} jobs of the matrix" if what.sizes else "Random jobs"
    return f"{of}, seed {what.seed}, {at_once} at once"


if __name__ == "__main__":
    sys.exit(main())

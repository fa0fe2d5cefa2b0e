"""Run chaos: ``python -m chaos --minutes 30 --seed 0``, or ``--matrix`` for every job once."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from chaos.beside import Draw, run_beside
from chaos.campaign import Result
from chaos.outcomes import embed, line_of, summary_of, tables_of
from shardwise import __version__

_WRITTEN_EVERY = 10  # jobs: a campaign that is broken off leaves its table


def main() -> int:
    """Run jobs and say how each ended; return 1 if one ended as none should."""
    arguments = _parse()
    sizes = tuple(arguments.ranks) if arguments.matrix else ()
    what = Draw(arguments.seed, arguments.minutes, sizes, arguments.most, arguments.only)
    results: list[Result] = []
    title, is_over = _title(what, arguments.at_once), False
    try:
        for result in run_beside(what, arguments.at_once):
            results.append(result)
            print(line_of(result), flush=True)
            if len(results) % _WRITTEN_EVERY == 0:
                _write(arguments.table, title, results)
        is_over = True
    finally:
        _write(arguments.table, title, results)
        print(f"{'' if is_over else 'broken off: '}{title}: {summary_of(results)}")
    return int(not results or any(result.verdict.faults for result in results))


def _write(page: Path | None, title: str, results: Sequence[Result]) -> None:
    if page is not None:
        page.write_text(embed(page.read_text(), tables_of(results, title)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
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
        "--matrix", action="store_true", help="every api, transport, fault and place once, in random order"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="world sizes of the matrix (default: 2)")
    parser.add_argument("--only", default="", help="jobs whose line has this text")
    parser.add_argument("--table", type=Path, help="write the results into this page, between its markers")
    return parser.parse_args()


def _title(what: Draw, at_once: int) -> str:
    of = f"Of the {what.num_jobs:,} jobs of the matrix" if what.sizes else "Random jobs"
    kind = f" with {what.only!r} in their line" if what.only else ""
    return f"{of}{kind}, seed {what.seed}, {at_once} at once, commit {_commit()}"


def _commit() -> str:
    """Return what git calls the code that runs, else its version."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"unknown, version {__version__}"


if __name__ == "__main__":
    sys.exit(main())

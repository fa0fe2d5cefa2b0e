"""The cases of checkpoints at full size, of which the tests run a slice: damage, mutations, pairs of doors.

``python benchmarks/checkpoint_cases.py [--damage 2000] [--mutations 5000] [--pairs]``: exits with 1 and a list if one fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
for folder in (TESTS, TESTS / "dist", TESTS / "pure"):
    sys.path.insert(0, str(folder))
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS / "dist"), os.environ.get("PYTHONPATH", "")])

from helpers.checkpoints import load_behind, save_behind  # noqa: E402
from test_checkpoint_damage import cases  # noqa: E402
from test_checkpoint_doors import SIZES, doors_at  # noqa: E402
from test_checkpoint_format import check_header_mutation, check_mutation  # noqa: E402

from shardwise.testing import WorkerPool  # noqa: E402


def pairs(pool: WorkerPool, folder: str) -> list[str]:
    """Return what went wrong between any two doors at any two numbers of ranks."""
    wrong: list[str] = []
    for size in SIZES:
        pool.run(save_behind, num_ranks=size, doors=doors_at(size), folder=folder)
    for size in SIZES:
        wanted = [(s, d, n) for n in SIZES for s in doors_at(n) for d in doors_at(size)]
        for start in range(0, len(wanted), 40):
            some = wanted[start : start + 40]
            found = pool.run(load_behind, num_ranks=size, fresh=True, pairs=some, folder=folder)
            wrong += [text for each in found for text in each]
        print(f"pairs: {len(wanted)} ways into {size} rank(s), {len(wrong)} wrong so far", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--damage", type=int, default=2000)
    parser.add_argument("--mutations", type=int, default=5000)
    parser.add_argument("--pairs", action="store_true")
    arguments = parser.parse_args()
    wrong: list[str] = []
    taken = sum(check_mutation(seed) for seed in range(arguments.mutations))
    taken += sum(check_header_mutation(seed) for seed in range(arguments.mutations))
    print(f"mutations: {2 * arguments.mutations}, {taken} changed nothing that is checked, no crash", flush=True)
    with WorkerPool(4, 900.0) as pool, tempfile.TemporaryDirectory() as folder:
        for start in range(0, arguments.damage, 500):
            seeds = list(range(start, min(start + 500, arguments.damage)))
            place = f"{folder}/damage-{start}"
            Path(place).mkdir()
            found = pool.run(cases, num_ranks=2, folder=place, seeds=seeds)
            wrong += [text for each in found for text in each]
            print(f"damage: {seeds[-1] + 1} cases, {len(wrong)} wrong so far", flush=True)
        if arguments.pairs:
            wrong += pairs(pool, folder)
    print("\n".join(wrong[:50]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

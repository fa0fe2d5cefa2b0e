"""A checkpoint does not tell doors or numbers of ranks apart: what one saves all load, and training goes on to the bit."""

from pathlib import Path

from helpers.checkpoints import DOORS, load_behind, save_behind

from shardwise.testing import WorkerPool

SIZES = (1, 2, 3, 4)
FEW = ("tensor parallel", "hybrid")  # need an even number of ranks


def doors_at(num_ranks: int) -> list[str]:
    return [door for door in DOORS if num_ranks != 3 or door not in FEW]


def test_what_one_door_saves_all_doors_load(pool: WorkerPool, tmp_path: Path) -> None:
    for size in SIZES:
        pool.run(save_behind, num_ranks=size, doors=doors_at(size), folder=str(tmp_path))
    for size in SIZES:
        pairs = [
            (saved, door, num_ranks)
            for num_ranks in SIZES
            for place, saved in enumerate(doors_at(num_ranks))
            for other, door in enumerate(doors_at(size))
            if (place + other + num_ranks) % 6 == size % 6  # the whole table: benchmarks/checkpoint_cases.py
        ]
        for wrong in pool.run(load_behind, num_ranks=size, pairs=pairs, folder=str(tmp_path)):
            assert wrong == [], "\n".join(wrong[:20])

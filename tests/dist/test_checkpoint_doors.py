"""A checkpoint does not tell APIs or numbers of ranks apart: what one saves all load, and training goes on to the bit."""

from pathlib import Path

from helpers.checkpoints import APIS, load_behind, save_behind

from shardwise.testing import WorkerPool

SIZES = (1, 2, 3, 4)
FEW = ("tensor parallel", "hybrid")  # need an even number of ranks


def apis_at(num_ranks: int) -> list[str]:
    return [api for api in APIS if num_ranks != 3 or api not in FEW]


def test_what_one_api_saves_all_apis_load(pool: WorkerPool, tmp_path: Path) -> None:
    for size in SIZES:
        pool.run(save_behind, num_ranks=size, apis=apis_at(size), folder=str(tmp_path))
    for size in SIZES:
        pairs = [
            (saved, api, num_ranks)
            for num_ranks in SIZES
            for place, saved in enumerate(apis_at(num_ranks))
            for other, api in enumerate(apis_at(size))
            if (place + other + num_ranks) % 6 == size % 6  # the whole table: benchmarks/checkpoint_cases.py
        ]
        for wrong in pool.run(load_behind, num_ranks=size, pairs=pairs, folder=str(tmp_path)):
            assert wrong == [], "\n".join(wrong[:20])

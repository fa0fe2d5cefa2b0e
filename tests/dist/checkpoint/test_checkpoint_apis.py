"""A checkpoint does not tell APIs or numbers of ranks apart: what one saves all load, and training goes on to the bit."""

from itertools import cycle, product
from pathlib import Path

from helpers.checkpoints import APIS, load_behind, save_behind

from shardwise.testing import WorkerPool

SIZES = (1, 2, 3, 4)
FEW = ("tensor parallel", "hybrid")  # need an even number of ranks


def apis_at(num_ranks: int) -> list[str]:
    return [api for api in APIS if num_ranks != 3 or api not in FEW]


def test_what_one_api_saves_all_apis_load(pool: WorkerPool, tmp_path: Path) -> None:
    pairs: dict[int, list[tuple[str, str, int]]] = {size: [] for size in SIZES}
    saved_at: dict[int, dict[str, None]] = {size: {} for size in SIZES}
    # Each API meets one or two others, at every pair of sizes in turn.
    for (saved, api), (saved_size, size) in zip([*product(APIS, APIS)][::8], cycle(product(SIZES, SIZES))):
        from_size, to_size = saved_size if saved in apis_at(saved_size) else 2, size if api in apis_at(size) else 2
        pairs[to_size].append((saved, api, from_size))  # the whole table: benchmarks/checkpoint_cases.py
        saved_at[from_size][saved] = None
    for size, apis in saved_at.items():
        pool.run(save_behind, num_ranks=size, apis=[*apis], folder=str(tmp_path))
    for size in SIZES:
        for wrong in pool.run(load_behind, num_ranks=size, pairs=pairs[size], folder=str(tmp_path)):
            assert wrong == [], "\n".join(wrong[:20])

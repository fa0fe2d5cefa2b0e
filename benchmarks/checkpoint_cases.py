"""Cases of checkpoints at full size, of which tests run a slice: damage, mutations, killed ranks, pairs of APIs.

``python benchmarks/checkpoint_cases.py [--damage 2000] [--mutations 5000] [--kills 200] [--pairs]`` exits with 1 and a list
if a case fails.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[1] / "tests"
CASES = TESTS / "dist" / "checkpoint"
for folder in (TESTS, CASES, TESTS / "pure"):
    sys.path.insert(0, str(folder))
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(CASES), os.environ.get("PYTHONPATH", "")])

from helpers.checkpoints import load_behind, save_behind  # noqa: E402
from helpers.jobs import PRELOAD  # noqa: E402
from test_checkpoint_apis import SIZES, apis_at  # noqa: E402
from test_checkpoint_damage import cases  # noqa: E402
from test_checkpoint_format import check_header_mutation, check_mutation  # noqa: E402

from shardwise import fully_shard  # noqa: E402
from shardwise.checkpoint import CheckpointError, finish, load, save  # noqa: E402
from shardwise.checkpoint.files import Files, list_checkpoints  # noqa: E402
from shardwise.testing import WorkerPool  # noqa: E402


def pairs(pool: WorkerPool, folder: str) -> list[str]:
    """Return what went wrong between any two APIs at any two numbers of ranks."""
    wrong: list[str] = []
    for size in SIZES:
        pool.run(save_behind, num_ranks=size, apis=apis_at(size), folder=folder)
    for size in SIZES:
        wanted = [(s, d, n) for n in SIZES for s in apis_at(n) for d in apis_at(size)]
        for start in range(0, len(wanted), 40):
            some = wanted[start : start + 40]
            found = pool.run(load_behind, num_ranks=size, fresh=True, pairs=some, folder=folder)
            wrong += [text for each in found for text in each]
        print(f"pairs: {len(wanted)} ways into {size} rank(s), {len(wrong)} wrong so far", flush=True)
    return wrong


class Steps(torch.nn.Module):
    """Every element is the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(8))

    def write(self, step: int) -> None:
        """Set it."""
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(step)


def save_until_killed(folder: str, victim: int, after_s: float, wait: bool) -> str:
    """Save step after step; this rank kills itself after a while if it is the victim."""
    model = Steps()
    fully_shard(model)
    if dist.get_rank() == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for step in itertools.count(1):
            model.write(step)
            save(folder, {"model": model, "loop": {"step": step}}, step=step, keep=2, wait=wait)
            model.write(-1)
    except CheckpointError as error:
        return str(error)
    return ""


def kills(pool: WorkerPool, folder: Path, number: int) -> list[str]:
    """Return after which kills a survivor had no error that says who is gone, or a folder held no whole step."""
    chance, wrong = random.Random(0), list[str]()
    for index in range(number):
        place, size = folder / f"kill-{index}", chance.choice((2, 4))
        victim, after_s, wait = chance.randrange(size), chance.uniform(0.0, 0.6), chance.random() < 0.5
        found = pool.attempt(
            save_until_killed, num_ranks=size, fresh=True, folder=str(place), victim=victim, after_s=after_s, wait=wait
        )
        what = f"kill {index}: rank {victim} of {size} after {after_s:.3f} s, wait={wait}"
        wrong += [
            f"{what}: rank {rank}: {answer}"
            for rank, answer in enumerate(found)
            if rank != victim and f"rank {victim} is gone" not in str(answer.value)
        ]
        model, loop = Steps(), {"step": 0}
        if list_checkpoints(Files(), place):
            step = load(place, {"model": model, "loop": loop}).step
            if loop != {"step": step} or any((param != step).any() for param in model.parameters()):
                wrong.append(f"{what}: step {step} is not whole")
            save(place, {"model": model}, step=step + 1)
            finish(place)
    print(f"kills: {number}, {len(wrong)} wrong", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--damage", type=int, default=2000)
    parser.add_argument("--mutations", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--pairs", action="store_true")
    arguments = parser.parse_args()
    wrong: list[str] = []
    taken = sum(check_mutation(seed) for seed in range(arguments.mutations))
    taken += sum(check_header_mutation(seed) for seed in range(arguments.mutations))
    print(f"mutations: {2 * arguments.mutations}, {taken} changed nothing that is checked, no crash", flush=True)
    with WorkerPool(4, 900.0, preload=PRELOAD) as pool, tempfile.TemporaryDirectory() as folder:
        for start in range(0, arguments.damage, 500):
            seeds = list(range(start, min(start + 500, arguments.damage)))
            place = f"{folder}/damage-{start}"
            Path(place).mkdir()
            found = pool.run(cases, num_ranks=2, folder=place, seeds=seeds)
            wrong += [text for each in found for text in each]
            print(f"damage: {seeds[-1] + 1} cases, {len(wrong)} wrong so far", flush=True)
        wrong += kills(pool, Path(folder), arguments.kills)
        if arguments.pairs:
            wrong += pairs(pool, folder)
    print("\n".join(wrong[:50]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Page faults and milliseconds of a warm step of one contender of ``bench.py`` alone in its processes.

In ``bench.py`` contenders share a process, and the largest widens the heap for all.  Here each run is a process of
its own per rank; runs with the end of the heap kept (``collectives/streams.py``) and without take turns.  Medians over
the steps of a run, then over the runs.

Run: python benchmarks/page_faults.py [--shape wide deep] [--only "shardwise full" ...] [--runs 3] [--steps 10]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from bench_contenders import CONTENDERS, BenchConfig, build_trained, make_setup
from bench_timing import minor_faults, take_step, wait_for_all

from shardwise.fsdp import transports

RANKS, WARM_UP = 2, 6


def measure(shape: str, name: str, steps: int, keeps: bool) -> None:
    """Step on this rank; rank 0 prints milliseconds and page faults of the median step.  Collective."""
    if not keeps:
        transports.keep_heap = lambda owner, device: None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = BenchConfig(shape=shape, ranks=RANKS, batch=2, rounds=steps, seed=0, backend="gloo", names=(name,))
    setup = make_setup(config)
    trained = build_trained(CONTENDERS[name], setup.build_model(), setup)
    for _ in range(WARM_UP):
        take_step(trained, setup)
    times: list[float] = []
    faults: list[int] = []
    for _ in range(steps):
        wait_for_all(setup)
        start, before = time.perf_counter(), minor_faults()
        take_step(trained, setup)
        wait_for_all(setup)
        times.append(1e3 * (time.perf_counter() - start))
        faults.append(minor_faults() - before)
    if dist.get_rank() == 0:
        print("measured", statistics.median(times), statistics.median(faults))
    dist.destroy_process_group()


def run(shape: str, name: str, steps: int, keeps: bool) -> tuple[float, float]:
    """Start the ranks of one run; return what rank 0 printed."""
    words = ["--rank-of", shape, name, str(steps), "kept" if keeps else "given back"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), __file__, *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in ended.stdout.splitlines() if line.startswith("measured"))
    milliseconds, faults = line.split()[1:]
    return float(milliseconds), float(faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["wide", "deep"])
    parser.add_argument("--only", nargs="+", default=["shardwise full", "shardwise recommended", "FSDP2"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank-of", nargs=4, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        shape, name, steps, way = arguments.rank_of
        measure(shape, name, int(steps), way == "kept")
        return
    for shape in arguments.shape:
        for name in arguments.only:
            found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for _ in range(arguments.runs):
                for keeps, runs in found.items():
                    runs.append(run(shape, name, arguments.steps, keeps))
            kept, plain = (
                [statistics.median(column) for column in zip(*found[keeps], strict=True)] for keeps in (True, False)
            )
            print(
                f"{shape:5s} {name:24s} kept {kept[0]:7.1f} ms {kept[1]:6.0f} faults; given back {plain[0]:7.1f} ms "
                f"{plain[1]:6.0f} faults; {kept[0] / plain[0]:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

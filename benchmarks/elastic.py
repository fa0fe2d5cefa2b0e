"""Losses of ranks at random moments, and what a recovery and the mirroring of state cost.

``python benchmarks/elastic.py kills [--kills 300] [--seed 0] [--limit-s S]``: runs of 2, 3 and 4 ranks whose processes are
killed, stopped, made to spin or sleep, or interrupted, some with a slow exit, at random places and moments, with and without
processes that replace them, until so many were lost.  Each run must end with the parameters of one process, to the bit.

``python benchmarks/elastic.py flat [--kills 200]``: threads, descriptors and memory of a survivor over so many losses.

``python benchmarks/elastic.py times [--repeats 9]``: from a kill to the end of the next step at 4 ranks, beside a restart from
disk.

``python benchmarks/elastic.py cost [--ranks 4] [--rows 1024] [--steps 40] [--hosts]``: what the copy adds to a step; each
second step follows none.  With ``--hosts`` each rank has an agent of torchrun, so that it is a host, and its copy also goes to
the next one, over loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from chaos.elastic import RUN, run_elastic  # noqa: E402
from helpers.forked_commands import start_forked  # noqa: E402


def kill(num_kills: int, seed: int, limit_s: float) -> int:
    """Make runs until ``num_kills`` processes are lost, or for ``limit_s``; print a line each; return 1 if one is wrong."""
    end_s = time.monotonic() + limit_s
    noise, killed, runs, num_wrong, steps = random.Random(seed), Counter[str](), 0, 0, 0
    seconds: list[float] = []
    hung = 0
    while killed.total() < num_kills and time.monotonic() < end_s:
        found = run_elastic(noise)
        killed[f"{found.num_ranks} ranks, {'replaced' if found.is_replaced else 'not replaced'}"] += found.num_dead
        runs, num_wrong, steps = runs + 1, num_wrong + (not found.is_right), steps + found.num_steps
        seconds += found.recoveries_s
        hung += found.num_hung
        print(f"{'right' if found.is_right else 'WRONG'}: {found.text}", flush=True)
        if not found.is_right:
            print(found.details, flush=True)
    print(
        f"{killed.total()} losses, {hung} of them hung, in {runs} runs of {steps} steps, {num_wrong} wrong: {dict(killed)}"
    )
    print(f"from a notice until the state was loaded, {len(seconds)} times: {[round(each, 3) for each in seconds]} s")
    return int(num_wrong > 0)


# ---- What a survivor has, loss after loss.

MORTAL = """
import os, signal, sys, time
import torch, torch.distributed as dist, shardwise
from torch import nn
me, path = int(os.environ["RANK"]), sys.argv[1]
def build():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    for block in (*model, model):
        shardwise.fully_shard(block)
    return model, torch.optim.AdamW(model.parameters())
def step(run, model, optimizer):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_world_size() == 2 and me:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    if len(run.recoveries) >= 2 * int(sys.argv[2]) - 1:
        run.stop()
def log(run, _, told=[0]):
    if len(run.recoveries) > told[-1] and dist.get_world_size() == 1:
        told.append(len(run.recoveries))
        held = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")]
        files = [len(found) for _, _, found in os.walk(os.path.dirname(os.environ["TMPDIR"]))]
        row = len(run.recoveries), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), held[0], sum(files)
        print(*row, len(os.listdir(f"/proc/{os.getppid()}/fd")), flush=True, file=open(path, "a"))
shardwise.elastic(build, step, num_steps=10**6, on_commit=log)
"""


def watch_survivor(num_losses: int, limit_s: float) -> None:
    """Print threads, descriptors, KiB and files of a survivor, and descriptors of its launcher, after each loss."""
    with tempfile.TemporaryDirectory() as folder:
        program, rows = Path(folder, "program.py"), Path(folder, "rows")
        program.write_text(MORTAL)
        words = [*RUN, "-n", "2", "--max-restarts", str(num_losses), str(program), str(rows), str(num_losses)]
        with start_forked(words, {"TMPDIR": folder}) as command:
            with contextlib.suppress(AssertionError):
                command.communicate(timeout=min(limit_s, 1e6))
            command.kill()
        found = rows.read_text().splitlines()
    print("recoveries, threads, descriptors, KiB, files, descriptors of the launcher")
    for row in found[:: max(1, len(found) // 40)]:
        print(row)


# ---- Times, in processes that begin as a user's do.

PROGRAM = """
import json, os, signal, sys, time
import torch, torch.distributed as dist, shardwise
from shardwise.checkpoint import load, save
from torch import nn
how, folder, width, rows, kill_at, num_steps = json.loads(sys.argv[1])
def build():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6)]
    model = nn.Sequential(*blocks)
    for block in (*blocks, model):
        shardwise.fully_shard(block)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
def is_first(): return os.environ["RANK"] == "1" and not os.path.exists(f"{folder}/killed")
def one(number, model, optimizer):
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(number)).chunk(size)[rank]
    loss = model(x).square().mean()
    if number == kill_at and is_first():
        open(f"{folder}/killed", "w").write(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not rank:
        open(f"{folder}/ends", "a").write(f"{number} {time.monotonic()!r} {size}\\n")
if how != "disk":
    ends = []
    def step(run, model, optimizer):
        for _ in range(2 if kill_at < 0 else 1):  # the second follows no copy
            one(run.number, model, optimizer)
            ends.append(time.monotonic())
    run = shardwise.elastic(build, step, num_steps=num_steps)
    if not dist.get_rank():
        parts = [dict(each.seconds) for each in run.recoveries]
        open(f"{folder}/found", "w").write(json.dumps([parts, ends, run.num_bytes]))
else:
    dist.init_process_group("gloo")
    model, optimizer = build()
    state = {"model": model, "optimizer": optimizer}
    begin = load(folder, state).step if os.path.exists(f"{folder}/killed") else 0
    for number in range(begin, num_steps):
        one(number, model, optimizer)
        save(folder, state, step=number + 1, keep=2)
dist.destroy_process_group()
"""


def measure(how: str, num_ranks: int, sizes: tuple[int, int], kill_at: int, num_steps: int) -> tuple[float, list[Any]]:
    """Run the program; return the seconds from the kill to the end of that step, and what rank 0 has found."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        words = ["--elastic"] if how == "elastic" else ["--max-restarts", "1"]
        told = json.dumps([how, folder, *sizes, kill_at, num_steps])
        command = [sys.executable, "-m", "shardwise.cli.main", "run", "-n", str(num_ranks), *words, str(program), told]
        if how == "hosts":
            start_agents(num_ranks, [str(program), told])
        else:
            subprocess.run(command, check=True, timeout=300, capture_output=True)
        found = json.loads(Path(folder, "found").read_text()) if how != "disk" else []
        if kill_at < 0:
            return 0.0, found
        killed = float(Path(folder, "killed").read_text())
        ends = [line.split() for line in Path(folder, "ends").read_text().splitlines()]
        return min(
            float(end) for number, end, _ in ends if int(number) == kill_at and float(end) > killed
        ) - killed, found


def start_agents(num_agents: int, program: list[str]) -> None:
    """Run a program on one rank under each of so many agents of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_agents), "--nproc-per-node", "1"]
    words += ["--max-restarts", "1", "--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen([*words, *program], env=os.environ | more) for _ in range(num_agents)]
    codes = [agent.wait(300) for agent in agents]
    if any(codes):
        raise SystemExit("an agent has failed")


def time_all(repeats: int) -> None:
    """Print the times as tables."""
    sizes = (256, 1024)
    rows: list[dict[str, float]] = []
    for _ in range(repeats):
        seconds, (parts, *_) = measure("elastic", 4, sizes, 5, 8)
        (found,) = parts
        rows.append(
            {
                **found,
                "redone step, and the way of the kill to the launcher": seconds - sum(found.values()),
                "all": seconds,
            }
        )
    print("| from a kill at 4 ranks | median s |\n| --- | ---: |")
    for name in rows[0]:
        print(f"| {name} | {statistics.median(row[name] for row in rows):.3f} |")
    restarts = [measure("disk", 4, sizes, 5, 8)[0] for _ in range(max(1, repeats // 3))]
    print(f"| restart from disk | {statistics.median(restarts):.3f} |")


def time_copies(how: str, num_ranks: int, rows: int, num_steps: int) -> None:
    """Print what a step takes without the copy and with it, in turn."""
    _, (_, ends, num_bytes) = measure(how, num_ranks, (512, rows), -1, num_steps)
    seconds = [end - begin for begin, end in pairwise(ends)][10:]
    alone, copied = statistics.median(seconds[::2]), statistics.median(seconds[1::2])
    print(
        f"{num_ranks} {'hosts' if how == 'hosts' else 'ranks'}, {rows} rows: {1e3 * alone:.1f} ms without the copy, "
        f"{1e3 * copied:.1f} ms with it ({100 * (copied / alone - 1):+.1f} %), {num_bytes / 2**20:.1f} MiB"
    )


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kills", "flat", "times", "cost"))
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hosts", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "kills":
        sys.exit(kill(arguments.kills, arguments.seed, arguments.limit_s))
    elif arguments.what == "flat":
        watch_survivor(arguments.kills, arguments.limit_s)
    elif arguments.what == "times":
        time_all(arguments.repeats)
    else:
        time_copies("hosts" if arguments.hosts else "elastic", arguments.ranks, arguments.rows, arguments.steps)


if __name__ == "__main__":
    main()

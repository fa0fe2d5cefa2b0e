"""Kill ranks of a run with SIGKILL at random moments of its saves, which come after every step; resume it, again and again.

``python benchmarks/kill_saves.py`` writes results/kill_saves.json.  A run is killed and resumed until there were enough kills;
then an uninterrupted run of as many steps must have had the same losses at every step and have the same checkpoint in the end,
both to the bit.  After each kill, every checkpoint that is there must be whole to the byte, and no other may be gone.

A kill is aimed: once the folder of a save is seen, after a random part of the time that saves have lasted before; if that
save is over by then, the next one is waited for.  It fell into a save if the unfinished save was there after the signal.

Two kinds of lives: ranks forked from a server that has imported torch (fast; one is killed, or all at once), and, with
``--commands``, ``shardwise train`` itself, of which the launcher is killed, every third time a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from shardwise.checkpoint.contents import unlike_leaves
from shardwise.checkpoint.convert import CheckpointSource, compare_tensors
from shardwise.checkpoint.files import Files, list_checkpoints, verify
from shardwise.one_host import stay_on_loopback
from shardwise.recipes.config import ModelShape, TrainConfig
from shardwise.recipes.run_folder import Start
from shardwise.recipes.sharding import RunRanks
from shardwise.recipes.train import train

PRELOAD = ["torch", "shardwise.recipes.train", "shardwise.recipes.report"]
CONFIG = TrainConfig(
    model=ModelShape(layers=2, width=32, heads=2, context=16),
    steps=1_000_000, batch=4, warmup=10, lr=3e-3, log_every=1, eval_every=1_000_000, eval_windows=4, save_every=1, keep=2,
)  # fmt: skip
PATIENCE_S, GRACE_S = 600.0, 0.5  # a busy machine takes minutes to start four ranks
FIRST_SAVE_S = 0.04  # how long a save lasts, before one was seen
LEFTOVERS = (".saving-", ".removing-", ".replaced-")
_MOST_LENGTHS = 20


@dataclass(frozen=True)
class Kill:
    """What was killed, the newest step that was there then, and what of a save was there before and after the signal.

    Attributes:
        after_s: seconds since the save's folder was seen.  aims: saves that were waited for.
        has_committed: the save came to its end all the same: others than the killed rank did the rest.
    """

    what: str
    step: int
    was_saving: bool
    after_s: float
    aims: int
    has_committed: bool


class Aim:
    """Waits for a random moment of a save of ``run``, and knows how long saves last."""

    def __init__(self, run: Path, chance: random.Random) -> None:
        self._folder, self._chance = run / "checkpoints", chance
        self._lengths: list[float] = []

    def saving(self) -> str | None:
        """Return the name of the save that is on its way."""
        try:
            return next((name for name in os.listdir(self._folder) if name.startswith(LEFTOVERS[0])), None)
        except FileNotFoundError:
            return None

    def leftovers(self) -> list[str]:
        """Return what a save that is not over has in the folder."""
        return [name for name in os.listdir(self._folder) if name.startswith(LEFTOVERS)]

    def watch_one(self, until: float) -> None:
        """Note how long the next whole save lasts."""
        name, began = self._next(until)
        self._wait_while(name, until)
        self._lengths = [*self._lengths, time.monotonic() - began][-_MOST_LENGTHS:]

    def wait(self, until: float) -> tuple[float, int]:
        """Return in the middle of a save: seconds since it was seen, and how many were waited for."""
        aims = 0
        while True:
            aims += 1
            name, began = self._next(until)
            length = sorted(self._lengths)[len(self._lengths) // 2] if self._lengths else FIRST_SAVE_S
            self._wait_while(name, began + self._chance.uniform(0, length))
            now = time.monotonic()
            if self.saving() == name:
                return now - began, aims
            self._lengths = [*self._lengths, now - began][-_MOST_LENGTHS:]

    def _next(self, until: float) -> tuple[str, float]:
        """Return a save that begins now, and when."""
        self._wait_while(self.saving(), until)
        while (name := self.saving()) is None:
            if time.monotonic() > until:
                raise RuntimeError(f"{self._folder}: no save began")
            time.sleep(0.0002)
        return name, time.monotonic()

    def _wait_while(self, name: str | None, until: float) -> None:
        while name is not None and self.saving() == name and time.monotonic() < until:
            time.sleep(min(0.0002, max(0.0, until - time.monotonic())))


@dataclass(frozen=True)
class Report:
    """How a run of ``ranks`` ranks fared: ``steps`` steps with the losses of an uninterrupted run, and every kill."""

    ranks: int
    kind: str
    seed: int
    steps: int
    seconds: float
    kills: list[Kill]


class Life(Protocol):
    """Processes of one life of a run: ``pids``, of which ``pids[0]`` may be a launcher."""

    pids: list[int]

    def has_ended(self) -> str | None: ...
    def end(self) -> None: ...


class Forked:
    """Ranks that call the recipe, forked from a server."""

    def __init__(self, run: Path, config: TrainConfig, num_ranks: int, stop_at: int | None = None) -> None:
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="kill-saves-")
        store = str(Path(self._folder.name) / "store")
        args = (num_ranks, store, str(run), config, stop_at)
        self._ranks = [context.Process(target=_rank, args=(rank, *args)) for rank in range(num_ranks)]
        for rank in self._ranks:
            rank.start()
        self.pids = [rank.pid for rank in self._ranks]

    def has_ended(self) -> str | None:
        codes = [rank.exitcode for rank in self._ranks]
        return None if None in codes else f"exit codes {codes}"

    def end(self) -> None:
        """Do as the launcher does: what is left after a moment is killed."""
        deadline = time.monotonic() + GRACE_S
        for rank in self._ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
            rank.kill()
        for rank in self._ranks:
            rank.join()
        self._folder.cleanup()

    def wait(self) -> list[int]:
        """Return the exit codes of ranks that end by themselves."""
        for rank in self._ranks:
            rank.join(PATIENCE_S)
        codes = [rank.exitcode for rank in self._ranks]
        self.end()
        return codes


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _rank(rank: int, num_ranks: int, store: str, run: str, config: TrainConfig, stop_at: int | None) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.modules["torch.utils.tensorboard"] = cast(ModuleType, SimpleNamespace(SummaryWriter=MagicMock()))
    stay_on_loopback(os.environ)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=PATIENCE_S)
    place: dict[str, Any] = {"rank": rank, "world_size": num_ranks, "timeout": timeout}
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), **place)
    folder = Path(run)
    start = Start(resume=folder) if (folder / "config.json").exists() else Start(out=folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(start, config, RunRanks(rank, num_ranks, torch.device("cpu")), _stopping(folder, stop_at))
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)  # a group that has lost a rank is not waited for


def _stopping(run: Path, stop_at: int | None) -> Callable[[], contextlib.AbstractContextManager[Callable[[], int]]]:
    """Ask to stop after step ``stop_at`` of the run."""

    @contextlib.contextmanager
    def listening() -> Generator[Callable[[], int], None, None]:
        done = newest(run)

        def asked() -> int:
            nonlocal done
            done += 1
            return signal.SIGTERM if stop_at is not None and done >= stop_at else 0

        yield asked

    return listening


class Command:
    """``shardwise train`` with ranks of its own: ``pids[0]`` is the launcher."""

    def __init__(self, run: Path, config: TrainConfig, num_ranks: int) -> None:
        words = ["--resume", str(run)] if (run / "config.json").exists() else [*_words(config), "--out", str(run)]
        command = [sys.executable, "-m", "shardwise.cli.main", "train", "--device", "cpu", "--nproc", str(num_ranks)]
        self._process = subprocess.Popen(
            [*command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._num_ranks = num_ranks

    @property
    def pids(self) -> list[int]:
        pid = self._process.pid
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, below)]

    def has_ended(self) -> str | None:
        return (
            None
            if self._process.poll() is None
            else f"exit code {self._process.returncode}: {self._process.stderr.read()}"
        )

    def end(self) -> None:
        self._process.communicate(timeout=PATIENCE_S)


def _words(config: TrainConfig) -> list[str]:
    named = {
        **asdict(config.model), "steps": config.steps, "batch": config.batch, "warmup": config.warmup, "lr": config.lr,
        "log-every": 1, "eval-every": config.eval_every, "eval-windows": config.eval_windows, "save-every": 1,
        "keep": config.keep, "data": config.data,
    }  # fmt: skip
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def newest(run: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    return max((each.step for each in list_checkpoints(Files(), run / "checkpoints")), default=0)


def kill_once(run: Path, life: Life, aim: Aim, chance: random.Random, number: int) -> Kill:
    """Wait until the run has saved again, kill at a random moment of a save, and look at what is left.

    Raises: RuntimeError if the life ended by itself, or left a checkpoint that is not whole, or less than there was.
    """
    before, deadline = newest(run), time.monotonic() + PATIENCE_S
    while newest(run) <= before:
        ended = life.has_ended()
        if ended is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not go on after step {before}: {ended or 'it hangs'}")
        time.sleep(0.01)
    aim.watch_one(deadline)
    pids = life.pids
    is_launched = isinstance(life, Command)
    victim = chance.randrange(-1, len(pids))
    if is_launched:
        victim = chance.randrange(1, len(pids)) if number % 3 == 2 else 0
    what = "all ranks" if victim < 0 else "launcher" if is_launched and not victim else f"rank {victim - is_launched}"
    after_s, aims = aim.wait(deadline)
    for pid in pids if victim < 0 else [pids[victim]]:
        os.kill(pid, signal.SIGKILL)
    was_saving = bool(aim.leftovers())
    life.end()
    for pid in pids:
        _wait_until_gone(pid)
    for each in list_checkpoints(Files(), run / "checkpoints"):
        damage = verify(Files(), each.path)
        if damage:
            raise RuntimeError(f"killed {what} after step {before}: {damage}")
    after = newest(run)
    if after < before:
        raise RuntimeError(f"killed {what}: step {before} was there, and {after} is the newest now")
    return Kill(what, after, was_saving, round(after_s, 4), aims, was_saving and aim.saving() is None)


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)
    raise RuntimeError(f"process {pid} outlived the one that was killed")


def losses(run: Path) -> list[tuple[int, float]]:
    """Return every step's loss, in the order in which they stand in the file."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def differing(run: Path, other: Path) -> list[str]:
    """Return the names of what is not the same to the bit in the newest checkpoints of two runs.

    Each process begins with generators of Python and numpy of its own, which training does not use.
    """
    files = Files()
    places = [list_checkpoints(files, each / "checkpoints")[-1].path for each in (run, other)]
    first, second = map(CheckpointSource.open, places)
    found = [each.name for each in compare_tensors(first, second)]
    names = first.names ^ second.names
    changed = unlike_leaves(first.manifest.values, second.manifest.values)
    return [*found, *names, *(name for name in changed if not name.startswith("rank/"))]


def campaign(folder: Path, num_ranks: int, num_kills: int, seed: int, *, with_commands: bool = False) -> Report:
    """Kill and resume a run ``num_kills`` times, let it go on for three steps, and compare it with one that nobody killed.

    Raises: RuntimeError naming the first step with another loss.
    """
    chance, began = random.Random(seed), time.monotonic()
    text = folder / "text.txt"
    text.write_text("".join(f"{n} bottles stood on the wall, {n * n} bottles. " for n in range(600)))
    config, run = replace(CONFIG, data=str(text)), folder / "killed"
    kills: list[Kill] = []
    aim = Aim(run, chance)
    for number in range(num_kills):
        life = Command(run, config, num_ranks) if with_commands else Forked(run, config, num_ranks)
        kills.append(kill_once(run, life, aim, chance, number))
        print(f"W={num_ranks}: {len(kills)} of {num_kills}: {kills[-1]}", file=sys.stderr, flush=True)
    stop_at = newest(run) + 3
    for each in (run, folder / "whole"):
        codes = Forked(each, config, num_ranks, stop_at).wait()
        if any(codes):
            raise RuntimeError(f"{each} did not end well: exit codes {codes}")
    found, expected = losses(run), losses(folder / "whole")
    if found != expected or len(found) != stop_at:
        wrong = next(
            (pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]), (found[-1], expected[-1])
        )
        raise RuntimeError(f"the killed run has {wrong[0]}, the other {wrong[1]}, as (step, loss)")
    differences = differing(run, folder / "whole")
    if differences:
        raise RuntimeError(f"the checkpoints after step {stop_at} differ: {differences[:3]}")
    kind = "commands" if with_commands else "forked ranks"
    return Report(num_ranks, kind, seed, stop_at, time.monotonic() - began, kills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=70, help="per number of ranks (default: %(default)s)")
    parser.add_argument("--commands", type=int, default=30, help="kills of shardwise train itself, per number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kill_saves.json")
    arguments = parser.parse_args()
    reports: list[Report] = []
    for num_ranks in arguments.ranks:
        for count, with_commands in ((arguments.kills, False), (arguments.commands, True)):
            if count:
                with tempfile.TemporaryDirectory() as folder:
                    report = campaign(Path(folder), num_ranks, count, arguments.seed, with_commands=with_commands)
                reports.append(report)
                killed = {
                    what: sum(each.what == what for each in report.kills) for what in {k.what for k in report.kills}
                }
                print(f"{num_ranks} ranks, {report.kind}: {count} kills, {report.steps} equal losses, {killed}")
                arguments.out.write_text(json.dumps([_summary(each) for each in reports], indent=2) + "\n")


def _summary(report: Report) -> dict[str, Any]:
    killed = sorted({each.what for each in report.kills})
    return {
        "ranks": report.ranks,
        "kind": report.kind,
        "seed": report.seed,
        "kills": len(report.kills),
        "killed": {what: sum(each.what == what for each in report.kills) for what in killed},
        "kills_within_a_save": sum(each.was_saving for each in report.kills),
        "of_them_committed_all_the_same": sum(each.has_committed for each in report.kills),
        "within_a_save": {what: sum(each.what == what and each.was_saving for each in report.kills) for what in killed},
        "seconds_into_the_save": [each.after_s for each in report.kills],
        "steps_with_equal_losses": report.steps,
        "seconds": round(report.seconds, 1),
    }


if __name__ == "__main__":
    main()

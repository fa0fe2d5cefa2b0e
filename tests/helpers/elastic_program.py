"""A program whose ranks are killed: ``elastic_program.py SETTINGS``, a JSON object.

Sums of gradients are exact in it, so that its parameters are the same to the bit at any number of ranks; those of the kind
"reproducible" are not, and :class:`shardwise.Reproducible` fixes their order.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.checkpoint import finish, save
from shardwise.elastic.run import ElasticRun
from shardwise.testing import faults
from shardwise.torch_private import all_groups, timeout_s_of

NUM_STEPS, NUM_MICROBATCHES, WIDTH = 8, 12, 8
PLACES = (
    *("forward", "backward", "all-gather", "reduction", "optimizer step"),
    *("elastic commit", "elastic recovery", "init"),
)


is_over = threading.Event()  # a kill after the loop is not outlived


class Layers(nn.Module):
    """Every layer gets the input; the loss is linear in each, with other factors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = True  # forwards, in a buffer
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=number % 2 == 0) for number in range(3)])
        self.odd = nn.Parameter(torch.ones(5, 3))
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += int(self.counts)
        return sum((number + 1) * layer(x).sum() for number, layer in enumerate(self.layers)) + x.sum() * self.odd.sum()


def make_model() -> Layers:
    model = Layers()
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_((torch.arange(param.numel()).view(param.shape) + number) % 5)
    return model


def batch_of(step: int) -> torch.Tensor:
    """Return the inputs of all microbatches of a step: small whole numbers."""
    noise = torch.Generator("cpu").manual_seed(step)
    return torch.randint(-3, 4, (NUM_MICROBATCHES, WIDTH), generator=noise).float()


def make_optimizer(params: Any, kind: str) -> torch.optim.Optimizer:
    if kind == "zero":
        return shardwise.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.125, momentum=0.5)
    return torch.optim.SGD(params, lr=0.125, momentum=0.5)


def undisturbed(num_steps: int = NUM_STEPS, kind: str = "") -> dict[str, torch.Tensor]:
    """Return the parameters after ``num_steps`` steps in one process."""
    if kind == "reproducible":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = make_model()
    shard(model, kind if kind == "reproducible" else "zero")
    optimizer = make_optimizer(model.parameters(), "")
    fixed = fix_sums(model, optimizer) if kind == "reproducible" else None
    for step in range(num_steps):
        if fixed is not None:
            run_fixed(model, fixed, step)
        else:
            (model(batch_of(step)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    if fixed is None:
        return model.state_dict()
    found = shardwise.full_state_dict(model)
    dist.destroy_process_group()
    return found


def fix_sums(model: nn.Module, optimizer: torch.optim.Optimizer) -> shardwise.Reproducible:
    """Fix the order of sums; a buffer that counts forwards is none that Reproducible can sum."""
    assert isinstance(model, Layers)
    model.counts = False
    return shardwise.Reproducible(model, optimizer, num_microbatches=NUM_MICROBATCHES, seed=0)


def run_fixed(model: nn.Module, fixed: shardwise.Reproducible, step: int) -> None:
    """Run forward and backward of this rank's microbatches, whose gradients depend on the order of sums."""
    batch = torch.sin(batch_of(step)) / 3
    for number in fixed.microbatches():
        (torch.sin(model(batch[number : number + 1]) / 9) / NUM_MICROBATCHES).backward()


def read_outcome(out: Path) -> dict[str, Any]:
    """Compare what a run has left with one process; return what it says of itself."""
    found, more = torch.load(out)
    expected = undisturbed()
    assert {name: torch.equal(found[name], value) for name, value in expected.items()} == dict.fromkeys(expected, True)
    assert more["seen"] == NUM_STEPS
    return more


def shard(model: Layers, kind: str) -> None:
    if kind == "replicate":
        shardwise.replicate(model)
        return
    if kind == "zero":
        return
    for layer in model.layers:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)


def draw(process: int, number: int, random_kills: dict[str, Any]) -> str | float | None:
    """Return where this process is to be killed from its pass ``number`` on: a place, or milliseconds; None: not.

    Or how it is to hang, or to be interrupted.
    """
    noise = random.Random(f"{random_kills['seed']}/{process}/{number}")
    if process in random_kills["immune"] or noise.random() >= random_kills["rate"]:
        return None
    others = ("stop", "spin", "sleep", "interrupt", "interrupt", "slow exit")
    if "others" in random_kills and noise.random() < random_kills["others"]:
        return noise.choice(others)
    return noise.choice([*PLACES, noise.uniform(0, 30), noise.uniform(0, 30)])


def train(settings: dict[str, Any]) -> None:
    """Train, and let processes be killed as ``kills`` says: ``[process, place, step]``; a number as place: after ms.

    ``stuck``: ``[process, step]`` that waits for ever where Python does not run.  ``hangs``: ``[process, step, how]``.
    ``kill_told``: ``[process, number]`` that is killed in on_commit; ``kill_after``: in after.  ``late``: one that begins the
    step, and is killed, when all ``waiting`` processes have been interrupted in it.  ``ballast``: width of a further layer.
    ``random``: kills that are drawn, see :func:`draw`.  ``log``: a folder for what starts and ends.
    """
    process, kind = int(os.environ["RANK"]), settings.get("kind", "fully_shard")
    mistake = settings.get("mistake")
    if "transport" in settings:
        shardwise.set_default_transport(settings["transport"])
    kills = [[place, step] for number, place, step in settings.get("kills", ()) if number == process]
    num_steps = settings.get("num_steps", NUM_STEPS)
    with ExitStack() as stack:

        def set_faults(now: int) -> None:
            for place, step in [each for each in kills if each[1] == now]:
                kills.remove([place, step])
                if place in ("stop", "spin", "sleep"):
                    note(settings, f"hung-{process}")
                    hang(place)
                elif place in ("interrupt", "slow exit"):
                    if place == "slow exit":
                        leave_late()
                    note(settings, f"interrupted-{process}")
                    os.kill(os.getpid(), signal.SIGINT)
                elif isinstance(place, str):
                    stack.enter_context(faults.kill_at(place, rank=None))
                else:
                    kill_after(place)

        def build() -> dict[str, Any]:
            model = make_model()
            shard(model, kind)
            if kind == "zero":
                model = nn.parallel.DistributedDataParallel(model)
            made: dict[str, Any] = {"model": model, "optimizer": make_optimizer(model.parameters(), kind)}
            if "ballast" in settings:
                made["ballast"] = ballast = nn.Linear(settings["ballast"], settings["ballast"])
                made["optimizer"].add_param_group({"params": [*ballast.parameters()]})
                for param in ballast.parameters():
                    param.grad = torch.zeros_like(param)  # it gets momentum
            if kind == "reproducible":
                made["fixed"] = fix_sums(model, made["optimizer"])
            made["scheduler"] = torch.optim.lr_scheduler.ConstantLR(made["optimizer"], 1.0)
            made["user"] = {"seen": 0}
            if mistake == "list":
                return []  # pyright: ignore[reportReturnType]
            if mistake == "same model" and old:
                made["model"] = old[0]
            if mistake == "grows" and worlds:
                made["more"] = nn.Linear(2, 2)
            return made

        set_faults(-1)
        num_passes = 0
        worlds: list[int] = []
        told: list[int] = []
        if mistake == "group":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        note(settings, f"started-{process}")
        note(settings, f"store-{os.environ['MASTER_PORT']}")
        folder = settings.get("checkpoints")

        def step(run: ElasticRun, **state: Any) -> object:
            nonlocal num_passes
            set_faults(run.number)
            num_passes += 1
            if "random" in settings and (place := draw(process, num_passes, settings["random"])) is not None:
                kills.append([place, run.number])
                set_faults(run.number)
            if settings.get("stuck") == [process, run.number]:
                os.read(os.pipe()[0], 1)
            if settings.get("hangs", [])[:2] == [process, run.number]:
                hang(settings["hangs"][2])
            if settings.get("late") == [process, run.number]:
                while not all(Path(settings["log"], f"raised-{each}").exists() for each in settings["waiting"]):
                    time.sleep(0.01)
                time.sleep(0.5)  # they come to wait for this process in the next generation
                os.kill(os.getpid(), signal.SIGKILL)
            if settings.get("raises") == run.number and dist.get_rank() == 1:
                raise ValueError("no such column")
            if mistake == "old model" and run.recoveries:
                old[0](batch_of(run.number))
            if mistake == "old scheduler" and run.recoveries:
                old[1].step()
            if mistake is not None and not old:
                old.extend(
                    [state["model"], state["scheduler"]] if mistake != "average" else [copy.deepcopy(state["model"])]
                )
            if run.number >= 1 and settings.get("slow_ms"):
                time.sleep(settings["slow_ms"] / 1000)
            rank, size = dist.get_rank(), dist.get_world_size()
            try:
                if kind == "reproducible":
                    run_fixed(state["model"], state["fixed"], run.number)
                    loss = torch.zeros((), requires_grad=True)
                else:
                    loss = state["model"](batch_of(run.number).chunk(size)[rank])
                if mistake == "swallows" and run.number == 2 and rank == 1:
                    return 0.0  # as if it had caught an exception
                (loss * size / 4).backward()
            except RuntimeError:
                note(settings, f"raised-{process}")
                raise
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            state["scheduler"].step()
            state["user"]["seen"] += 1
            worlds.append(size)
            if folder is not None:
                save(folder, state, step=run.number + 1, wait=not settings.get("background"))
            if run.number + 1 == settings.get("leaves"):
                run.stop()
            if settings.get("differs") == run.number:
                state["user"]["seen"] += rank
            return threading.Lock() if mistake == "lock" else float(rank)

        def on_commit(run: ElasticRun, result: Any) -> None:
            if "kill_told" in settings:
                if [process, run.number] == settings["kill_told"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier()  # the others wait here for the one that is killed
            told.append(run.number)
            results.append(result - dist.get_rank())

        def after(run: ElasticRun) -> None:
            if settings.get("kill_after") == process:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            is_over.set()

        old: list[Any] = []
        results: list[float] = []
        run = shardwise.elastic(
            build,
            step,
            num_steps=num_steps,
            num_microbatches=settings.get("V", NUM_MICROBATCHES),
            on_commit=on_commit,
            after=after,
            folder=folder,
        )
    is_watching = "shardwise-elastic" in [each.name for each in threading.enumerate()]
    if folder is not None:
        finish(folder)
    state = run.state
    note(settings, f"ended-{process}-{num_passes}")
    inner = getattr(state["model"], "module", state["model"])
    found = shardwise.full_state_dict(inner)
    if dist.get_rank() == 0:
        more = {"seen": state["user"]["seen"], "worlds": worlds, "recoveries": [r.cause for r in run.recoveries]}
        more |= {"is_watching": is_watching, "told": told, "results": results}
        more["num_bytes"] = run.num_bytes
        more["timeouts_s"] = [timeout_s_of(group) for group in all_groups()]
        more["seconds"] = [dict(r.seconds) for r in run.recoveries]
        more |= {"threads": len(os.listdir("/proc/self/task")), "fds": len(os.listdir("/proc/self/fd"))}
        more |= {"momentum": len(state["optimizer"].state_dict()["state"]) if kind != "zero" else 0}
        torch.save([found, more], settings["out"])
    dist.destroy_process_group()


def hang(how: str) -> None:
    """Stop, or spin, or sleep, for ever."""
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how == "spin":
        pass
    time.sleep(1e6)


def leave_late() -> None:
    """Let this process take seconds to exit after an exception, as the exit hook of a tracker may."""
    hook = sys.excepthook
    sys.excepthook = lambda *error: (hook(*error), time.sleep(4.0))


def note(settings: dict[str, Any], what: str) -> None:
    """Make an empty file of this name in the folder of the log, if there is one."""
    if "log" in settings:
        Path(settings["log"], what).touch()


def kill_after(milliseconds: float) -> Callable[[], None]:
    """Kill this process from another thread."""

    def kill() -> None:
        if not is_over.wait(milliseconds / 1000):
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return kill


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2)
    try:
        train(json.loads(sys.argv[1]))
    finally:  # also a spare that was not needed
        note(json.loads(sys.argv[1]), f"left-{os.environ['RANK']}")

"""Make the mistakes of newcomers on two ranks over gloo, each in new processes; write down what each rank is told, and when.

Run: ``python benchmarks/mistakes.py [--only PART_OF_A_NAME] [--out FILE.md]``.  Seconds are from the mistake to the error of
the slower rank.  The group's timeout is torch's, 30 minutes; what waits are in vain is known sooner.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import MixedPrecisionPolicy, ShardedOptimizer, StepMeter, ZeroRedundancyOptimizer, fully_shard
from shardwise.checkpoint import load, save

NUM_RANKS, LIMIT_S = 2, 180.0
MISTAKES: dict[str, Callable[[int], Any]] = {}


def mistake(name: str) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    """Add a function of the rank to the table."""

    def add(function: Callable[[int], Any]) -> Callable[[int], Any]:
        MISTAKES[name] = function
        return function

    return add


def plain(*more: nn.Module, seed: int = 0) -> nn.Sequential:
    """Return a small model, the same on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *more, nn.Linear(16, 8))


def sharded(*more: nn.Module) -> Any:
    """Return the same model, sharded."""
    model = plain(*more)
    fully_shard(model[0])
    return fully_shard(model)


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """Return a loss on a batch from ``seed``."""
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean()


def train(model: nn.Module, optimizer: Any = None, steps: int = 3, seed: int = 0) -> Any:
    """Make some steps; return the optimizer."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(model, seed + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# ---- Calls on one rank alone: the other one goes on to its next step.


def _on_rank_0(call: Callable[[Any], object]) -> Callable[[int], None]:
    def run(rank: int) -> None:
        model = sharded()
        optimizer = train(model)
        if rank == 0:
            call(model)
        train(model, optimizer)

    return run


mistake("save on rank 0 alone")(_on_rank_0(lambda model: save(_folder(), {"model": model}, step=1)))
mistake("full_state_dict on rank 0 alone")(_on_rank_0(lambda model: shardwise.full_state_dict(model)))
mistake("full_tensor() on rank 0 alone")(_on_rank_0(lambda model: model[0].weight.full_tensor()))
mistake("validation on rank 0 alone")(_on_rank_0(lambda model: loss_of(model.eval())))
mistake("StepMeter.log on rank 0 alone")(_on_rank_0(lambda model: _log(model)))


def _log(model: nn.Module) -> None:
    meter = StepMeter(model, every=1)
    for _ in range(2):
        with meter.step():
            pass
        meter.log(loss=0.0)


@mistake("torch's clip_grad_norm_ on rank 0 alone")
def _(rank: int) -> None:
    model = sharded()
    optimizer = train(model)
    loss_of(model).backward()
    if rank == 0:
        total: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total.full_tensor()
    train(model, optimizer)


@mistake("rank 1 has one batch more")
def _(rank: int) -> None:
    train(sharded(), steps=3 + rank)


# ---- Optimizers.


@mistake("LBFGS over shards")
def _(rank: int) -> None:
    model = sharded()
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: _closure(model, optimizer))


@mistake("Adafactor over shards")
def _(rank: int) -> None:
    model = sharded()
    train(model, torch.optim.Adafactor(model.parameters()))


@mistake("torch's Muon over shards")
def _(rank: int) -> None:
    model = sharded()
    train(model, torch.optim.Muon([param for param in model.parameters() if param.dim() == 2]))


@mistake("the optimizer is made before the model is sharded")
def _(rank: int) -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    train(fully_shard(model), optimizer)


@mistake("ShardedOptimizer over a model that was never sharded")
def _(rank: int) -> None:
    model = plain()
    train(model, ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW), steps=100, seed=100 * rank)


@mistake("ZeroRedundancyOptimizer without DDP")
def _(rank: int) -> None:
    model = plain()
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2), seed=100 * rank)


# ---- Models and arguments.


@mistake("a seed per rank")
def _(rank: int) -> None:
    train(fully_shard(plain(seed=rank)))


@mistake("an integer as param_dtype")
def _(rank: int) -> None:
    train(fully_shard(plain(), mp_policy=MixedPrecisionPolicy(torch.int8)))


@mistake("a dtype in place of a policy")
def _(rank: int) -> None:
    policy: Any = torch.bfloat16
    train(fully_shard(plain(), mp_policy=policy))


@mistake("an argument of FSDP1")
def _(rank: int) -> None:
    train(shardwise.shard_model(plain(), auto_wrap_policy=None))  # pyright: ignore[reportCallIssue]


@mistake("names of a mesh the other way round")
def _(rank: int) -> None:
    train(fully_shard(plain(), mesh=init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("shard", "replicate"))))


@mistake("DDP around a sharded model")
def _(rank: int) -> None:
    train(nn.parallel.DistributedDataParallel(sharded()))


@mistake("model.forward(x) in place of model(x)")
def _(rank: int) -> None:
    sharded().forward(torch.randn(4, 8)).sum().backward()


@mistake("an L2 penalty over the parameters in the loss")
def _(rank: int) -> None:
    model = sharded()
    (loss_of(model) + 0.01 * sum(param.square().sum() for param in model.parameters())).backward()


@mistake("arithmetic of a shard with a plain tensor")
def _(rank: int) -> None:
    model = sharded()
    train(model)
    with torch.no_grad():
        model[0].weight.add_(0.01 * torch.randn(16, 8))


@mistake("gradients are never synced")
def _(rank: int) -> None:
    model = sharded()
    model.set_requires_gradient_sync(False)
    train(model)


# ---- Checkpoints, and the end.


@mistake("torch.save(model.state_dict()) on rank 0")
def _(rank: int) -> None:
    model = sharded()
    train(model)
    if rank == 0:
        torch.save(model.state_dict(), "half.pt")
    dist.barrier()
    plain().load_state_dict(torch.load("half.pt", weights_only=False))


@mistake("save without step")
def _(rank: int) -> None:
    save(_folder(), {"model": sharded()})  # pyright: ignore[reportCallIssue]


@mistake("a time stamp per rank in the folder of save")
def _(rank: int) -> None:
    save(f"{_folder()}-{datetime.now():%H%M%S.%f}", {"model": sharded()}, step=1)


@mistake("BatchNorm over batches of each rank, then save")
def _(rank: int) -> None:
    model = sharded(nn.BatchNorm1d(16))
    train(model, seed=100 * rank)
    save(_folder(), {"model": model}, step=1)


@mistake("the state of another optimizer class is loaded")
def _(rank: int) -> None:
    model = sharded()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd)
    save(_folder(), {"model": model, "optimizer": sgd}, step=1)
    load(_folder(), {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


@mistake("the default group is destroyed before training ends")
def _(rank: int) -> None:
    model = sharded()
    train(model)
    dist.destroy_process_group()
    train(model)


@mistake("the default group is destroyed on rank 0, then save")
def _(rank: int) -> None:
    model = sharded()
    train(model)
    if rank == 0:
        dist.destroy_process_group()
    save(_folder(), {"model": model}, step=1)


# ---- Running them.


def _closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss


def _folder() -> str:
    return "run"  # in the working directory, which each mistake has for itself


def run_rank(name: str) -> None:
    """Make the mistake on this rank; write what it is told into ``rank-N``."""
    rank, warned = int(os.environ["RANK"]), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(f"warning: {record.getMessage()}")
    logging.getLogger("shardwise").addHandler(handler)
    dist.init_process_group("gloo")
    dist.barrier()
    start, said, code = time.monotonic(), "no error", 0
    try:
        MISTAKES[name](rank)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as for an error that ends the program: it adds notes
        said, code = (
            " ".join(
                [f"{type(error).__name__}: {_FOLDERS.sub('', str(error))}"[:280], *getattr(error, "__notes__", [])]
            ),
            1,
        )
    seconds = time.monotonic() - start
    Path(f"rank-{rank}").write_text(json.dumps([seconds, [*warned, said]]))
    sys.stdout.flush()
    sys.exit(code)


def run(name: str) -> list[tuple[float, list[str]]]:
    """Make a mistake on new processes; return seconds and texts of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--rank-of", name]
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # as under torchrun
        told = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TMPDIR": folder}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        told |= {"TORCHELASTIC_RUN_ID": "mistakes"}
        path = os.pathsep.join([str(Path(shardwise.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        ranks = [
            subprocess.Popen(
                words,
                cwd=folder,
                env={**told, "RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "PYTHONPATH": path},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(NUM_RANKS)
        ]
        deadline = time.monotonic() + LIMIT_S
        for rank in ranks:
            try:
                rank.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
        found: list[tuple[float, list[str]]] = []
        for rank in range(NUM_RANKS):
            file = Path(folder) / f"rank-{rank}"
            seconds, texts = json.loads(file.read_text()) if file.exists() else (LIMIT_S, ["HANGS"])
            found.append((seconds, [_FOLDERS.sub("", text) for text in texts]))
        return found


_FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")  # of this machine, before a text is cut


def _cell(texts: list[str]) -> str:
    lines = [" ".join(text.replace("|", "\\|").split())[:500] for text in texts if text]
    return " <br> ".join(f"`{line}`" for line in lines)


def main() -> None:
    """Make all mistakes, or some; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--out", default="", help="file for the table")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of)
    lines = [
        "# What newcomers' mistakes are told",
        "",
        f"Written by `benchmarks/mistakes.py`: two ranks over gloo, torch {torch.__version__.split('+')[0]}, two cores with "
        "other work. The first characters of what each rank raises or logs.",
        "",
        "| mistake | seconds | rank 0 | rank 1 |",
        "| --- | ---: | --- | --- |",
    ]
    for name in (name for name in MISTAKES if args.only in name):
        ranks = run(name)
        cells = [_cell(texts) for _, texts in ranks]
        same = len(set(cells)) == 1
        lines.append(f"| {name} | {max(s for s, _ in ranks):.1f} | {cells[0]} | {'the same' if same else cells[1]} |")
        print(lines[-1], flush=True)
    if args.out:
        Path(args.out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

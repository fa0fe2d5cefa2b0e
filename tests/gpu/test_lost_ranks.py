"""A rank that will not come, where the others wait for it in a kernel: named on all of them, and nobody hangs or is aborted."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.models import Block
from torch import nn

from shardwise import ShardwiseError, ZeroRedundancyOptimizer, fully_shard, replicate
from shardwise.testing import WorkerPool
from shardwise.testing.pool import share_gpus

pytestmark = pytest.mark.gpu


def build(api: str, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(256, 512) for _ in range(3))).to(device)
    if api == "zero":
        ddp = nn.parallel.DistributedDataParallel(model)
        return ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    if api == "fully_shard":
        for block in model:
            fully_shard(block)
    (fully_shard if api == "fully_shard" else replicate)(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def lose_one(api: str, how: str, folder: Path, limit_s: float) -> None:
    """Train; in the third step rank 1 does ``how``.  Write down what rank 0 raises, and end without torch's destructors."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else torch ends the process, if NCCL finds it out first
    rank, limit = int(os.environ["RANK"]), timedelta(seconds=limit_s)
    device = share_gpus(rank, 2)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=limit)
    model, optimizer = build(api, device)
    x, begin = torch.ones(4, 256, device=device), 0.0
    try:
        for step in range(20):
            loss = model(x).square().mean()
            if step == 2:
                torch.cuda.synchronize()
                begin = time.monotonic()
                if rank == 1 and how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == 1:  # for longer than it is waited for
                    time.sleep(2 * limit_s)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
    except Exception as error:
        if rank == 0:
            told = [type(error).__name__, str(error), time.monotonic() - begin]
            (folder / "told").write_text(json.dumps(told))
    os._exit(0)


@pytest.mark.parametrize(
    ("api", "how", "limit_s", "most_s"),
    [
        ("fully_shard", "kill", 300.0, 25.0),
        ("replicate", "kill", 300.0, 25.0),
        ("fully_shard", "late", 24.0, 24.0),
        ("zero", "late", 24.0, 24.0),
    ],
)
def test_who_waits_for_it_says_its_name(
    api: str, how: str, limit_s: float, most_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.testing.pool.GRACE_S", 30.0)  # for what is tested
    asked = {"api": api, "how": how, "folder": tmp_path, "limit_s": limit_s}
    with WorkerPool(2, 90.0) as pool:
        pool.attempt(lose_one, num_ranks=2, backend="none", **asked)
    kind, text, seconds = json.loads((tmp_path / "told").read_text())
    assert kind in ("TransportError", "DesyncError")
    assert ("rank 1 is gone" if how == "kill" else "rank 1 reported nothing") in text
    assert seconds < most_s


def differing(kind: str) -> str:
    device = torch.device("cuda", torch.cuda.current_device())
    width = 8 + dist.get_rank() * (kind == "width")
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), *[nn.Linear(width, 8)] * (kind != "block" or dist.get_rank()))
    if kind == "dtype" and dist.get_rank():
        model.bfloat16()
    if kind == "frozen" and dist.get_rank():
        model[0].requires_grad_(False)
    try:
        fully_shard(model.to(device))
        model(torch.ones(2, 8, device=device, dtype=next(model.parameters()).dtype)).sum().backward()
        torch.cuda.synchronize()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("kind", ["width", "block", "dtype", "frozen"])
def test_ranks_that_differ_are_told_before_the_first_kernel(kind: str, pool: WorkerPool) -> None:
    found = pool.run(differing, num_ranks=2, backend="nccl", fresh=True, kind=kind)
    assert all(text.startswith("DesyncError") for text in found), found

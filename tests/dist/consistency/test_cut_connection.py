"""Two hosts, a cable between them that is cut: each side says so within seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack

import pytest
from helpers.network import ADDRESS, Networks, two_networks

pytestmark = pytest.mark.chaos
LIMIT_S = 10.0
_RANK = """
import os, sys, time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock
import torch, torch.distributed as dist
import shardwise
from shardwise.consistency import process_groups

rank, size, API, transport = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
host = rank * 2 // size
os.environ["GLOO_SOCKET_IFNAME"] = ("inside", "outside")[host]
store = dist.TCPStore(sys.argv[5], 29400, size, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
shardwise.set_default_transport(transport)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
with mock.patch.object(process_groups, "BOOT_ID", SimpleNamespace(read_text=lambda: f"host {host}")):
    if API in ("fully_shard", "whole_matrix"):
        for module in (model[0], model[2], model):
            shardwise.fully_shard(module)
    elif API == "replicate":
        shardwise.replicate(model)
    else:
        shardwise.shard_model(model, strategy="zero2", min_unit_bytes=0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    if API == "whole_matrix":
        plain = shardwise.ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, lr=0.1, update="whole_matrix")
    try:
        for step in range(1_000_000):
            model(torch.randn(4, 32)).square().mean().backward()
            plain.step()
            plain.zero_grad()
            if step == 20:
                print("trains", flush=True)
    except BaseException:
        print(time.monotonic(), flush=True)
        raise
"""


@pytest.fixture
def networks() -> Generator[Networks, None, None]:
    with two_networks() as found:
        assert found is not None, "this user may not make network namespaces: run it where `unshare --user --net` works"
        yield found


@pytest.mark.parametrize(
    ("api", "transport", "ranks_per_host"),
    [
        ("fully_shard", "gloo", 1),
        ("fully_shard", "collective", 1),
        ("replicate", "gloo", 1),
        ("zero2", "gloo", 1),
        ("fully_shard", "auto", 2),
        ("whole_matrix", "auto", 2),
        ("replicate", "auto", 2),
        ("zero2", "auto", 2),
    ],
)
def test_a_cut_cable_is_named_on_both_sides(networks: Networks, api: str, transport: str, ranks_per_host: int) -> None:
    size = 2 * ranks_per_host
    with ExitStack() as stack:
        ranks: list[subprocess.Popen[str]] = []
        for rank in range(size):
            place = networks.inside if rank < ranks_per_host else networks.outside
            words = [*networks.enter(place), sys.executable, "-W", "ignore", "-c", _RANK]
            words += [str(rank), str(size), api, transport, ADDRESS]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "trains\n"
        networks.cut_cable()
        cut = time.monotonic()
        for rank, process in enumerate(ranks):
            raised, printed = process.communicate(timeout=60)
            last = printed[printed.rindex("Traceback") :]
            print(rank, float(raised) - cut, last.splitlines()[-1])
            assert float(raised) - cut < LIMIT_S
            assert "Error: " in last
            assert "shardwise.errors" in last
            is_first_host = rank < ranks_per_host
            others = range(ranks_per_host, size) if is_first_host else range(ranks_per_host)
            named = any(f"rank {other}" in last or f"ranks {other}" in last for other in others)
            assert named or "rank 0, unless the launcher does" in last, last

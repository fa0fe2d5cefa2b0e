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
import torch, torch.distributed as dist
import shardwise

rank, door, transport = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["GLOO_SOCKET_IFNAME"] = ("inside", "outside")[rank]
store = dist.TCPStore(sys.argv[4], 29400, 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
shardwise.set_default_transport(transport)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
if door == "fully_shard":
    for module in (model[0], model[2], model):
        shardwise.fully_shard(module)
elif door == "replicate":
    shardwise.replicate(model)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
zero = shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1) if door == "zero2" else None
try:
    for step in range(1_000_000):
        model(torch.randn(4, 32)).square().mean().backward()
        if zero is not None:
            zero.reduce_gradients()
        (zero or plain).step()
        (zero or plain).zero_grad()
        if step == 20:
            print("trains", flush=True)
except BaseException:
    print(time.monotonic(), flush=True)
    raise
"""


@pytest.fixture(scope="module")
def networks() -> Generator[Networks, None, None]:
    with two_networks() as found:
        assert found is not None, "this user may not make network namespaces: run it where `unshare --user --net` works"
        yield found


@pytest.mark.parametrize(
    ("door", "transport"),
    [("fully_shard", "gloo"), ("fully_shard", "collective"), ("replicate", "gloo"), ("zero2", "gloo")],
)
def test_a_cut_cable_is_named_on_both_sides(networks: Networks, door: str, transport: str) -> None:
    outside = [*networks.enter(networks.outside), "ip", "link", "set", "outside"]
    subprocess.run([*outside, "up"], check=True)
    with ExitStack() as stack:
        ranks: list[subprocess.Popen[str]] = []
        for rank, place in enumerate((networks.inside, networks.outside)):
            words = [*networks.enter(place), sys.executable, "-W", "ignore", "-c", _RANK]
            words += [str(rank), door, transport, ADDRESS]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "trains\n"
        subprocess.run([*outside, "down"], check=True)
        cut = time.monotonic()
        for rank, process in enumerate(ranks):
            raised, printed = process.communicate(timeout=60)
            assert float(raised) - cut < LIMIT_S
            last = printed[printed.rindex("Traceback") :]
            assert "Error: " in last
            assert "shardwise.errors" in last
            assert (f"rank {1 - rank}" in last) or ("rank 0, unless the launcher does" in last), last

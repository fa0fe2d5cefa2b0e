"""What an interpreter of its own shows: memory that goes back, and the ends of processes.  One imports torch for all tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# ---- Memory that a step has used stays with the process, and goes back with the model.

HEAP = """
import ctypes, os, sys, torch
from shardwise.collectives.streams import BufferPool, keep_heap

libc = ctypes.CDLL(None)
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
device = torch.device("cpu")
is_kept = bool(child := os.fork())
if is_kept:
    os.waitpid(child, 0)  # its numbers come first
owner = BufferPool(device)
if is_kept:
    keep_heap(owner, device)
start = libc.sbrk(0)
places = [0] * 2000
for index in range(2000):
    places[index] = libc.malloc(1 << 16)  # 125 MiB, and nothing small between that could stay
grown = libc.sbrk(0)
for place in places:
    libc.free(place)
kept = libc.sbrk(0)
del owner
print(grown - start, kept - start, libc.sbrk(0) - start, flush=True)
"""
STEPS = """
import resource, torch, shardwise

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
model = torch.nn.Sequential(*(block() for _ in range(4)))
for layer in model:
    shardwise.fully_shard(layer)
shardwise.fully_shard(model)
faults = []
for step in range(12):
    model(torch.ones(2000, 64)).sum().backward()  # 2 MiB per activation
    model.zero_grad()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-5])
torch.distributed.destroy_process_group()
"""

# ---- Ends of processes.

EXITS = """
import os, sys, torch, torch.distributed as dist
import shardwise.consistency.process_groups as at_exit
from shardwise import fully_shard
for name, end in (("kept", lambda: None), ("destroyed", dist.destroy_process_group)):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    at_exit.settle = lambda: print(name, flush=True)
    for _ in range(2):
        fully_shard(torch.nn.Linear(2, 2))
    end()
    sys.exit()
"""
LOST = """
import os, sys, threading
import torch.distributed as dist
from multiprocessing.util import Finalize
from shardwise.collectives.streams import DeviceWatch
for program in ("pass", "raise KeyError(7)", "watch._has_reported = True"):
    if child := os.fork():
        print(program, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    store = dist.HashStore()
    watch = DeviceWatch(store, 0, range(2), 60.0, lambda: 100.0, lambda: None)
    Finalize(None, lambda: print("torn down", flush=True), exitpriority=-2000)
    Finalize(None, watch.end_process, exitpriority=-1000)
    exec(program)
    sys.exit()
"""

SCRIPTS = {"heap": HEAP, "steps": STEPS, "exits": EXITS, "lost": LOST}
ALL = """
import os, sys, torch, shardwise
for name, script in scripts.items():
    if child := os.fork():
        os.waitpid(child, 0)
        print(f"end of {name}", flush=True)
        continue
    exec(script)
    sys.exit()
"""


@pytest.fixture(scope="module")
def ended() -> tuple[dict[str, list[str]], str]:
    """The lines that each script prints, which run in forks of one process, and what they write to standard error."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC"))
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"scripts = {SCRIPTS!r}\n{ALL}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found, rest = dict[str, list[str]](), done.stdout
    for name in SCRIPTS:
        lines, _, rest = rest.partition(f"end of {name}\n")
        found[name] = lines.splitlines()
    return found, done.stderr


def test_the_heap_stays_as_large_as_it_was_and_goes_back_with_its_owner(
    ended: tuple[dict[str, list[str]], str],
) -> None:
    plain_grown, plain_kept, _, grown, kept, left = [int(word) for line in ended[0]["heap"] for word in line.split()]
    assert grown > 100 << 20
    assert kept == grown
    assert left < 20 << 20
    assert plain_grown > 100 << 20
    assert plain_kept < 20 << 20


def test_warm_steps_have_hardly_any_page_faults(ended: tuple[dict[str, list[str]], str]) -> None:
    (faults,) = map(int, ended[0]["steps"])
    assert faults < 4 * 256, "a step takes its memory from the kernel again"


def test_threads_are_waited_for_once_at_the_end_of_a_process(ended: tuple[dict[str, list[str]], str]) -> None:
    """Also where groups were destroyed: what keeps one, as a sharded model does, keeps its threads."""
    assert ended[0]["exits"] == ["kept", "destroyed"]


def test_a_process_that_has_lost_a_rank_ends_without_the_destructors_that_wait_for_it(
    ended: tuple[dict[str, list[str]], str],
) -> None:
    assert ended[0]["lost"] == ["torn down", "pass 0", "raise KeyError(7) 1", "watch._has_reported = True 1"]
    assert ended[1].count("KeyError: 7") == 1

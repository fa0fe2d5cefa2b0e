"""Memory that a step has used stays with the process, and goes back with the model; in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAP = """
import ctypes, os, sys, torch
from shardwise.collectives.buffer_pool import BufferPool, keep_heap

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
model = torch.nn.Sequential(*(block() for _ in range(8)))
for layer in model:
    shardwise.fully_shard(layer)
shardwise.fully_shard(model)
faults = []
for step in range(24):
    model(torch.ones(2000, 64)).sum().backward()  # 2 MiB per activation
    model.zero_grad()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-9])
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def printed() -> list[int]:
    """The numbers that the scripts print, which run in two forks of one process."""
    both = (
        "import os, torch, shardwise\nif child := os.fork():\n    os.waitpid(child, 0)\nexec({0!r} if child else {1!r})"
    )
    script = both.format(STEPS, HEAP)
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC"))
    }
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return [int(word) for word in ended.stdout.split()]


def test_the_heap_stays_as_large_as_it_was_and_goes_back_with_its_owner(printed: list[int]) -> None:
    plain_grown, plain_kept, _, grown, kept, left = printed[:6]
    assert grown > 100 << 20
    assert kept == grown
    assert left < 20 << 20
    assert plain_grown > 100 << 20
    assert plain_kept < 20 << 20


def test_warm_steps_have_hardly_any_page_faults(printed: list[int]) -> None:
    (faults,) = printed[6:]
    assert faults < 8 * 256, "a step takes its memory from the kernel again"

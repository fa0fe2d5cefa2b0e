"""The end of the heap stays where a step had brought it, and goes back with the model; in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from shardwise.collectives.buffer_pool import HeapTop

HEAP = """
import ctypes, sys, torch
from shardwise.collectives.buffer_pool import HeapTop

libc = ctypes.CDLL(None)
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
heap = HeapTop(torch.device("cpu"))
start = libc.sbrk(0)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
places = [0] * 2000
for index in range(2000):
    places[index] = libc.malloc(1 << 16)  # 125 MiB, and nothing small between that could stay
grown = libc.sbrk(0)
if sys.argv[1] == "kept":
    heap.keep()
for place in places:
    libc.free(place)
libc.malloc_trim(0)
kept = libc.sbrk(0)
del heap
libc.malloc_trim(0)
print(grown - start, kept - start, libc.sbrk(0) - start)
"""
HOLES = """
import ctypes, torch
from shardwise.collectives import buffer_pool as heap_top

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
places = [libc.malloc(1 << 16) for _ in range(400)]
for place in places[:200:2]:
    libc.free(place)  # a hundred holes
heap = heap_top.HeapTop(torch.device("cpu"))
heap_top._MOST_CHUNKS = 1
heap.keep()
print(heap.limit - heap.find_end())
heap_top._MOST_CHUNKS = 256
heap.keep()
print(heap.limit - heap.find_end())
"""
STEPS = """
import torch, shardwise
from shardwise.fsdp.engine import live_engines

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
for layer in model:
    shardwise.fully_shard(layer)
shardwise.fully_shard(model)
moves = []
for step in range(24):
    model(torch.ones(512, 64)).sum().backward()  # 128 KiB, 8 times
    model.zero_grad()
    (engine,) = live_engines
    moves.append(engine.comm_ctx.heap.num_moves)
print(moves[0], moves[-1])
torch.distributed.destroy_process_group()
"""

needs_heap = pytest.mark.skipif(not HeapTop(torch.device("cpu")).is_on, reason="the C library is not glibc")


def run(script: str, *words: str) -> list[int]:
    """Return the numbers that ``script`` prints."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC"))
    }
    ended = subprocess.run(
        [sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    return [int(word) for word in ended.stdout.split()]


@needs_heap
def test_the_heap_stays_as_large_as_it_was_and_goes_back_with_its_owner() -> None:
    grown, kept, left = run(HEAP, "kept")
    assert grown > 100 << 20
    assert kept > grown - (2 << 20)
    assert left < 20 << 20
    grown, kept, left = run(HEAP, "plain")
    assert grown > 100 << 20
    assert kept < 20 << 20


@needs_heap
def test_a_search_that_ended_among_holes_is_made_again_once_the_heap_has_grown() -> None:
    too_short, reached = run(HOLES)
    assert too_short == 64 << 20
    assert reached == 1 << 20


@needs_heap
def test_backwards_look_at_the_heap_and_then_leave_it_alone() -> None:
    first, last = run(STEPS)
    assert 1 <= first <= last <= 8  # of 216 backwards of units


def test_other_devices_have_no_heap_to_keep() -> None:
    heap = HeapTop(torch.device("meta"))
    heap.keep()
    assert not heap.is_on
    assert heap.num_moves == 0
    assert heap.find_end() <= heap.limit

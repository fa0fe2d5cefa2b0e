"""Guarded memory: the guards see what they are for, and a slice of the distributed tests runs clean under both together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.scripts import load_script

guard = load_script("tests/guard/run.py")

pytestmark = pytest.mark.skipif(guard.compiler() is None, reason="no C compiler to build the guards with")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("guard")
    return {name: guard.build(name, folder) for name in guard.GUARDS}


BLOCK = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.free.argtypes = [ctypes.c_void_p]
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
def tensor(size):
    block = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(block), ctypes.c_size_t(64), ctypes.c_size_t(size)) == 0
    return block.value
"""
WRONG = {
    "fence": {
        "use after free": (
            "block = tensor(64); libc.free(block); ctypes.memset(block, 1, 1)",
            -11,
            "Segmentation fault",
        ),
        "write behind the end": ("ctypes.memset(tensor(64), 1, 65)", -11, "Segmentation fault"),
        "the kernel writes to freed memory": (
            "block = tensor(64); ends = os.pipe(); os.write(ends[1], b'late'); libc.free(block)\n"
            "libc.read(ends[0], ctypes.c_void_p(block), ctypes.c_size_t(4))",
            -6,
            "guard: read of 4 bytes",
        ),
        "the kernel writes behind the end": (
            "block = tensor(64); ends = os.pipe(); os.write(ends[1], b'late')\n"
            "libc.read(ends[0], ctypes.c_void_p(block + 62), ctypes.c_size_t(4))",
            -6,
            "guard: read of 4 bytes",
        ),
    },
    "heap": {
        "write after free": (
            "block = libc.malloc(40); libc.free(block); ctypes.memset(block, 1, 1)",
            -6,
            "guard: write to freed memory",
        ),
        "the kernel writes to freed memory": (
            "block = tensor(64); ends = os.pipe(); os.write(ends[1], b'late'); libc.free(block)\n"
            "libc.read(ends[0], ctypes.c_void_p(block), ctypes.c_size_t(4))",
            -6,
            "guard: write to freed memory",
        ),
        "write behind the end": (
            "block = libc.malloc(40); ctypes.memset(block, 1, 41); libc.free(block)",
            -6,
            "guard: write behind the end",
        ),
        "freed twice": ("block = libc.malloc(40); libc.free(block); libc.free(block)", -6, "guard: freed twice"),
    },
}


def run(program: str, libraries: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=guard.environment(*libraries), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize(("name", "what"), [(name, what) for name, cases in WRONG.items() for what in cases])
def test_a_guard_ends_a_process_that_does_wrong(
    libraries: dict[str, Path], name: str, what: str, together: bool
) -> None:
    program, status, text = WRONG[name][what]
    if together and name == "heap" and "tensor(" in program:
        text = "guard: read of 4 bytes"  # the other guard has this block
    done = run(BLOCK + program, list(libraries.values()) if together else [libraries[name]])
    assert done.returncode == status, done.stderr
    assert text in done.stderr


TWO_RANKS = """
import multiprocessing, os, sys, tempfile
sys.path[:0] = ["tests", "tests/dist/collectives"]
import torch.distributed as dist
from test_broken_connections import (
    test_a_reduction_that_is_half_done_ends_and_its_memory_is_never_lent_again as test,
)

def run(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    dist.barrier()
    test.__wrapped__(waits=True)
    dist.destroy_process_group()

with tempfile.TemporaryDirectory() as folder:
    fork = multiprocessing.get_context("fork")
    store = os.path.join(folder, "store")
    ranks = [fork.Process(target=run, args=(rank, store), daemon=True) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
    print([each.exitcode for each in ranks])
"""


def test_a_slice_of_the_distributed_tests_runs_guarded(libraries: dict[str, Path]) -> None:
    """Forked from one process: under the guards it takes a minute to import torch."""
    guard.raise_map_limit()
    command = [sys.executable, "-c", TWO_RANKS]
    environment = guard.environment(*libraries.values())
    done = subprocess.run(command, env=environment, cwd=guard.ROOT, capture_output=True, text=True, timeout=280)
    assert done.stdout == "[0, 0]\n", f"{done.stdout}\n{done.stderr}"

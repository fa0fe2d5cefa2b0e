"""A process that has had process groups ends: threads of the backend that are late are waited for, not for long."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import zlib

from shardwise.consistency import liveness


def test_threads_that_run_without_the_lock_are_waited_for_and_those_that_rest_are_not() -> None:
    rest, data = threading.Event(), bytes(range(256)) * 200_000
    resting = threading.Thread(target=rest.wait)
    running = threading.Thread(target=lambda: zlib.compress(data, 9))
    resting.start()
    running.start()
    time.sleep(0.01)
    try:
        liveness.settle(60.0)
        assert not running.is_alive()
        assert resting.is_alive()
    finally:
        rest.set()
        resting.join()
        running.join()


def test_threads_that_never_rest_are_waited_for_until_the_limit() -> None:
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            zlib.compress(b"0" * 100_000)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        liveness.settle(0.2)
        assert thread.is_alive()
    finally:
        over.set()
        thread.join()


_SCRIPT = """
import os, sys, torch, torch.distributed as dist
import shardwise.consistency.liveness as at_exit
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


def test_it_happens_once_at_the_end_of_a_process() -> None:
    """Also where groups were destroyed: what keeps one, as a sharded model does, keeps its threads."""
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "kept\ndestroyed\n"

"""A process that has had process groups ends: threads of the backend that are late are waited for, not for long."""

from __future__ import annotations

import threading
import time
import zlib

from shardwise.consistency import process_groups


def test_threads_that_run_without_the_lock_are_waited_for_and_those_that_rest_are_not() -> None:
    rest, data = threading.Event(), bytes(range(256)) * 200_000
    resting = threading.Thread(target=rest.wait)
    running = threading.Thread(target=lambda: zlib.compress(data, 9))
    resting.start()
    running.start()
    time.sleep(0.01)
    try:
        process_groups.settle(60.0)
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
        process_groups.settle(0.2)
        assert thread.is_alive()
    finally:
        over.set()
        thread.join()

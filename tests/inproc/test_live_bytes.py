"""Bytes of live tensors are counted while other threads free some."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from shardwise.recipes.memory import LiveBytes


@pytest.fixture
def switches_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switches_often")
def test_tensors_that_another_thread_frees_are_forgotten() -> None:
    live, held = LiveBytes(torch.device("cpu")), [torch.empty(10) for _ in range(1500)]

    def free() -> None:
        while held:
            held.pop()
            time.sleep(1e-5)

    thread = threading.Thread(target=free)
    with live.watching():
        before = live.live
        torch.ones(3)  # the first operation imports modules
        thread.start()
        while thread.is_alive():
            torch.ones(3)
    assert before - live.live >= 1500 * torch.empty(10).untyped_storage().nbytes()

"""Posts of ranks that all live in this process: over a store in memory, each rank a thread or simply the next line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TypeVar
from unittest import mock

import torch.distributed as dist

from shardwise.consistency import process_groups
from shardwise.consistency.agreement import StoreExchange
from shardwise.consistency.process_groups import announce
from shardwise.consistency.store import JobStore

MEMBERS = (4, 5, 9)  # global ranks, so that a place is never mistaken for one
_T = TypeVar("_T")


def make_exchange(store: dist.Store | None = None, timeout_s: float = 20.0) -> list[StoreExchange]:
    """Return each rank's posts in one store, where notes about their processes are looked for, too."""
    store = dist.HashStore() if store is None else store
    return [StoreExchange(JobStore(store), "posts", MEMBERS, rank, timeout_s, store) for rank in range(len(MEMBERS))]


def on_threads(body: Callable[[StoreExchange], _T], exchange: list[StoreExchange]) -> list[_T]:
    """Return what ``body`` returns on every rank, each a thread."""
    with ThreadPoolExecutor(len(exchange)) as threads:
        return list(threads.map(body, exchange))


def announce_as(store: dist.Store, rank: int, pid: int) -> None:
    """Leave the note of global rank ``rank`` as if its process had the number ``pid``."""
    with mock.patch("os.getpid", return_value=pid):
        announce(store, rank)


def on_host(name: str) -> AbstractContextManager[object]:
    """Return a context in which this process is one of the host ``name``: several hosts on one machine."""
    return mock.patch.object(process_groups, "BOOT_ID", SimpleNamespace(read_text=lambda: name))


def announce_elsewhere(store: dist.Store, rank: int) -> None:
    """Leave the note of global rank ``rank`` as if it were a process of another host."""
    with on_host("elsewhere"):
        announce(store, rank)


def gone_process() -> int:
    """Return the number of a process that has ended and been waited for."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid

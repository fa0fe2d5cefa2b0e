"""Segments and what lies around them, in one process: addresses, tokens, words, lives of descriptors and processes."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.store_exchanges import announce_as, gone_process

from shardwise import observe
from shardwise.collectives.local_peers import HEADER_BYTES, Arena, Segment
from shardwise.consistency.process_groups import is_gone

SEGMENT_BYTES = HEADER_BYTES + 4096


@pytest.fixture
def gone_pid() -> int:
    """The number of a process that has ended and been waited for."""
    return gone_process()


def num_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "change",
    [
        lambda address: dataclasses.replace(address, token="00" * 16),
        lambda address: dataclasses.replace(address, num_bytes=SEGMENT_BYTES + 4096),
        lambda address: dataclasses.replace(address, fd=1 << 20),
    ],
    ids=["token", "size", "descriptor"],
)
def test_what_is_not_the_segment_meant_is_not_opened(change: Callable[..., object]) -> None:
    segment = Segment.create(SEGMENT_BYTES)
    before = num_fds()
    with pytest.raises(OSError, match=r"has another file there|No such file"):
        Segment.open(change(segment.address))  # type: ignore[arg-type]
    assert num_fds() == before


def test_a_process_that_is_gone_has_no_segment(gone_pid: int) -> None:
    with pytest.raises(FileNotFoundError):
        Segment.open(dataclasses.replace(Segment.create(SEGMENT_BYTES).address, pid=gone_pid))


def test_descriptors_are_closed_with_the_memory() -> None:
    before = num_fds()
    segment = Segment.create(SEGMENT_BYTES)
    other = Segment.open(segment.address)
    tensor = segment.tensor(HEADER_BYTES, 1, torch.float32)
    assert num_fds() > before
    del segment, other
    assert num_fds() > before, "a tensor is left: a forked child must be able to map its memory again"
    del tensor
    assert num_fds() == before


def test_processes_of_other_hosts_and_containers_are_not_looked_for(
    gone_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    with monkeypatch.context() as patched:
        patched.setattr(os, "readlink", lambda _: "pid:[1]")
        announce_as(store, 1, gone_pid)
    assert not is_gone(store, 1)


def test_memory_whose_places_are_dropped_lies_in_one_file(tmp_path: Path) -> None:
    """As gradients on disk drop theirs, which took a file of 256 MiB each."""
    arena = Arena(str(tmp_path))

    def taken() -> torch.Tensor:
        found = arena.take(2**20)
        assert found is not None
        return found[0]

    held = [taken() for _ in range(3)]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert (len(held), len({line[4] for line in maps})) == (3, 1)  # files by their inodes


def test_a_step_pages_nothing_out_once_no_file_is_mapped(tmp_path: Path) -> None:
    gc.collect()
    observe.end("unit", "reshard", "")  # of what tests before have let go
    before = len(observe.listeners)
    found = Arena(str(tmp_path)).take(2**20)
    observe.end("unit", "reshard", "")
    assert found is not None
    assert len(observe.listeners) == before + 1
    del found
    observe.end("unit", "reshard", "")
    assert len(observe.listeners) == before

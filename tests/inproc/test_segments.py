"""Segments and what lies around them, in one process: addresses, tokens, words, lives of descriptors and processes."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.links import SEGMENT_BYTES, make_links
from helpers.store_exchanges import announce_as, gone_process

from shardwise import TransportError, observe
from shardwise.collectives.local_peers import HEADER_BYTES, NUM_WORDS, Arena, Segment
from shardwise.consistency.process_groups import Liveness, is_gone


@pytest.fixture
def gone_pid() -> int:
    """The number of a process that has ended and been waited for."""
    return gone_process()


def num_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_opened_by_its_address_is_the_same_memory() -> None:
    mine = Segment.create(SEGMENT_BYTES)
    theirs = Segment.open(mine.address)
    assert (theirs.token, theirs.num_bytes, len(theirs.words)) == (mine.token, SEGMENT_BYTES, NUM_WORDS)
    assert not any(mine.words)
    mine.words[0], mine.words[NUM_WORDS - 1] = 7, -(1 << 60)
    assert (theirs.words[0], theirs.words[NUM_WORDS - 1]) == (7, -(1 << 60))
    left = mine.tensor(HEADER_BYTES, 4, torch.float32)
    right = theirs.tensor(HEADER_BYTES, 4, torch.float32)
    left.copy_(torch.arange(4.0))
    assert right.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert mine.tensor(HEADER_BYTES + 8, 2, torch.float32).tolist() == [2.0, 3.0]
    assert mine.token == theirs.token, "tensors and words lie apart from the token"


def test_a_tensor_starts_its_own_storage_and_keeps_the_memory() -> None:
    segment = Segment.create(SEGMENT_BYTES)
    tensor = segment.tensor(HEADER_BYTES + 64, 3, torch.bfloat16)
    assert (tensor.storage_offset(), tuple(tensor.shape), tensor.dtype) == (0, (3,), torch.bfloat16)
    assert segment.tensor(HEADER_BYTES, 0, torch.int64).shape == (0,)
    del segment
    gc.collect()
    tensor.fill_(2.0)
    assert tensor.tolist() == [2.0] * 3


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


def test_liveness(gone_pid: int) -> None:
    assert Liveness(os.getpid()).is_alive()
    assert not Liveness(gone_pid).is_alive()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    handle = Liveness(child.pid)
    assert handle.is_alive()
    child.communicate(b"\n")
    assert not handle.is_alive()


def test_processes_of_other_hosts_and_containers_are_not_looked_for(
    gone_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    with monkeypatch.context() as patched:
        patched.setattr(os, "readlink", lambda _: "pid:[1]")
        announce_as(store, 1, gone_pid)
    assert not is_gone(store, 1)


def test_a_link_names_the_rank_that_is_gone_not_the_one_that_left_because_of_it(gone_pid: int) -> None:
    links = make_links(pids=[os.getpid(), os.getpid(), gone_pid])
    links[1].sections.host.segments[1].words[0] = 1  # rank 1 has left a span by an exception
    with pytest.raises(
        TransportError,
        match="rank 2 is gone .*; rank 0 was at the start of a forward",
    ):
        links[0].open("forward", False)


def test_a_link_names_a_rank_that_left_alone() -> None:
    links = make_links(3)
    links[1].sections.host.segments[1].words[0] = 1
    with pytest.raises(TransportError, match="rank 1 raised an exception while"):
        links[0].open("forward", False)


def test_a_link_of_some_ranks_names_them_as_the_job_does(gone_pid: int) -> None:
    links = make_links(pids=[os.getpid(), gone_pid], members=(2, 3))
    with pytest.raises(TransportError, match="rank 3 is gone .*; rank 2 waited .* s for it at the start of a forward"):
        links[0].open("forward", False)


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

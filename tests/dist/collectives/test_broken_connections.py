"""Connections that break in the middle of a transfer, of which gloo tells nobody: waits end all the same, and name the rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.ends import Gradients
from helpers.ranks import on_ranks

from shardwise.collectives.c10d import HostWork
from shardwise.collectives.routes import Scale
from shardwise.collectives.shared_memory import ExchangeLink
from shardwise.collectives.streams import BufferPool
from shardwise.consistency.process_groups import abort_connections, await_collective, closed_to, reconnect_group

LARGE = 1 << 23  # elements; much more than sockets hold
# What gloo says itself, where it does; not that time is up.
BROKEN = "the connection to rank 1 was closed in the middle of a transfer|Connection closed by peer|reset by peer"
Group = dist.ProcessGroup
# The end of a group waits for its threads with the GIL in hand, for which one may wait to let go of what it has not sent.
kept: list[Group] = []


class At(NamedTuple):
    """Where an end is."""

    rank: int
    size: int
    pool: BufferPool


@contextmanager
def patient_group(timeout_s: float = 600.0) -> Iterator[Group]:
    """Give a group whose timeout is longer than a test may take."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, Group)
    kept.append(group)
    dist.barrier(group)  # who breaks off at once would take those along that are still connecting
    yield group
    dist.barrier()  # a rank that destroys the group closes connections that another rank may still query
    dist.destroy_process_group(group)


def break_off_in_the_middle(group: Group, begin: Callable[[], object]) -> None:
    """Stop rank 0, ``begin`` something with it, and close the connection before it runs again: on rank 1."""
    pids = torch.tensor([os.getpid()])
    dist.broadcast(pids, 0)
    dist.barrier()  # rank 0 has begun
    os.kill(int(pids), signal.SIGSTOP)
    try:
        kept = begin()
        abort_connections(group)
        del kept
    finally:
        os.kill(int(pids), signal.SIGCONT)


def begin_first(begin: Callable[[], object]) -> object:
    """Let rank 1 know who this process is, and that it has begun: on rank 0."""
    dist.broadcast(torch.tensor([os.getpid()]), 0)
    begun = begin()
    dist.barrier()
    return begun


def reduction_over(group: Group, numel: int = LARGE) -> tuple[Gradients, ExchangeLink, BufferPool]:
    pool = BufferPool(torch.device("cpu"))
    link = ExchangeLink(group, pool)
    return Gradients(At(group.rank(), group.size(), pool), 1.0, (((2, numel), 0),)), link, pool


@on_ranks(2)
@pytest.mark.parametrize("waits", [True, False], ids=["wait", "cancel"])
def test_a_reduction_that_is_half_done_ends_and_its_memory_is_never_lent_again(waits: bool) -> None:
    with patient_group() as group:
        ends, link, pool = reduction_over(group)
        if dist.get_rank() == 0:
            handle = begin_first(lambda: link.reduce_scatter(ends, Scale()))
            assert isinstance(handle, HostWork)
            if waits:
                with pytest.raises(RuntimeError, match=BROKEN):
                    handle.wait()
                assert closed_to(group) == [1]
            else:
                handle.cancel()
            assert not any(pool.free.values()), "memory that gloo may still write to went back to the pool"
        else:
            break_off_in_the_middle(group, lambda: link.reduce_scatter(ends, Scale()))


@on_ranks(2)
def test_a_broadcast_that_is_half_done_is_not_waited_for() -> None:
    with patient_group(8.0) as group:  # whose end waits for gloo's own thread

        def begin() -> dist.Work | None:
            return dist.broadcast(torch.ones(LARGE), 0, group=group, async_op=True)

        if dist.get_rank() == 0:
            work = begin_first(begin)
            with pytest.raises(RuntimeError, match=BROKEN):
                await_collective(work, group)  # type: ignore[arg-type]
        else:
            break_off_in_the_middle(group, begin)


@on_ranks(2)
def test_a_rank_that_is_late_is_waited_for() -> None:
    with patient_group() as group:
        total = torch.ones(3)
        for numel in (LARGE, 1 << 10):
            ends, link, _ = reduction_over(group, numel)
            if dist.get_rank() == 1:
                time.sleep(0.7)  # longer than a first look
            link.reduce_scatter(ends, Scale()).wait()
            assert ends.is_right()
        await_collective(dist.all_reduce(total, group=group, async_op=True), group)
        assert total.tolist() == [2.0] * 3
        assert closed_to(group) == []


@on_ranks(2)
def test_a_mended_group_counts_as_connected() -> None:
    with patient_group() as group:
        abort_connections(group)
        assert closed_to(group) == [1 - dist.get_rank()]
        dist.barrier()
        reconnect_group(group)
        assert closed_to(group) == []

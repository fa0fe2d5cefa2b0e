"""Links over several hosts whose ranks are threads of this process: any number of hosts, and any order of events."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.ends import Ends, Gradients, Shapes
from helpers.wires import FakeGroup, Wires

from shardwise.collectives.buffer_pool import BufferPool
from shardwise.collectives.host.hierarchy import TieredLink, column_of
from shardwise.collectives.host.local_peers import HEADER_BYTES, ArenaPlace, HostGroup, Segment
from shardwise.collectives.host.send_recv import NUM_INBOXES, Inboxes, PeerLink
from shardwise.collectives.host.shared_memory import HostLink, outbox_bytes
from shardwise.collectives.protocol import Scale
from shardwise.errors import TransportError

SLOT_BYTES = 4096
INBOXES = HEADER_BYTES + outbox_bytes(SLOT_BYTES)
MIXED: Shapes = (((7, 5), 0), ((3, 6), 1), ((5,), 0), ((), 0))


@dataclass
class Rank:
    """One rank of several hosts, and where its sections lie."""

    rank: int
    size: int
    pool: BufferPool
    link: TieredLink
    places: list[list[ArenaPlace]]

    def gathers(self, number: int) -> list[Ends]:
        made = [Ends(self, float(base), MIXED, number=base, shares=True) for base in range(number)]
        self.places[self.rank] = [each.arena for each in made if each.arena is not None]
        self.link.inside.publish_sections(1)
        return made


def make_ranks(hosts: int, per_host: int) -> list[Rank]:
    size, wires = hosts * per_host, Wires()
    segments = [Segment.create(INBOXES + NUM_INBOXES * size * SLOT_BYTES) for _ in range(size)]
    places: list[list[ArenaPlace]] = [[] for _ in range(size)]
    ranks: list[Rank] = []
    for rank in range(size):
        place, first = rank % per_host, rank - rank % per_host
        local_peers = range(first, first + per_host)
        own = tuple(segments[peer] for peer in local_peers)
        host = HostGroup(
            own, (os.getpid(),) * per_host, place, local_peers, tuple(range(size)), lambda rank, number: places[rank]
        )
        pool: BufferPool = BufferPool(torch.device("cpu"))
        group: Any = FakeGroup(wires, rank, size)
        between: Any = PeerLink(group, pool, column_of(rank, per_host, size))
        between._members = lambda: range(size)
        inside = HostLink(host, HEADER_BYTES, SLOT_BYTES, timeout_s=10.0)
        link = TieredLink(inside, between, Inboxes(inside, INBOXES, size * SLOT_BYTES))
        ranks.append(Rank(rank, size, pool, link, places))
    return ranks


def on_all(ranks: list[Rank], body: Callable[[Rank], None]) -> list[BaseException | None]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [future.exception() for future in [threads.submit(body, rank) for rank in ranks]]


def exchange(at: Rank) -> None:
    """More gathers and reductions at once than there are inboxes and slots, waited for in other orders, by ranks that idle."""
    dice = random.Random(at.rank)

    def idle() -> None:
        time.sleep(dice.choice((0.0, 0.0, 0.001, 0.003)))

    gathers = at.gathers(6)
    for number in range(2):
        reductions = [Gradients(at, 10.0 * each, MIXED, label=f"number {each}") for each in range(5)]
        assert at.link.open("backward", False)
        pendings = []
        for gather, reduction in zip(gathers, (*reductions, None), strict=True):
            idle()
            pendings.append(at.link.all_gather(gather))
            if reduction is not None:
                idle()
                pendings.append(at.link.reduce_scatter(reduction, Scale()))
        for pending in random.Random(number).sample(pendings, len(pendings)):
            idle()
            pending.wait()
        at.link.close()
        assert all(each.is_right() for each in (*gathers, *reductions))
        for gather in gathers:
            gather.buffer.drop()
    assert at.pool.used_bytes == 0


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (3, 2), (2, 3)])
def test_whatever_is_on_its_way_together_arrives_on_any_number_of_hosts(hosts: int, per_host: int) -> None:
    assert on_all(make_ranks(hosts, per_host), exchange) == [None] * (hosts * per_host)


def test_other_hosts_get_an_error_in_place_of_sums_that_a_rank_did_not_stay_for() -> None:
    """Rank 1 leaves after it has posted its gradients: rank 3 waits for its sums, and the others for these two."""
    ranks = make_ranks(2, 2)

    def leave_or_wait(at: Rank) -> None:
        assert at.link.open("backward", False)
        try:
            reduction = at.link.reduce_scatter(Gradients(at, 2.0), Scale())
            if at.rank == 1:
                raise KeyError
            reduction.wait()
            at.link.close()
        except BaseException:
            at.link.abort()
            raise

    errors = on_all(ranks, leave_or_wait)
    assert [type(error) for error in errors] == [TransportError, KeyError, TransportError, TransportError]
    assert "rank 1 raised an exception in backward before it could send gradients of gradients to rank 3" in str(
        errors[3]
    )
    assert on_all(ranks, exchange) == [None] * 4


def test_a_rank_that_starts_something_else_is_named_on_every_host() -> None:
    ranks = make_ranks(2, 2)
    errors = on_all(ranks, lambda at: at.link.open("backward" if at.rank == 1 else "forward", False) and None)
    assert all("rank 1" in str(error) and "forward" in str(error) for error in errors), errors
    assert on_all(ranks, exchange) == [None] * 4


def test_what_some_do_not_want_any_more_reaches_the_others() -> None:
    def cancel_or_wait(at: Rank) -> None:
        gathers, reductions = at.gathers(5), [Gradients(at, float(each), MIXED) for each in range(4)]
        assert at.link.open("backward", False)
        pendings = [at.link.all_gather(each) for each in gathers]
        pendings += [at.link.reduce_scatter(each, Scale()) for each in reductions]
        for number, pending in enumerate(pendings):
            if number % at.size == at.rank:
                pending.cancel()
            else:
                pending.wait()
        at.link.close()
        wanted = [each for number, each in enumerate((*gathers, *reductions)) if number % at.size != at.rank]
        assert all(each.is_right() for each in wanted)

    assert on_all(make_ranks(2, 2), cancel_or_wait) == [None] * 4


def test_hosts_are_added_in_their_order_to_the_bit() -> None:
    tensors = [torch.randn(60, generator=torch.Generator().manual_seed(rank)) for rank in range(6)]
    of_hosts = [tensors[rank] + tensors[rank + 1] for rank in (0, 2, 4)]
    expected = (of_hosts[0] + of_hosts[1]) + of_hosts[2]
    assert not torch.equal(expected, (of_hosts[2] + of_hosts[1]) + of_hosts[0]), "the orders must differ"

    def add(at: Rank) -> None:
        reduction = Gradients(at, 0.0, (((60,), 0),))
        reduction.tensors = [tensors[at.rank].clone()]
        assert at.link.open("backward", False)
        at.link.reduce_scatter(reduction, Scale(1.0)).wait()
        at.link.close()
        assert reduction.section is not None
        assert torch.equal(reduction.section, expected[10 * at.rank : 10 * at.rank + 10])

    assert on_all(make_ranks(3, 2), add) == [None] * 6

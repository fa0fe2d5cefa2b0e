"""Messages between ranks whose span, link or process group ends before them: nobody hangs, and no memory is lent twice."""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.ends import Ends, Gradients, make_link
from helpers.inside import engine_of, parts_from
from helpers.ranks import on_ranks
from torch import nn

from shardwise import DesyncError, fully_shard
from shardwise.collectives.host import send_recv as unfinished
from shardwise.collectives.host.send_recv import PeerLink
from shardwise.collectives.protocol import Handle, Scale
from shardwise.testing import WorkerPool

LARGE = 1 << 20  # elements; more than sockets hold


@contextmanager
def group_of_its_own(timeout_s: float) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield group
    finally:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


# ---- an abort ----


@on_ranks(2)
def test_a_message_sent_before_an_abort_arrives_and_its_group_lives_on() -> None:
    """A dropped message would keep every later one between the two ranks from getting through."""
    rank = dist.get_rank()
    with group_of_its_own(20.0) as group:
        link = make_link(group)
        link.open("forward", False)
        if rank == 1:
            link.wait_sends_at_close([link.send(torch.full((LARGE,), 3.0), 0, 77)])
            link.abort()
            gc.collect()
        dist.barrier()
        if rank == 0:
            found = torch.zeros(LARGE)
            link.recv(found, 1, 77).wait(timedelta(seconds=10))
            assert bool((found == 3.0).all())
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2.0] * 3


# ---- a rank that does not come ----


def addresses_of(memory: object) -> set[int]:
    return {memory.storage.data_ptr()}  # type: ignore[attr-defined]  of what a lease loses


@on_ranks(2)
@pytest.mark.parametrize("waits", [True, False], ids=["wait", "cancel"])
def test_memory_of_messages_that_do_not_end_is_never_lent_again(waits: bool) -> None:
    with group_of_its_own(2.0) as group, parts_from(30):
        link = make_link(group)
        link.open("forward", False)
        if dist.get_rank() == 0:
            gather, reduction = Ends(link, 10.0), Gradients(link, 20.0)
            pendings = [link.all_gather(gather), link.reduce_scatter(reduction, Scale())]
            full = gather.buffer.hold(link.pool).data_ptr()
            assert not any(link.pool.free.values())
            for pending in pendings:
                if waits:
                    with pytest.raises(RuntimeError):
                        pending.wait()
                else:
                    pending.cancel()
            gather.buffer.drop()
            assert not any(link.pool.free.values()), "memory that a backend may still write to went back to the pool"
            assert link.pool.used_bytes == 0
            assert [addresses_of(memory) for memory in gather.lost] == [{full}]
            assert unfinished._kept[group].works
            del pendings, pending
        dist.barrier()


@on_ranks(2, fresh=True)
def test_a_model_whose_gather_fails_does_not_lend_its_full_parameters_again() -> None:
    mesh = dist.device_mesh.DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_transport("gloo")
    batch = torch.ones(2, 8)
    with parts_from(1):
        model(batch).sum().backward()
        pool = engine_of(model).comm_ctx.pool
        pool.trim()
        if dist.get_rank() == 0:
            posted: list[int] = []
            receive, enter = PeerLink.recv, PeerLink.open

            def recv(link: PeerLink, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
                posted.append(tensor.untyped_storage().data_ptr())
                return receive(link, tensor, peer, tag)

            PeerLink.open = lambda self, kind, wants: True  # type: ignore[method-assign]  as if the other had come
            PeerLink.recv = recv  # type: ignore[method-assign]
            try:
                with pytest.raises(DesyncError):
                    model(batch)
            finally:
                PeerLink.recv, PeerLink.open = receive, enter  # type: ignore[method-assign]
            assert posted
            lendable = {slab.storage.data_ptr() for slabs in pool.free.values() for slab in slabs}
            assert not lendable & set(posted)
    dist.barrier()


# ---- every order ----

MODES = ("wait", "cancel")
ENDS = ("close", "abort")


def end(pending: Handle, mode: str, ends: Ends | Gradients, lives: bool) -> None:
    if mode == "cancel":
        pending.cancel()
        return
    try:
        pending.wait()
    except RuntimeError:  # the other rank has destroyed its group
        assert not lives
        return
    assert ends.is_right()


def play(order: tuple[int, ...], modes: tuple[str, str, str], group: dist.ProcessGroup, chance: random.Random) -> None:
    """One span on this rank: its gather, its reduction, the link and the group end in ``order``."""
    link = make_link(group)
    link.open("forward", False)
    gather, reduction = Ends(link, 10.0), Gradients(link, 20.0)
    gathering, reducing = link.all_gather(gather), link.reduce_scatter(reduction, Scale())
    lives = True

    def end_link() -> None:
        try:
            link.close() if modes[2] == "close" else link.abort()
        except RuntimeError:
            assert not lives
            link.abort()

    def end_group() -> None:
        nonlocal lives
        lives = False
        dist.destroy_process_group(group)

    acts: list[Callable[[], None]] = [
        lambda: end(gathering, modes[0], gather, lives),
        lambda: end(reducing, modes[1], reduction, lives),
        end_link,
        end_group,
    ]
    for index in order:
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.004)
        acts[index]()
        link.pool.trim()
    gather.buffer.drop()


def run_every_order(seed: int, modes_per_order: int) -> None:
    rank, chance = dist.get_rank(), random.Random(1000 * seed + dist.get_rank())
    orders = list(itertools.permutations(range(4)))
    modes = list(itertools.product(MODES, MODES, ENDS))
    with parts_from(30):
        for number, (turn, order) in enumerate(itertools.product(range(modes_per_order), orders)):
            mine = orders[(number * (1 + rank * (seed + 1))) % len(orders)] if seed else order
            group = dist.new_group(timeout=timedelta(seconds=30))
            assert isinstance(group, dist.ProcessGroup)
            died = weakref.ref(group)
            dist.barrier()
            play(mine, modes[(turn + number * 5) % len(modes)], group, chance)
            del group
            gc.collect()
            assert died() is None, "a group that was destroyed is kept by its messages"
            dist.barrier()


@pytest.mark.parametrize(
    ("num_ranks", "seed"), [(2, 0), (2, 1), (3, 1)], ids=["2-same", "2-each-its-own", "3-each-its-own"]
)
def test_every_order_of_ends(pool: WorkerPool, seed: int, num_ranks: int) -> None:
    """wait or cancel, close or abort, and the group's destruction, in every order: right numbers or an error, no hang.

    ``make guard`` takes every order in every way; here each order comes in one.
    """
    modes_per_order = int(os.environ.get("SHARDWISE_MODES_PER_ORDER", "1"))
    pool.run(
        run_every_order,
        num_ranks=num_ranks,
        seed=seed,
        modes_per_order=modes_per_order,
        timeout_s=60.0 * modes_per_order,
    )

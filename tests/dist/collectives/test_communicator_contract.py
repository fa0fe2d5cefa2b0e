"""What every communicator keeps to, whichever way its collectives take: units rely on these rules and on nothing else.

The fake in ``helpers`` says the rules in 60 lines: what it need not do, no other has to."""

from __future__ import annotations

import gc
import itertools
import re
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ends import SHAPES, Gradients, Shapes, layout_for, whole
from helpers.ranks import FOUR, on_ranks
from helpers.ways import LINKS, SUM_SLOT_BYTES, WAYS, Way, way_over
from torch.distributed.tensor.debug import CommDebugMode

from shardwise.collectives.c10d import GroupCommunicator
from shardwise.collectives.routes import Scale
from shardwise.errors import TransportError
from shardwise.layout import Bucket

# Rows that ranks share unevenly, fewer rows than ranks, columns, no elements, a scalar.
UNEVEN: Shapes = (((7, 5), 0), ((3, 6), 1), ((3, 5), 0), ((5,), 0), ((1,), 0), ((0, 4), 0), ((), 0))
SMALL: Shapes = (((2,), 0), ((3, 2), 1))
LAYOUTS = {"even": SHAPES, "uneven": UNEVEN, "small": SMALL, "one element": (((1,), 0),)}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SCALES = {
    "mean": (Scale(), None),
    "sum": (Scale(1.0), 1.0),
    "other divisor": (Scale(3.0), 3.0),
    "mean by sums alone": (Scale(sum_only=True), None),
    "divided before and after": (Scale(6.0, split=True), 6.0),
}


def ways() -> list[str]:
    return list(WAYS) if dist.get_world_size() > 1 else ["fake", "packed", "custom"]  # a rank alone has no link


def is_free(way: Way) -> bool:
    """True if all memory that was lent has come back, each storage once."""
    idle = [id(slab) for slabs in way.pool.free.values() for slab in slabs]
    return way.pool.used_bytes == 0 and len(set(idle)) == len(idle)


@on_ranks(1, 2, 4)
def test_all_gather_delivers_every_ranks_section_in_order_to_the_bit() -> None:
    for name in ways():
        with way_over(name) as way:
            for shapes, dtype in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16)):
                ends = way.ends(3.0, shapes=LAYOUTS[shapes], full_dtype=dtype)[0]
                with way.in_pass() as comm:
                    comm.all_gather(ends).wait()
                assert ends.is_right(), (name, shapes, dtype)


@on_ranks(1, 2, 4)
def test_reduce_scatter_sums_with_the_stated_scale() -> None:
    for name in ways():
        with way_over(name) as way:
            for shapes, scale in itertools.product(LAYOUTS, SCALES):
                ends = Gradients(way, 2.0, LAYOUTS[shapes])
                with way.in_pass("backward") as comm:
                    comm.reduce_scatter(ends, SCALES[scale][0]).wait()
                assert ends.is_right(SCALES[scale][1]), (name, shapes, scale)


@on_ranks(1, 2, 4)
def test_all_reduce_sums_in_place_with_the_stated_scale() -> None:
    for name in ways():
        with way_over(name) as way:
            for scale, divisor in SCALES.values():
                found = torch.arange(5.0) + way.rank
                expected = sum((torch.arange(5.0) + rank for rank in range(way.size)), torch.zeros(5))
                with way.in_pass() as comm:
                    comm.all_reduce(found, scale).wait()
                assert torch.equal(found, expected / (divisor or way.size)), (name, scale)


@on_ranks(2, FOUR)
def test_sums_in_place_do_not_mix_however_long_they_are_and_in_whatever_order_they_are_waited_for() -> None:
    """Of no elements, of one, of more than are shared by all, of more chunks than there are slots."""
    for name in ways():
        with way_over(name) as way:
            for kind, dtype, scale in itertools.product(("forward", "backward"), DTYPES, (Scale(), Scale(1.0))):
                numels = (3, 0, 1, 65, 6 * SUM_SLOT_BYTES // dtype.itemsize + 5, 130)
                found = [whole((numel,), number + way.rank).to(dtype) for number, numel in enumerate(numels)]
                with way.in_pass(kind) as comm:
                    pendings = [comm.all_reduce(each, scale) for each in found]
                    for pending in reversed(pendings):
                        pending.wait()
                        assert pending.is_done()
                by = way.size if scale.divisor is None else 1
                for number, (numel, each) in enumerate(zip(numels, found, strict=True)):
                    expected = sum(whole((numel,), number + rank).to(dtype) for rank in range(way.size)) / by
                    assert torch.equal(each, expected), (name, kind, dtype, number)


@on_ranks(2, FOUR)
def test_a_sum_that_nobody_waits_for_in_its_span_is_there_after_it_and_one_that_is_cancelled_writes_no_more() -> None:
    with way_over("shared memory") as way:
        kept, dropped = whole((40,), way.rank), whole((40,), way.rank)
        with way.in_pass("backward") as comm:
            pending = comm.all_reduce(kept, Scale(1.0))
            comm.all_reduce(dropped, Scale(1.0)).cancel()
            dropped.fill_(-1.0)  # somebody else's now
        assert torch.equal(kept, sum(whole((40,), rank) for rank in range(way.size)))
        kept.zero_()
        pending.wait()
        assert not kept.any(), "a second result"
        assert bool((dropped == -1).all())


@on_ranks(2)
def test_a_sum_that_has_ended_keeps_nothing_of_its_tensor() -> None:
    """Not until the next garbage collection, either: it may be a gradient, of gigabytes."""
    with way_over("shared memory") as way:
        gc.disable()
        try:
            tensor = torch.ones(40)
            kept = weakref.ref(tensor.untyped_storage())
            with way.in_pass("backward") as comm:
                comm.all_reduce(tensor, Scale()).wait()
            del tensor
            assert kept() is None
        finally:
            gc.enable()


@on_ranks(2, 3, 4)
def test_sums_of_many_replicas_are_the_same_bits_on_every_rank_and_in_rank_order() -> None:
    with way_over("shared memory") as way:
        torch.manual_seed(0)
        terms = [torch.randn(1000) for _ in range(way.size)]
        found = terms[way.rank].clone()
        with way.in_pass("backward") as comm:
            comm.all_reduce(found, Scale(3.0)).wait()
        total = terms[0] + terms[1]
        for term in terms[2:]:
            total += term
        assert torch.equal(found, total / 3.0)


@on_ranks(2, FOUR)
def test_one_rank_whose_collectives_are_watched_sends_all_sums_to_the_backend() -> None:
    with way_over("shared memory") as way:
        assert isinstance(way.comm, GroupCommunicator)
        numels = (3, 6 * SUM_SLOT_BYTES)  # one chunk, more of them than there are slots
        for watching in (1, None):
            found = [whole((numel,), way.rank) for numel in numels]
            counted = mock.patch.object(way.comm, "all_reduce_by_backend", wraps=way.comm.all_reduce_by_backend)
            mode = CommDebugMode() if way.rank == watching else nullcontext()
            with counted as calls, way.in_pass("backward") as comm, mode:
                for pending in [comm.all_reduce(each, Scale(1.0)) for each in found]:
                    pending.wait()
            by_backend = [call.args[0].numel() for call in calls.call_args_list]
            assert by_backend == ([] if watching is None else list(numels)), watching
            for numel, each in zip(numels, found, strict=True):
                assert torch.equal(each, sum(whole((numel,), rank) for rank in range(way.size)))


@on_ranks(2, 4)
def test_sums_after_an_exception_do_not_mix_with_those_before_it_however_late_others_come_to_it() -> None:
    with way_over("shared memory") as way:
        for late in range(2):
            before, after = whole((70,), way.rank), whole((90,), 5 * way.rank)
            with pytest.raises(KeyError), way.in_pass("backward") as comm:
                comm.all_reduce(before, Scale(1.0))
                time.sleep(0.2 if way.rank == late else 0.0)
                comm.all_reduce(before.clone(), Scale(1.0))
                raise KeyError
            with way.in_pass("backward") as comm:
                comm.all_reduce(after, Scale(1.0)).wait()
            assert torch.equal(after, sum(whole((90,), 5 * rank) for rank in range(way.size)))


@dataclass
class Summed:
    """What a sum is of."""

    label: str
    number: int = 0
    checksum: None = None
    layout: Bucket = field(default_factory=lambda: layout_for(1))
    params: tuple[()] = ()


@on_ranks(2, 4)
def test_ranks_that_sum_different_things_are_told_and_nobody_gets_numbers_of_both() -> None:
    others: list[tuple[Summed, int, torch.dtype, Scale]] = [
        (Summed("weight"), 8, torch.float32, Scale()),
        (Summed("weight", 1), 8, torch.float32, Scale()),
        (Summed("bias"), 8, torch.float32, Scale()),
        (Summed("weight"), 9, torch.float32, Scale()),
        (Summed("weight"), 8, torch.int32, Scale(1.0)),
        (Summed("weight"), 8, torch.float32, Scale(5.0)),
    ]
    for contents, numel, dtype, scale in others[1:]:
        with way_over("shared memory") as way:
            if way.rank != 1:
                contents, numel, dtype, scale = others[0]
            tensor = torch.ones(numel, dtype=dtype)
            with pytest.raises(TransportError) as raised, way.in_pass() as comm:
                comm.all_reduce(tensor, scale, contents).wait()
            texts = [""] * way.size
            dist.all_gather_object(texts, str(raised.value))
            assert any(re.search(r"replicas, rank (1|0), .*sums something else", text) for text in texts), texts
            assert bool((tensor == 1).all())


@on_ranks(2, FOUR)
def test_links_take_what_they_are_for_and_say_so_on_every_rank() -> None:
    for name in LINKS:
        with way_over(name) as way:
            assert way.link is not None
            gather, reduction = way.ends(1.0, shapes=SHAPES)[0], Gradients(way, 1.0)
            taken = [
                way.link.takes_gather(gather),
                way.link.takes_scatter(reduction, Scale()),
                way.link.takes_scatter(reduction, Scale(6.0, split=True)),
            ]
            assert taken == [name == "shared memory", True, False], name


@on_ranks(2, FOUR)
def test_collectives_on_their_way_together_do_not_mix() -> None:
    """More reductions than an outbox has slots, waited for in another order than launched."""
    for name in ways():
        with way_over(name) as way:
            gathers = way.ends(*range(4), shapes=UNEVEN)
            with way.in_pass() as comm:
                pendings = [comm.all_gather(each) for each in gathers]
                for pending in reversed(pendings):
                    pending.wait()
            reductions = [Gradients(way, 10.0 * number, label=f"number {number}") for number in range(5)]
            with way.in_pass("backward") as comm:
                pendings = [comm.reduce_scatter(each, Scale()) for each in reductions]
                for pending in pendings[::2] + pendings[1::2]:
                    pending.wait()
            assert all(each.is_right() for each in (*gathers, *reductions)), name


@on_ranks(2, FOUR)
def test_a_second_wait_and_a_cancel_after_a_wait_do_nothing() -> None:
    for name in ways():
        with way_over(name) as way:
            gather, reduction = way.ends(1.0, shapes=SHAPES)[0], Gradients(way, 5.0)
            with way.in_pass("backward") as comm:
                pendings = [comm.all_gather(gather), comm.reduce_scatter(reduction, Scale())]
                for _ in range(2):
                    for pending in pendings:
                        pending.wait()
                for pending in pendings:
                    assert pending.is_done()
                    pending.cancel()
                    pending.wait()
            assert gather.is_right()
            assert reduction.is_right()
            assert reduction.num_delivered == 1, name
            assert gather.num_delivered <= 1, name
            gather.buffer.drop()
            assert is_free(way), name


@on_ranks(2, FOUR)
def test_what_is_cancelled_is_not_delivered_and_the_next_call_works() -> None:
    for name in ways():
        with way_over(name) as way:
            first, second = way.ends(1.0, 2.0, shapes=UNEVEN)
            reductions = [Gradients(way, 3.0), Gradients(way, 4.0)]
            full = first.buffer.hold(way.pool).fill_(-1.0)
            with way.in_pass("backward") as comm:
                cancelled = [comm.all_gather(first), comm.reduce_scatter(reductions[0], Scale())]
                for pending in cancelled:
                    pending.cancel()
                    pending.cancel()
                    pending.wait()
                    assert pending.is_done(), name
                comm.all_gather(second).wait()
                comm.reduce_scatter(reductions[1], Scale()).wait()
            assert second.is_right(), name
            assert reductions[1].is_right(), name
            assert first.num_delivered == reductions[0].num_delivered == 0, name
            assert bool((full == -1.0).all()), name


@on_ranks(2, FOUR)
def test_memory_comes_back_once_whether_waited_for_or_cancelled() -> None:
    for name in ways():
        with way_over(name) as way:
            for mode in ("wait", "cancel"):
                gather, reduction = way.ends(1.0, shapes=UNEVEN)[0], Gradients(way, 2.0, UNEVEN)
                with way.in_pass("backward") as comm:
                    for pending in (comm.all_gather(gather), comm.reduce_scatter(reduction, Scale())):
                        getattr(pending, mode)()
                gather.buffer.drop()
                assert is_free(way), (name, mode)


@on_ranks(2, FOUR)
def test_a_warm_span_allocates_nothing() -> None:
    for name in ("packed", *LINKS):
        with way_over(name) as way:
            counts: list[int] = []
            for _ in range(3):
                gather = way.ends(1.0, shapes=UNEVEN)[0]
                with way.in_pass("backward") as comm:
                    comm.all_gather(gather).wait()
                    comm.reduce_scatter(Gradients(way, 2.0, UNEVEN), Scale()).wait()
                gather.buffer.drop()
                counts.append(way.pool.num_allocations)
            assert counts == counts[:1] * 3, name


@on_ranks(2, FOUR)
def test_spans_that_all_ranks_leave_by_an_exception_leave_the_next_one_working() -> None:
    for name in ways():
        with way_over(name) as way:
            for number in range(2):
                gather, reduction = way.ends(1.0, shapes=SHAPES)[0], Gradients(way, 2.0)
                with pytest.raises(KeyError), way.in_pass("backward") as comm:
                    comm.all_gather(gather).wait()
                    dist.barrier()  # all have come as far as this
                    raise KeyError(number)
                dist.barrier()
                after = way.ends(5.0, shapes=SHAPES)[0]
                with way.in_pass("backward") as comm:
                    comm.all_gather(after).wait()
                    comm.reduce_scatter(reduction, Scale()).wait()
                assert after.is_right(), name
                assert reduction.is_right(), name


@on_ranks(2, FOUR)
def test_one_rank_that_wants_collectives_sends_all_of_them_there() -> None:
    for name in LINKS:
        with way_over(name) as way:
            assert way.link is not None
            for wants, expected in ((False, True), (way.rank == 1, False), (False, True)):
                assert way.link.open("backward", wants) == expected, name
                way.link.close()


@on_ranks(2, FOUR)
def test_a_rank_in_another_kind_of_span_is_named() -> None:
    with way_over("shared memory") as way:
        assert way.link is not None
        with pytest.raises(TransportError) as raised:
            way.link.open("backward" if way.rank == 1 else "forward", False)
        assert "rank 1" in str(raised.value)
        assert "forward" in str(raised.value)
        way.link.abort()
        dist.barrier()

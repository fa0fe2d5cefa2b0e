"""Steps of parameters that are not row-major in memory, in DDP's backward and after it: the bits of a local optimizer."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import pairs
from helpers.compare import assert_equal
from helpers.ranks import FOUR, on_ranks
from helpers.zero_models import AnyOrder, images
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise import ShardwiseError, ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from shardwise.zero.optimizer import zero_backend

NUM_STEPS = 4
PARTITIONS = ("whole", "even")
HOOKS = (hook_with_zero_step, hook_with_zero_step_interleaved)
FUSED = {"lr": 0.05, "weight_decay": 0.01, "fused": True}


def _ddp(**options: Any) -> DDP:
    return DDP(AnyOrder(), bucket_cap_mb=0.002, **options)  # several buckets


def _inputs() -> list[torch.Tensor]:
    return [images(10 * index + dist.get_rank()) for index in range(NUM_STEPS)]


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.02}]


def _train(ddp, optim, scheduler=None, steps_itself=True) -> list[torch.Tensor]:
    for batch in _inputs():
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        if steps_itself:
            optim.step()
        if scheduler is not None:
            for group in optim.param_groups:
                group["lr"] *= 0.9
    return [p.detach().clone() for p in ddp.parameters()]


def _train_plain(optimizer_class=torch.optim.AdamW, ddp_options=None, scheduler=None, **options) -> list[torch.Tensor]:
    ddp = _ddp(**(ddp_options or {}))
    ddp.register_comm_hook(None, allreduce_hook)
    return _train(ddp, optimizer_class(_groups(ddp.module), **options), scheduler)


def _overlapped(
    make_hook, reduce=allreduce_hook, optimizer_class=torch.optim.AdamW, ddp_options=None, hook_options=None, **options
):
    ddp = _ddp(**(ddp_options or {}))
    zero = ZeroRedundancyOptimizer(_groups(ddp.module), optimizer_class, overlap_with_ddp=True, **options)
    ddp.register_comm_hook(None, make_hook(reduce, ddp, zero, **(hook_options or {})))
    return ddp, zero


def _train_overlapped(make_hook, scheduler=None, **options) -> list[torch.Tensor]:
    ddp, zero = _overlapped(make_hook, **options)
    found = _train(ddp, zero, scheduler, steps_itself=False)
    assert zero_backend(zero).num_steps == NUM_STEPS
    return found


@on_ranks(2, FOUR)
def test_overlapped_steps_equal_ddp_with_a_local_optimizer() -> None:
    """Every pair of options: views of buckets, a static graph, the hook, cut buckets, the partition."""
    start = list(AnyOrder().parameters())
    cases = pairs.pairwise((False, True), (False, True), HOOKS, (False, True), PARTITIONS)
    for bucket_view, static_graph in sorted({case[:2] for case in cases}):
        ddp_options = {"gradient_as_bucket_view": bucket_view, "static_graph": static_graph}
        expected = _train_plain(ddp_options=ddp_options, **FUSED)
        assert not any(torch.equal(a, b) for a, b in zip(expected, start, strict=True))
        for case in [case for case in cases if case[:2] == (bucket_view, static_graph)]:
            *_, make_hook, shard_buckets, partition = case
            hook_options = {"shard_buckets": shard_buckets}
            found = _train_overlapped(
                make_hook, ddp_options=ddp_options, hook_options=hook_options, partition=partition, **FUSED
            )
            assert_equal(found, expected, case)


@on_ranks(2, FOUR)
def test_steps_after_backward_equal_ddp_with_a_local_optimizer() -> None:
    expected = _train_plain(**FUSED)
    for partition, bucket_view, views in pairs.pairwise(PARTITIONS, (False, True), (False, True)):
        ddp = _ddp(gradient_as_bucket_view=views)
        ddp.register_comm_hook(None, allreduce_hook)
        options = {"partition": partition, "parameters_as_bucket_view": bucket_view, **FUSED}
        zero = ZeroRedundancyOptimizer(_groups(ddp.module), torch.optim.AdamW, **options)
        strides = [p.stride() for p in ddp.parameters()]
        assert_equal(_train(ddp, zero), expected, (partition, bucket_view, views))
        assert [p.stride() for p in ddp.parameters()] == strides


@on_ranks(2, FOUR)
def test_a_hook_may_return_new_memory() -> None:
    def to_new_memory(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return allreduce_hook(state, bucket).then(lambda done: done.value().clone())

    expected = _train_plain(**FUSED)
    for make_hook, partition in product(HOOKS, PARTITIONS):
        found = _train_overlapped(make_hook, reduce=to_new_memory, partition=partition, **FUSED)
        assert_equal(found, expected, (make_hook.__name__, partition))


@on_ranks(2, FOUR)
def test_a_changed_order_is_refused() -> None:
    """DDP has laid out its buckets by then."""
    for make_hook in HOOKS:
        ddp, zero = _overlapped(make_hook, **FUSED)
        _train(ddp, zero, steps_itself=False)
        ddp.module.second.to(memory_format=torch.contiguous_format)
        with pytest.raises(ShardwiseError, match="DDP and the hook"):
            _train(ddp, zero, steps_itself=False)


@on_ranks(2, FOUR)
def test_any_optimizer_may_overlap() -> None:
    """No functional twin needed: groups, options that change, both partitions."""
    cases = [
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
        (torch.optim.NAdam, {"lr": 1e-3, "foreach": True}),
        (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    ]
    for optimizer_class, options in cases if dist.get_world_size() == 2 else cases[:1]:
        expected = _train_plain(optimizer_class, scheduler=True, **options)
        for make_hook, partition in ((hook_with_zero_step, "even"), (hook_with_zero_step_interleaved, "whole")):
            extra = {"partition": partition, "parameters_as_bucket_view": partition == "even"}
            found = _train_overlapped(make_hook, scheduler=True, optimizer_class=optimizer_class, **extra, **options)
            assert_equal(found, expected)


@on_ranks(2, FOUR)
def test_unused_parameters_stay_and_accumulated_gradients_count() -> None:
    """A parameter nobody used does not change; gradients of no_sync() are part of the step."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x, use_all=False):
            return self.used(x) + (self.unused(x) if use_all else 0)

    results = []
    for make_hook in (None, hook_with_zero_step, hook_with_zero_step_interleaved):
        ddp = DDP(Net(), find_unused_parameters=True)
        options = {"lr": 0.01, "weight_decay": 0.1}
        if make_hook is None:
            optim: Any = torch.optim.AdamW(ddp.parameters(), **options)
            ddp.register_comm_hook(None, allreduce_hook)
        else:
            optim = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **options)
            ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, optim))
        for index, batch in enumerate(_inputs()):
            optim.zero_grad()
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
            ddp(batch * 2, use_all=index == 3).square().mean().backward()
            if make_hook is None:
                optim.step()
        results.append([p.detach().clone() for p in ddp.parameters()])
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


@on_ranks(2, FOUR)
def test_a_joined_rank_steps_its_share() -> None:
    """A rank that ran out of inputs, after one already, plays DDP's buckets and steps its share with them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    ways: list[Any] = [None, hook_with_zero_step, hook_with_zero_step_interleaved]
    for way in ways:
        if way is not None:
            ddp, optim = _overlapped(way, optimizer_class=torch.optim.Adam, lr=1e-3)
        else:
            ddp = _ddp()
            optim = torch.optim.Adam(_groups(ddp.module), lr=1e-3)
            ddp.register_comm_hook(None, allreduce_hook)
        with Join([ddp] if way is None else [ddp, optim]):
            for batch in _inputs()[: 1 + rank]:
                ddp.zero_grad()
                ddp(batch).square().mean().backward()
                if way is None:
                    optim.step()
        last = [p.detach().clone() for p in ddp.parameters()]
        if way is None:
            for p in last:
                dist.broadcast(p, src=size - 1)
        else:
            assert zero_backend(optim).num_steps == size
        results.append(last)
    for way, found in zip(ways, results, strict=True):
        assert_equal(found, results[0], way)


@on_ranks(2, FOUR)
def test_wrong_arguments_are_refused() -> None:
    ddp = _ddp()
    no_overlap = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    zero = ZeroRedundancyOptimizer(list(ddp.parameters())[:2], torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    before = copy.deepcopy(list(ddp.parameters()))
    assert zero.step() is None
    assert_equal(list(ddp.parameters()), before)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, ddp, no_overlap)

"""Hooks that step in DDP's backward: bitwise the result of stepping after it, and no step lost."""

import copy
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import pairs
from helpers.compare import assert_equal
from helpers.ranks import FOUR, on_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from shardwise.zero.optimizer import zero_backend

NUM_STEPS = 5
SGD_OPTIONS = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.001}


def _model() -> torch.nn.Module:
    """Three DDP buckets and more: the first holds 1 MiB, the others 0.2 MiB each (see ``_ddp``)."""
    torch.manual_seed(0)
    widths = [64, 512, 512, 128, 96, 8]
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def _ddp(model: torch.nn.Module, **options: Any) -> DDP:
    return DDP(model, bucket_cap_mb=0.2, **options)


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    return [torch.randn(4, 64) for _ in range(NUM_STEPS)]


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.02}]


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


def _train_plain(optimizer_class=torch.optim.SGD, ddp_options=None, scheduler=None, **options) -> list[torch.Tensor]:
    ddp = _ddp(_model(), **(ddp_options or {}))
    ddp.register_comm_hook(None, allreduce_hook)
    return _train(ddp, optimizer_class(_groups(ddp.module), **options), scheduler)


def _train_overlapped(
    make_hook, optimizer_class=torch.optim.SGD, ddp_options=None, hook_options=None, scheduler=None, **options
) -> list[torch.Tensor]:
    ddp = _ddp(_model(), **(ddp_options or {}))
    zero = ZeroRedundancyOptimizer(_groups(ddp.module), optimizer_class, overlap_with_ddp=True, **options)
    ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero, **(hook_options or {})))
    found = _train(ddp, zero, scheduler, steps_itself=False)
    assert zero_backend(zero).num_steps == NUM_STEPS
    return found


@on_ranks(2, FOUR)
def test_overlapped_steps_equal_ddp_with_a_local_optimizer() -> None:
    """Every pair of options, and on four ranks all 16 combinations; parity holds from the first step on."""
    start = list(_model().parameters())
    axes = ((False, True), (False, True), (hook_with_zero_step, hook_with_zero_step_interleaved), (False, True))
    cases = list(product(*axes) if dist.get_world_size() == 4 else pairs.pairwise(*axes))
    for bucket_view, static_graph in sorted({case[:2] for case in cases}):
        ddp_options = {"gradient_as_bucket_view": bucket_view, "static_graph": static_graph}
        expected = _train_plain(ddp_options=ddp_options, **SGD_OPTIONS)
        assert not any(torch.equal(a, b) for a, b in zip(expected, start, strict=True))
        for *_, make_hook, shard_buckets in [case for case in cases if case[:2] == (bucket_view, static_graph)]:
            found = _train_overlapped(
                make_hook, ddp_options=ddp_options, hook_options={"shard_buckets": shard_buckets}, **SGD_OPTIONS
            )
            assert_equal(found, expected)


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
            found = _train_overlapped(make_hook, optimizer_class, scheduler=True, **extra, **options)
            assert_equal(found, expected)


@on_ranks(2, FOUR)
def test_unused_parameters_stay_and_accumulated_gradients_count() -> None:
    """A parameter nobody used does not change; gradients of no_sync() are part of the step."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)

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
        ddp = _ddp(_model())
        if way is not None:
            optim: Any = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-3)
            ddp.register_comm_hook(None, way(allreduce_hook, ddp, optim))
        else:
            optim = torch.optim.Adam(ddp.parameters(), lr=1e-3)
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
    ddp = _ddp(_model())
    no_overlap = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    zero = ZeroRedundancyOptimizer(list(ddp.parameters())[:2], torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    before = copy.deepcopy(list(ddp.parameters()))
    assert zero.step() is None
    assert_equal(list(ddp.parameters()), before)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, ddp, no_overlap)

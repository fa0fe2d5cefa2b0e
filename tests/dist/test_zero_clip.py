"""Norms of gradients that lie with their owners: of all of them or an error, never of one rank's part."""

import copy
import gc
import math
import time
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.inside import counted
from helpers.pairs import pairwise
from helpers.ranks import on_ranks
from helpers.zero_models import loss_of_rank, mixed_model, zero_of
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise import (
    ShardwiseError,
    StateError,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    fully_shard,
    hook_with_zero_step,
)
from shardwise.zero.optimizer import zero_backend

NUM_STEPS = 4
PARTITIONS = ("whole", "even")


def _one_matrix() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(128, 3, bias=False))


def _backward_on_all(model: torch.nn.Module, step: int) -> None:
    """What one process does with the whole batch."""
    for rank in range(dist.get_world_size()):
        (loss_of_rank(model, step, rank) / dist.get_world_size()).backward()


def _same_on_all_ranks(value: torch.Tensor) -> None:
    every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(every, value)
    assert all(torch.equal(other, value) for other in every), every


@on_ranks(2, 4)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_is_that_of_one_process(norm_type: float) -> None:
    """Whichever way gradients came to be averaged, by the method or the function; and so is what is trained."""
    for partition, way, by_function in pairwise(PARTITIONS, ("ddp", "owners"), (False, True)):
        plain = mixed_model()
        model = mixed_model()
        adam = torch.optim.AdamW(plain.parameters(), lr=0.05)
        ddp = DDP(model, find_unused_parameters=True) if way == "ddp" else model
        zero = zero_of(model, partition)
        for step in range(NUM_STEPS):
            adam.zero_grad()
            zero.zero_grad()
            _backward_on_all(plain, step)
            loss_of_rank(ddp, step).backward()
            if way == "owners":
                zero.reduce_gradients()
            max_norm = 0.05 if step % 2 else 1e6
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            if by_function:
                found = clip_grad_norm_(model.parameters(), max_norm, norm_type)
            else:
                found = zero.clip_grad_norm_(max_norm, norm_type)
            assert found.dtype == torch.float32
            assert found.shape == ()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            _same_on_all_ranks(found)
            again = zero.clip_grad_norm_(1e6, norm_type)
            torch.testing.assert_close(again, torch.clamp(expected, max=max_norm), rtol=1e-4, atol=1e-6)
            adam.step()
            zero.step()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@on_ranks(2, 4)
def test_clipping_takes_one_collective() -> None:
    for partition, by_function in product(PARTITIONS, (False, True)):
        model = mixed_model()
        zero = zero_of(model, partition)
        loss_of_rank(model, 0).backward()
        zero.reduce_gradients()
        with counted("all_reduce", "broadcast", "all_gather", "all_to_all_single") as calls:
            clip_grad_norm_(model.parameters(), 1.0) if by_function else zero.clip_grad_norm_(1.0)
        assert calls == ["all_reduce"], calls


@on_ranks(2, 4)
def test_nothing_is_scaled_by_a_norm_that_is_not_finite() -> None:
    """The error comes on all ranks, also on those whose own elements are fine."""
    for partition in PARTITIONS:
        model = mixed_model()
        zero = zero_of(model, partition)
        loss_of_rank(model, 0).backward()
        if dist.get_rank() == 1:
            model[2].weight.grad[0, 0] = math.inf
        zero.reduce_gradients()
        before = [part.clone() for p in model.parameters() if p.grad is not None for part in p.grad.parts]
        for norm_type in (2.0, math.inf):
            with pytest.raises(RuntimeError, match="non-finite"):
                zero.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
            with pytest.raises(RuntimeError, match="non-finite"):
                clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        after = [part for p in model.parameters() if p.grad is not None for part in p.grad.parts]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    with pytest.raises(ValueError, match="norm_type"):
        zero.clip_grad_norm_(1.0, 0.0)


@on_ranks(2, 4)
def test_large_and_half_precision_gradients_have_finite_norms() -> None:
    """The square of a norm may be too large for float32, a norm too large for float16."""
    size = dist.get_world_size()
    for dtype, value, expected in ((torch.float32, 2e18, 3.2e19), (torch.float16, 6e4 / size, 9.6e5 / size)):
        for partition in PARTITIONS:
            params = [torch.nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(4)]
            zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, partition=partition, lr=0.1)
            for p in params:
                p.grad = torch.full_like(p, value)
            zero.reduce_gradients()
            assert zero.clip_grad_norm_(2.0).item() == pytest.approx(expected, rel=1e-2)
            assert clip_grad_norm_(params, 2.0).item() == pytest.approx(2.0, rel=1e-2)


@on_ranks(2, 4)
def test_plain_norms_are_refused() -> None:
    """On every rank, also on one that owns nothing; the message says what to call, the gradients stay as they were."""
    for partition in PARTITIONS:
        param = torch.nn.Parameter(torch.ones(4, 3))  # fewer parameters than ranks
        for params in (list(mixed_model().parameters()), [param]):
            zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, partition=partition, lr=0.05)
            for index, p in enumerate(params):
                p.grad = torch.full_like(p, 1.0 + index + dist.get_rank())
            zero.reduce_gradients()
            norm = zero.clip_grad_norm_(1e6)
            first = params[0].grad
            calls: list[Callable[[], Any]] = [
                lambda params=params: torch.nn.utils.clip_grad_norm_(params, 1.0),
                lambda params=params: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=False),
                lambda params=params: torch.nn.utils.clip_grad_norm_(params, 1.0, math.inf),
                lambda params=params: torch.nn.utils.get_total_norm([p.grad for p in params]),
                lambda first=first: first.norm(),
                lambda first=first: first.data.norm(2),
                lambda first=first: first.detach().double().norm(),
                lambda first=first: first.float().pow(2).sum(),
                lambda first=first: first.clone().abs().max(),
                lambda first=first: first.square().mean(),
                lambda first=first: (first * first).sum(),
                lambda first=first: torch.linalg.vector_norm(first),
                lambda first=first: torch.isfinite(first).all(),
                lambda first=first: torch.isnan(first).any(),
                lambda first=first: first.mul_(torch.tensor(0.5)),
                lambda first=first: torch.cat([first.view(-1), first.flatten()]),
            ]
            for call in calls:
                with pytest.raises(StateError, match=r"optimizer\.clip_grad_norm_"):
                    call()
            assert torch.equal(zero.clip_grad_norm_(1e6), norm)


@on_ranks(2, 4)
def test_changes_element_by_element_are_those_of_one_process() -> None:
    """Also on ranks that own no gradient at all."""
    for partition, make in product(PARTITIONS, (mixed_model, _one_matrix)):
        plain, model = make(), make()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, partition=partition, lr=0.1)
        _backward_on_all(plain, 0)
        loss_of_rank(model, 0).backward()
        zero.reduce_gradients()
        assert (
            make is mixed_model
            or partition == "even"
            or len(zero_backend(zero).rank_partition.local_slices) == (dist.get_rank() == 0)
        )
        for module in (plain, model):
            for p in module.parameters():
                if p.grad is not None:
                    p.grad.mul_(3.0)
                    p.grad /= 2
            torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)
        sgd.step()
        zero.step()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@on_ranks(2, 4)
def test_backwards_after_averaging_add_up() -> None:
    """As one process adds them; a step before they are averaged too is refused."""
    for partition, set_to_none in product(PARTITIONS, (True, False)):
        plain, model = mixed_model(), mixed_model()
        adam, zero = torch.optim.AdamW(plain.parameters(), lr=0.05), zero_of(model, partition)
        for step in range(3):
            for optimizer in (adam, zero):
                optimizer.zero_grad(set_to_none=set_to_none)
            for microbatch in range(3):
                _backward_on_all(plain, 10 * step + microbatch)
                loss_of_rank(model, 10 * step + microbatch).backward()
                if microbatch == 1:
                    with pytest.raises(StateError, match=r"reduce_gradients\(\) again"):
                        zero.step()
                    with pytest.raises(StateError, match=r"reduce_gradients\(\) again"):
                        zero.clip_grad_norm_(1.0)
                zero.reduce_gradients()
            for p in model.parameters():
                assert p.grad is None or p.grad.fresh is None
            adam.step()
            zero.step()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_an_error_that_every_rank_caught_is_no_reason_to_leave_a_rank_that_is_slower() -> None:
    """Rank 0 waits in reduce_gradients() for two seconds, while what rank 1 has reported is of the step before."""
    model = mixed_model()
    zero = zero_of(model, "even")
    for microbatch in range(2):
        loss_of_rank(model, microbatch).backward()
        if microbatch == 1:
            with pytest.raises(StateError, match=r"reduce_gradients\(\) again"):
                zero.step()
            time.sleep(2.5 * dist.get_rank())
        zero.reduce_gradients()
    zero.step()


@on_ranks(2, 4)
def test_a_gradient_that_was_not_averaged_is_named() -> None:
    for partition in PARTITIONS:
        model = mixed_model()
        zero = zero_of(model, partition)
        loss_of_rank(model, 0).backward()
        zero.reduce_gradients()
        model[3].unused.grad = torch.ones(3)
        for call in (zero.step, lambda zero=zero: zero.clip_grad_norm_(1.0)):
            with pytest.raises(StateError, match=r"parameter 5 of shape \(3,\) has a gradient of this rank only"):
                call()


@on_ranks(2, 4)
def test_module_zero_grad_drops_what_was_averaged() -> None:
    """Nothing of it is stepped on again, nothing stays in memory."""
    for partition in PARTITIONS:
        model = mixed_model()
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, partition=partition, lr=0.1)
        loss_of_rank(model, 0).backward()
        zero.reduce_gradients()
        held = [weakref.ref(part) for p in model.parameters() if p.grad is not None for part in p.grad.parts]
        zero.step()
        after = [p.detach().clone() for p in model.parameters()]
        model.zero_grad()
        gc.collect()
        assert [part for part in held if part() is not None] == []
        zero.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), after, strict=True))


@on_ranks(2, 4)
@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaler_agrees(overflow: bool) -> None:
    """All ranks skip a step, or none does, though the value that is not finite is with one owner."""
    for partition, way, unscale_first in pairwise(PARTITIONS, ("ddp", "owners"), (False, True)):
        plain, model = mixed_model(), mixed_model()
        ddp = DDP(model, find_unused_parameters=True) if way == "ddp" else model
        adam, zero = torch.optim.AdamW(plain.parameters(), lr=0.05), zero_of(model, partition)
        scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
        for step in range(NUM_STEPS):
            for optimizer in (adam, zero):
                optimizer.zero_grad()
            for rank in range(dist.get_world_size()):
                scalers[0].scale(loss_of_rank(plain, step, rank) / dist.get_world_size()).backward()
            scalers[1].scale(loss_of_rank(ddp, step)).backward()
            if overflow and step in (1, 2):
                plain[2].weight.grad[0, 0] = math.inf
                if way == "ddp" or dist.get_rank() == 0:
                    model[2].weight.grad[0, 0] = math.inf
            if way == "owners":
                zero.reduce_gradients()
            if unscale_first:
                scalers[0].unscale_(adam)
                scalers[1].unscale_(zero)
                expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                torch.testing.assert_close(zero.clip_grad_norm_(0.1), expected, rtol=1e-4, atol=1e-6)
            for scaler, optimizer in zip(scalers, (adam, zero), strict=True):
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert zero_backend(zero).num_steps == (NUM_STEPS - 2 if overflow else NUM_STEPS)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@on_ranks(2, 4)
def test_sharded_parameters_may_be_clipped_beside() -> None:
    """The function takes them all: DTensors on a mesh, gradients with owners, plain ones."""
    plain = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
    torch.manual_seed(0)
    for p in plain.parameters():
        torch.nn.init.normal_(p)
    sharded, owned, replicated = copy.deepcopy(plain)
    fully_shard(sharded)
    zero = zero_of(owned, "even")
    everything = [*sharded.parameters(), *owned.parameters(), *replicated.parameters()]
    for rank in range(dist.get_world_size()):
        noise = torch.Generator().manual_seed(rank)
        x = torch.randn(3, 6, generator=noise)
        for module in plain:
            (module(x).square().mean() / dist.get_world_size()).backward()
        if rank == dist.get_rank():
            for module in (sharded, owned, replicated):
                module(x).square().mean().backward()
    for p in replicated.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    zero.reduce_gradients()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    found = clip_grad_norm_(everything, 0.1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(clip_grad_norm_(everything, 1.0), torch.tensor(0.1), rtol=1e-4, atol=1e-6)


@on_ranks(2, 4)
def test_overlapped_steps_cannot_be_clipped() -> None:
    for partition, reduce in product(PARTITIONS, ("all", "owner")):
        ddp = DDP(torch.nn.Linear(5, 4))
        zero = zero_of(ddp, partition, overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook_with_zero_step(None, ddp, zero, reduce=reduce))
        ddp(torch.ones(2, 5) * (1 + dist.get_rank())).sum().backward()
        with pytest.raises(StateError, match="has been made when backward returns"):
            zero.clip_grad_norm_(1.0)
        if reduce == "owner":
            for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
                with pytest.raises(StateError):
                    clip(ddp.parameters(), 1.0)
            with pytest.raises((StateError, RuntimeError), match="zero_grad"):
                ddp(torch.ones(2, 5)).sum().backward()


@on_ranks(2, 4)
def test_clipping_works_in_join() -> None:
    """Ranks that have joined clip nothing, and nobody waits for them; owners' gradients need every rank."""
    rank = dist.get_rank()
    for partition in PARTITIONS:
        plain, model = DDP(torch.nn.Linear(4, 3)), DDP(torch.nn.Linear(4, 3))
        model.module.load_state_dict(plain.module.state_dict())
        adam, zero = torch.optim.AdamW(plain.parameters(), lr=0.05), zero_of(model, partition)
        batches = [torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(1 + rank)]
        with Join([plain]):
            for batch in batches:
                adam.zero_grad()
                plain(batch).square().sum().backward()
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                adam.step()
        with Join([model, zero]):
            for batch in batches:
                zero.zero_grad()
                model(batch).square().sum().backward()
                zero.clip_grad_norm_(0.1)
                zero.step()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            expected = b.detach().clone()
            dist.broadcast(expected, src=dist.get_world_size() - 1)
            torch.testing.assert_close(a, expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(ShardwiseError, match="in Join do not take part"), Join([zero]):
            zero.reduce_gradients()


@on_ranks(2, 4)
def test_one_rank_with_other_gradients_is_named() -> None:
    model = mixed_model()
    zero = zero_of(model, "even")
    loss_of_rank(model, 0).backward()
    if dist.get_rank() == 1:
        model[0].bias.grad = None
    with pytest.raises(ShardwiseError, match=r"rank 1: parameter 1 of shape \(5,\) has no gradient"):
        zero.reduce_gradients()


@on_ranks(1)
def test_on_one_rank_nothing_has_an_owner() -> None:
    """Gradients stay plain where they are, so that any clip is right."""
    for partition in PARTITIONS:
        plain, model = mixed_model(), mixed_model()
        adam, zero = torch.optim.AdamW(plain.parameters(), lr=0.05), zero_of(model, partition)
        for step in range(3):
            for module, optimizer in ((plain, adam), (model, zero)):
                optimizer.zero_grad()
                for microbatch in range(2):
                    loss_of_rank(module, 10 * step + microbatch).backward()
                    if module is model:
                        zero.reduce_gradients()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        loss_of_rank(model, 9).backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(zero.clip_grad_norm_(1e6), expected)

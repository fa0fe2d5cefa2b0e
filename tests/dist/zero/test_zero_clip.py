"""Norms of the gradients of a ZeroRedundancyOptimizer: those of one process, in Join, with a scaler."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients
from helpers.pairs import pairwise
from helpers.ranks import FOUR, on_ranks
from helpers.zero_models import loss_of_rank, mixed_model, zero_of
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise import (
    StateError,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    hook_with_zero_step,
)
from shardwise.zero.optimizer import zero_backend

NUM_STEPS = 4
PARTITIONS = ("whole", "even")


def _backward_on_all(model: torch.nn.Module, step: int) -> None:
    """What one process does with the whole batch."""
    for rank in range(dist.get_world_size()):
        (loss_of_rank(model, step, rank) / dist.get_world_size()).backward()


def _same_on_all_ranks(value: torch.Tensor) -> None:
    every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(every, value)
    assert all(torch.equal(other, value) for other in every), every


@on_ranks(2, FOUR)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_is_that_of_one_process(norm_type: float) -> None:
    """Whichever way gradients came to be averaged, by the method or the function; and so is what is trained."""
    for partition, way, by_function in pairwise(PARTITIONS, ("ddp", "by hand"), (False, True)):
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
            if way == "by hand":
                average_gradients(model)
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


@on_ranks(2, FOUR)
def test_nothing_is_scaled_by_a_norm_that_is_not_finite() -> None:
    """The error comes on all ranks, also on those whose own elements are fine."""
    for partition in PARTITIONS:
        model = mixed_model()
        zero = zero_of(model, partition)
        loss_of_rank(model, 0).backward()
        if dist.get_rank() == 1:
            model[2].weight.grad[0, 0] = math.inf
        average_gradients(model)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for norm_type in (2.0, math.inf):
            with pytest.raises(RuntimeError, match="non-finite"):
                zero.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
            with pytest.raises(RuntimeError, match="non-finite"):
                clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        after = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    with pytest.raises(ValueError, match="norm_type"):
        zero.clip_grad_norm_(1.0, 0.0)


@on_ranks(2, FOUR)
def test_large_and_half_precision_gradients_have_finite_norms() -> None:
    """The square of a norm may be too large for float32, a norm too large for float16."""
    for dtype, value, expected in ((torch.float32, 2e18, 3.2e19), (torch.float16, 6e4, 9.6e5)):
        for partition in PARTITIONS:
            params = [torch.nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(4)]
            zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, partition=partition, lr=0.1)
            for p in params:
                p.grad = torch.full_like(p, value)
            assert zero.clip_grad_norm_(2.0).item() == pytest.approx(expected, rel=1e-2)
            assert clip_grad_norm_(params, 2.0).item() == pytest.approx(2.0, rel=1e-2)


@on_ranks(2, FOUR)
@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaler_agrees(overflow: bool) -> None:
    """All ranks skip a step, or none does, though the value that is not finite is with one owner."""
    for partition, way, unscale_first in pairwise(PARTITIONS, ("ddp", "by hand"), (False, True)):
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
            if way == "by hand":
                average_gradients(model)
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


@on_ranks(2, FOUR)
def test_overlapped_steps_cannot_be_clipped() -> None:
    for partition in PARTITIONS:
        ddp = DDP(torch.nn.Linear(5, 4))
        zero = zero_of(ddp, partition, overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook_with_zero_step(None, ddp, zero))
        ddp(torch.ones(2, 5) * (1 + dist.get_rank())).sum().backward()
        with pytest.raises(StateError, match="has been made when backward returns"):
            zero.clip_grad_norm_(1.0)


@on_ranks(2, FOUR)
def test_clipping_works_in_join() -> None:
    """Ranks that have joined clip nothing, and nobody waits for them."""
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

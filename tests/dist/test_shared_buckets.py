"""replicate: small gradients of neighbouring units travel together, and that changes nothing but the number of collectives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients, local
from helpers.inside import all_reduced, full_from
from helpers.models import Block
from helpers.ranks import on_ranks
from helpers.sharded import batch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import DesyncError, replicate

WIDTH = 7


def replicated(num_blocks: int, width: int = WIDTH, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width, 2 * width) for _ in range(num_blocks)])
    for block in model:
        replicate(block, **options)
    return replicate(model, **options)


BYTES = sum(param.numel() for param in Block(WIDTH, 2 * WIDTH).parameters()) * 4


class Copies(TorchDispatchMode):
    """Counts the tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_foreach_copy_", "cat"):
            self.count += len(args[0])
        self.count += name in ("copy_", "clone", "_to_copy", "empty_like")
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_a_narrow_model_takes_no_more_all_reduces_than_ddp_and_one_copy_of_each_gradient() -> None:
    num_blocks, width = 32, 64
    ddp = DistributedDataParallel(nn.Sequential(*[Block(width, 2 * width) for _ in range(num_blocks)]))
    buckets: list[int] = []

    ddp.register_comm_hook(None, lambda _, bucket: (buckets.append(bucket.index()), allreduce_hook(None, bucket))[1])
    model = replicated(num_blocks, width)
    for step in range(3):
        x = torch.randn(2, width)
        buckets.clear()
        ddp(x).sum().backward()
        loss = model(x).sum()
        with all_reduced() as seen, Copies() as copies:
            loss.backward()
        assert len(seen) == 1 <= len(buckets), (step, seen, buckets)
        # And the mark behind them, which torch 2.15 does not copy but fills in.
        if step:  # in the first, ranks compare what they begin with
            assert copies.count - len(list(model.parameters())) in (0, 1), step


@on_ranks(2)
def test_buckets_are_the_same_in_the_first_step_and_later_and_last_is_what_is_left() -> None:
    with full_from(2 * BYTES):
        model = replicated(5)
        for step in range(3):
            loss = model(batch(step)).sum()
            with all_reduced() as seen:
                loss.backward()
            assert [numel * 4 for numel in seen] == [2 * BYTES, 2 * BYTES, BYTES], step


@on_ranks(2)
def test_a_unit_beside_others_is_one_bucket_however_large_it_is() -> None:
    with full_from(BYTES // 3):
        model = replicated(3)
        for step in range(3):
            loss = model(batch(step)).sum()
            with all_reduced() as seen:
                loss.backward()
            assert [numel * 4 for numel in seen] == [BYTES] * 3, step


class Heads(nn.Module):
    """Blocks before two heads; no loss depends on the one that is used last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(WIDTH, 2 * WIDTH) for _ in range(3)])
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        used, _ = (head(x) for head in self.heads)
        return used


@on_ranks(2)
def test_a_bucket_does_not_wait_for_a_unit_that_no_loss_depends_on() -> None:
    model = Heads()
    for module in (*model.blocks, *model.heads):
        replicate(module)
    replicate(model)
    began: list[int] = []
    model.blocks[0].register_full_backward_pre_hook(lambda *_: began.append(len(seen)))
    with full_from(BYTES):
        for step in range(2):
            loss = model(batch(step)).sum()
            with all_reduced() as seen:
                loss.backward()
            assert len(seen) == 3  # both heads and the last block, a block, a block
    assert began == [0, 2]


def units_go_their_own_ways(model: Any, microbatch: int) -> None:
    model.set_requires_gradient_sync(microbatch == 2)
    model[1].set_requires_gradient_sync(True)
    model[2].set_requires_all_reduce(microbatch == 2)
    model[2].set_requires_gradient_sync(True)


@pytest.mark.parametrize("older", [False, True])
@on_ranks(2, 4)
def test_units_of_other_scales_syncs_and_sums_train_as_alone(older: bool) -> None:
    options: dict[str, Any] = {"device_ids": None} if older else {}
    with full_from(4 * BYTES):
        model = replicated(6, **options)
        reference = nn.Sequential(*[Block(WIDTH, 2 * WIDTH) for _ in range(6)])
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.data.copy_(local(mine.detach()))
        model[4].set_gradient_divide_factor(1.0)
        for step in range(2):
            for microbatch in range(3):
                units_go_their_own_ways(model, microbatch)
                model.set_is_last_backward(microbatch != 1)
                x = batch(3 * step + microbatch)
                for each in (model, reference):
                    each(x).square().sum().backward()
            average_gradients(reference)
            for name, param in reference.named_parameters():
                scale = dist.get_world_size() if name.startswith("4.") else 1
                found = local(model.get_parameter(name).grad)
                torch.testing.assert_close(found, scale * param.grad, msg=lambda text, n=name: f"{n}: {text}")
            model.zero_grad()
            reference.zero_grad()


@pytest.mark.parametrize("cleared", ["", "1.up.weight"])
@on_ranks(2, 4)
def test_a_microbatch_without_sync_between_deferred_ones_counts_once(cleared: str) -> None:
    model = replicated(4)
    reference = nn.Sequential(*[Block(WIDTH, 2 * WIDTH) for _ in range(4)])
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.data.copy_(local(mine.detach()))
    for step in range(2):
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch != 1)
            model.set_is_last_backward(microbatch == 2)
            for each in (model, reference):
                each(batch(3 * step + microbatch)).square().sum().backward()
                if cleared and microbatch == 1:
                    each.get_parameter(cleared).grad = None
        average_gradients(reference)
        for name, param in reference.named_parameters():
            torch.testing.assert_close(
                local(model.get_parameter(name).grad), param.grad, msg=lambda text, n=name: f"{n}: {text}"
            )
        model.zero_grad()
        reference.zero_grad()


class Swapping(nn.Sequential):
    order = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self[index](x)
        return x


@on_ranks(2)
def test_ranks_that_would_put_other_units_together_raise_before_they_send_anything() -> None:
    with full_from(2 * BYTES):
        model = Swapping(*[Block(WIDTH, 2 * WIDTH) for _ in range(3)])
        for block in model:
            replicate(block)
        replicate(model)
        if dist.get_rank() == 1:
            model.order = (1, 0, 2)
        loss = model(batch()).sum()
        with all_reduced() as seen, pytest.raises(DesyncError, match=r"one reduction of units '2', '[01]'"):
            loss.backward()
        assert not seen


@on_ranks(2)
def test_a_backward_that_raises_leaves_nothing_in_a_bucket() -> None:
    with full_from(100 * BYTES):
        model = replicated(3)
        reference = copy.deepcopy(nn.Sequential(*[Block(WIDTH, 2 * WIDTH) for _ in range(3)]))
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.data.copy_(local(mine.detach()))
        for step in range(2):
            handle = model[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
            loss = model(batch(step)).sum()
            with all_reduced() as seen, pytest.raises(ZeroDivisionError):
                loss.backward()
            handle.remove()
            assert not seen
            for each in (model, reference):
                each(batch(step)).square().sum().backward()
        average_gradients(reference)
        for name, param in reference.named_parameters():
            torch.testing.assert_close(local(model.get_parameter(name).grad), param.grad)

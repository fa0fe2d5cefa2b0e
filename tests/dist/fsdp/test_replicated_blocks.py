"""replicate on blocks: every unit is reduced for itself, by its own settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_gradients, average_gradients, local
from helpers.inside import all_reduced
from helpers.models import Block
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import batch
from torch import nn

from shardwise import DesyncError, replicate

WIDTH = 7


def replicated(num_blocks: int, width: int = WIDTH, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width, 2 * width) for _ in range(num_blocks)])
    for block in model:
        replicate(block, **options)
    return replicate(model, **options)


BYTES = sum(param.numel() for param in Block(WIDTH, 2 * WIDTH).parameters()) * 4


def units_go_their_own_ways(model: Any, microbatch: int) -> None:
    model.set_requires_gradient_sync(microbatch == 2)
    model[1].set_requires_gradient_sync(True)
    model[2].set_requires_all_reduce(microbatch == 2)
    model[2].set_requires_gradient_sync(True)


@pytest.mark.parametrize("older", [False, True])
@on_ranks(2, FOUR)
def test_units_of_other_scales_syncs_and_sums_train_as_alone(older: bool) -> None:
    options: dict[str, Any] = {"device_ids": None} if older else {}
    model = replicated(6, **options)
    reference = nn.Sequential(*[Block(WIDTH, 2 * WIDTH) for _ in range(6)])
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.data.copy_(local(mine.detach()))
    if not older:
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
            scale = dist.get_world_size() if name.startswith("4.") and not older else 1
            found = local(model.get_parameter(name).grad)
            torch.testing.assert_close(found, scale * param.grad, msg=lambda text, n=name: f"{n}: {text}")
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("cleared", ["", "1.up.weight"])
@on_ranks(2, FOUR)
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
        assert_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


class Swapping(nn.Sequential):
    order = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self[index](x)
        return x


@on_ranks(2, group_timeout_s=3)
def test_units_are_reduced_one_by_one_and_ranks_that_run_them_in_another_order_are_named() -> None:
    model = Swapping(*[Block(WIDTH, 2 * WIDTH) for _ in range(3)])
    for block in model:
        replicate(block)
    replicate(model)
    with all_reduced() as seen:
        model(batch()).sum().backward()
    assert seen == [BYTES // 4] * 3
    if dist.get_rank() == 1:
        model.order = (1, 0, 2)
    with pytest.raises(DesyncError, match="rank 1"):
        model(batch()).sum().backward()


@on_ranks(2)
def test_ranks_whose_first_step_runs_units_in_another_order_are_named() -> None:
    model = Swapping(*[Block(WIDTH, 2 * WIDTH) for _ in range(3)])
    for block in model:
        replicate(block)
    replicate(model)
    if dist.get_rank() == 1:
        model.order = (1, 0, 2)
    with pytest.raises(DesyncError, match=r"rank [01]"):
        model(batch()).sum().backward()

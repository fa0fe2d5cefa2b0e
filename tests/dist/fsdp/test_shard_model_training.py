"""shard_model: the same training as one process on the whole batch and as a unit for each block."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.compare import CLOSE, EXACT, assert_same
from helpers.ranks import on_ranks
from helpers.stacked import BLOCK, HUGE, MODELS, build, inputs
from torch import nn

from shardwise import fully_shard, shard_model
from shardwise.fsdp.unit import HELD


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("blocks").children())


def train_beside(name: str, least: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, per_block, model = build(name), build(name), build(name)
    for block in blocks_of(per_block):
        fully_shard(block)
    fully_shard(per_block)
    keys = list(model.state_dict())
    assert shard_model(model, min_unit_bytes=least) is model
    assert list(model.state_dict()) == keys
    models = (reference, per_block, model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, foreach=True) for each in models]
    for step in range(2):
        batch = inputs(name, step, size)
        expected = reference(batch).square().mean()
        losses = [each(batch.chunk(size)[rank]).square().mean() for each in (per_block, model)]
        for loss in (expected, *losses):
            loss.backward()
        where = f"{name}, at least {least} bytes, step {step}"
        if size == 2:  # with more, gloo adds in an order that depends on the length of a message
            assert torch.equal(losses[0], losses[1]), where
        mean = losses[1].detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=1e-6, msg=where)
        assert_same(model, reference, where=where)
        assert_same(model, per_block, EXACT if size == 2 else CLOSE, f"{where}, beside a unit for each block")
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_same(model, reference, where=name)


def run_training(names: list[str], least: list[int]) -> None:
    for name in names:
        for each in least:
            train_beside(name, each)


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name == "checkpointed-and-frozen")) for name in MODELS],
)
def test_trains_as_one_process_and_as_a_unit_for_each_block(name: str) -> None:
    run_training(names=[name], least=[2 * BLOCK, HUGE] if name in ("mixed", "tied") else [2 * BLOCK])


@on_ranks(4)
def test_trains_on_four_ranks() -> None:
    run_training(names=["uneven"], least=[2 * BLOCK])


@on_ranks(2)
def test_backward_leaves_a_list_of_half_frozen_modules_at_its_first_one() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = build("half-frozen")
    model = copy.deepcopy(reference)
    fully_shard(blocks_of(model), reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    for step in range(3):
        x = inputs("", step, size)
        for backwards in range(1, 3):  # a graph that is kept passes the same inputs again
            outputs = [reference(x).square().mean(), model(x.chunk(size)[rank]).square().mean()]
            for output in outputs:
                for _ in range(backwards - 1):
                    output.backward(retain_graph=True)
                output.backward()
        assert_same(model, reference, where=f"step {step}")
        assert model.blocks[0]._attachment().unit.held is not HELD

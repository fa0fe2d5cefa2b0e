"""fully_shard against one process on the whole batch, DDP and torch's FSDP2, over every mix of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers.compare import EXACT, REORDERED, assert_same
from helpers.inside import link_name_of, over, parts_from
from helpers.models import MODELS, batch_for, build, units_of
from helpers.ranks import on_ranks
from helpers.sharded import build_sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.collectives.routes import Transport

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


LINKS: dict[Transport, str | None] = {"auto": "shared memory", "gloo": "all-to-all", "collective": None}


def assert_used(model: nn.Module, transport: Transport) -> None:
    assert link_name_of(model) == LINKS[transport]


def against_one_process(model: str, optimizer: str, reshard: bool | None, transport: Transport, steps: int = 2) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, sharded = build(model), build_sharded(model, reshard_after_forward=reshard)
    optimizers = [OPTIMIZERS[optimizer](list(each.parameters())) for each in (reference, sharded)]
    for step in range(steps):
        batch = batch_for(model, step, 4 * size)
        expected = reference(batch).square().mean()
        loss = sharded(batch.chunk(size)[rank]).square().mean()
        expected.backward()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=1e-6)
        assert_same(sharded, reference)
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=step % 2 == 0)
    assert_same(sharded, reference)
    assert_used(sharded, transport)


@on_ranks()
@pytest.mark.parametrize(
    ("optimizer", "transport", "num_ranks"),
    [
        ("sgd", "auto", 2),
        pytest.param("adamw-foreach", "gloo", 2, marks=pytest.mark.exhaustive),
        pytest.param("adamw-foreach", "auto", 4, marks=pytest.mark.exhaustive),  # test_reference.py has four ranks, too
        ("adamw-fused", "gloo", 2),
    ],
)
def test_equals_one_process_on_the_whole_batch(optimizer: str, transport: Transport) -> None:
    with over(transport), parts_from(8):
        for number, model in enumerate(MODELS):  # each meets every ``reshard``, with one optimizer or another
            for index, reshard in enumerate((None, True, False)):
                if ((number + index) % 3 == 0) == (optimizer != "sgd"):
                    against_one_process(model, optimizer, reshard, transport)


def run_against_peers(num_steps: int, transport: Transport) -> None:
    with over(transport), parts_from(8):
        against_peers(num_steps, transport)


def against_peers(num_steps: int, transport: Transport) -> None:
    """Compare to the bit where sums have one order: of two terms, or torch's own.  Links sum in the order of ranks."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    rank, size = dist.get_rank(), dist.get_world_size()
    tolerance = EXACT if size == 2 or transport == "collective" else REORDERED
    cases = [("plain", "adamw", True), ("frozen", "adamw-foreach", False)]
    if transport == "collective":  # gathers of one parameter copy nothing
        cases.append(("matrices", "adamw", True))
    if size == 2 and transport == "auto":
        cases += [("plain", "adamw-fused", False), ("plain", "sgd", True)]
    for name, optimizer, reshard in cases:
        theirs = build(name)
        for module in units_of(name, theirs):
            torch_fully_shard(module, reshard_after_forward=reshard)
        torch_fully_shard(theirs, reshard_after_forward=reshard)
        models = [build_sharded(name, reshard_after_forward=reshard), theirs, DistributedDataParallel(build(name))]
        optimizers = [OPTIMIZERS[optimizer](list(each.parameters())) for each in models]
        for step in range(num_steps):
            batch = batch_for(name, step, 4 * size).chunk(size)[rank]
            losses = [model(batch).square().mean() for model in models]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(losses[0], losses[1], **tolerance)
            torch.testing.assert_close(losses[0], losses[2])
            assert_same(models[0], models[1], tolerance)
            assert_same(models[0], models[2].module)
            for each in optimizers:
                each.step()
                each.zero_grad()
        assert_used(models[0], transport)


@on_ranks()
@pytest.mark.parametrize(
    ("transport", "num_ranks"),
    [
        ("auto", 2),
        pytest.param("gloo", 2, marks=pytest.mark.exhaustive),  # to the bit as "auto": test_transports.py
        ("collective", 2),
        pytest.param("auto", 4, marks=pytest.mark.exhaustive),  # test_reference.py has four ranks, too
        pytest.param("collective", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_equals_torch_fsdp2_to_the_bit_and_ddp(transport: Transport) -> None:
    run_against_peers(num_steps=2, transport=transport)

"""Ranks that diverge: an error on every rank that names the rank, the unit and the call; never a hang."""

from __future__ import annotations

import copy
import itertools
import re
import time

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_gradients, average_gradients
from helpers.models import Block
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import FSDPModule, fully_shard, replicate
from shardwise.collectives.routes import Transport
from shardwise.testing import WorkerPool


class Skippable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 8 * (1 + i)) for i in range(3))

    def forward(self, x: torch.Tensor, skip: int = -1, reverse: bool = False) -> torch.Tensor:
        for index, block in enumerate(reversed(self.blocks) if reverse else self.blocks):
            if index != skip:
                x = block(x)
        return x


def build() -> Skippable:
    torch.manual_seed(0)
    model = Skippable()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def diverge(how: str) -> str:
    """Rank 1 leaves the path of the others; return the message that this rank got."""
    model, rank = build(), dist.get_rank()
    x = torch.randn(2, 8)
    for _ in range(3):
        model(x).sum().backward()
    start = time.monotonic()
    try:
        for _ in range(3):
            if how == "skip":
                model(x, skip=1 if rank == 1 else -1).sum().backward()
            elif how == "order":
                model(x, reverse=rank == 1).sum().backward()
            else:
                for _ in range(2 if rank == 1 else 1):
                    model(x).sum().backward()
                if rank == 0:
                    time.sleep(0.1)
        if how == "microbatches" and rank == 0:
            dist.barrier()
    except RuntimeError as error:
        assert time.monotonic() - start < 30
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("how", ["skip", "order"])
def test_a_rank_that_leaves_the_order_is_named(pool: WorkerPool, how: str) -> None:
    messages = pool.run(diverge, how=how, num_ranks=2, timeout_s=60.0, group_timeout_s=3.0, fresh=True)
    assert all(message.startswith("DesyncError") for message in messages), messages
    assert all("rank 1" in message and "unit 'blocks." in message for message in messages), messages


def test_another_number_of_microbatches_is_named(pool: WorkerPool) -> None:
    messages = pool.run(diverge, how="microbatches", num_ranks=2, timeout_s=60.0, group_timeout_s=3.0, fresh=True)
    assert messages[1].startswith("DesyncError"), messages
    assert "rank 0" in messages[1], messages


@on_ranks(2)
def test_a_change_on_all_ranks_is_no_error() -> None:
    model, x = build(), torch.randn(2, 8)
    for reverse in (False, False, True, True, False):
        model(x, reverse=reverse).sum().backward()
    with torch.no_grad():
        model(x)
    model(x, skip=1).sum().backward()


def train_differently(api: str, how: str) -> str:
    """Rank 1 has another model, or freezes a parameter after two steps; return the message that this rank got."""
    rank = dist.get_rank()
    odd = rank == 1
    widths = [8, 16 if odd and how == "width" else 12, 8] + [8] * (odd and how == "block")
    model = nn.Sequential(*(nn.Linear(before, after) for before, after in itertools.pairwise(widths)))
    if odd and how == "frozen":
        model[0].bias.requires_grad_(False)
    if api == "replicate":
        replicate(model)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        model.set_transport(api)
    try:
        for step in range(4):
            if odd and how == "frozen later" and step == 2:
                model[0].bias.requires_grad_(False)
            model(torch.ones(2, 8)).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("api", "how"),
    [
        ("replicate", "width"),
        ("replicate", "block"),
        ("replicate", "frozen"),
        ("replicate", "frozen later"),
        pytest.param("collective", "frozen later", marks=pytest.mark.exhaustive),
        ("gloo", "frozen"),
    ],
)
def test_ranks_that_would_reduce_different_gradients_meet_before(pool: WorkerPool, api: str, how: str) -> None:
    """Backends that are given other sizes than their peers end the process; of the same size they mix parameters."""
    messages = pool.run(
        train_differently, api=api, how=how, num_ranks=2, timeout_s=60.0, group_timeout_s=6.0, fresh=True
    )  # the limit is also of the steps before: a busy machine once took four seconds for one
    assert all(message.startswith("DesyncError") for message in messages), messages
    what = {"width": "of shape (16, 8)", "block": "2.weight of shape (8, 8)", "frozen": "frozen"}
    expected = what.get(how, "rank 1 has new gradients of ")
    assert expected in messages[1], messages
    # On a busy machine the wait of rank 0, for the sum, may end before rank 1 gives up to wait and says what differs.
    assert expected in messages[0] or "waited 6 s for rank 1 at the sum of gradients" in messages[0], messages


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2 + dist.get_rank()](self.layers[1](self.layers[0](x)))


def train_other_parameters() -> str:
    """Each rank uses another layer of a unit, of the same shape, behind the same three parameters."""
    torch.manual_seed(0)
    model = fully_shard(Tower())
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_with_gradients_of_other_parameters_of_a_unit_are_named(pool: WorkerPool) -> None:
    messages = pool.run(train_other_parameters, num_ranks=2, timeout_s=60.0, group_timeout_s=8.0, fresh=True)
    assert all(message.startswith("DesyncError") for message in messages), messages
    assert all("reduces something else" in message for message in messages), messages


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, is_left: bool) -> torch.Tensor:
        return self.left(x) if is_left else self.right(x)


@on_ranks(2)
@pytest.mark.parametrize("api", ["replicate", "collective", "gloo"])
def test_ranks_may_come_to_the_same_gradients_in_another_order(api: str) -> None:
    """What is held from microbatches without sync comes from other branches on each rank; what is reduced is the same."""
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    if api == "replicate":
        replicate(model)
    else:
        fully_shard(model, reshard_after_forward=False)
        model.set_transport(api)
    assert isinstance(model, FSDPModule)
    rank = dist.get_rank()
    for _ in range(2):
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            for each in (model, plain):
                each(torch.full((2, 4), 1.0 + rank), is_left=(number + rank) % 2 == 0).square().mean().backward()
    average_gradients(plain)
    assert_gradients(model, plain)


def leave_a_sum_out(transport: Transport) -> str:
    """Rank 1 takes one microbatch that is a step's last for one that is not; return the message that this rank got."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_transport(transport)
    try:
        for step in range(4):
            for is_last in (False, True):
                model.set_requires_all_reduce(is_last and not (rank == 1 and step == 2))
                model(torch.ones(2, 8)).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_a_rank_that_leaves_a_sum_over_replicas_out_is_named_and_nobody_goes_on_with_other_numbers(
    pool: WorkerPool, transport: Transport
) -> None:
    """The sums that follow have the sizes of those that others wait for."""
    messages = pool.run(
        leave_a_sum_out, num_ranks=4, timeout_s=60.0, group_timeout_s=30.0, fresh=True, transport=transport
    )
    assert all(message.startswith("DesyncError") for message in messages), messages
    assert all(re.search(r"\branks? (\d, )*1\b", message) for message in messages), messages
    assert "with its replicas, rank 3" in messages[1], messages
    assert "with its replicas, rank 1" in messages[3], messages

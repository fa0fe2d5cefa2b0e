"""Ranks that build or do different things hear of it by name, with the APIs whose ranks would else mix tensors up."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import Job
from helpers.pairs import checkered
from helpers.ranks import FOUR
from torch import nn

from shardwise import DesyncError, ShardedOptimizer, TransportError, ZeroRedundancyOptimizer, fully_shard
from shardwise.testing import WorkerPool, faults


def builds_another_model() -> str:
    more = int(dist.get_rank() == 1)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3 + more)))
    fully_shard(model)
    with pytest.raises(DesyncError) as caught:
        ShardedOptimizer(dict(model.named_parameters()), torch.optim.Muon)
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", [2, FOUR])
def test_ranks_with_other_matrices_are_named_when_a_whole_matrix_optimizer_is_made(
    pool: WorkerPool, num_ranks: int
) -> None:
    for text in pool.run(builds_another_model, num_ranks=num_ranks):
        assert "rank 1: 3.weight of shape (8, 8), torch.float32" in text
        assert "nothing" in text


def leaves_before_it_steps(kind: str) -> str:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    fully_shard(model)
    optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.Muon)
    with faults.inject(kind, at="exchange", rank=1, step=2, error=KeyError):
        for _ in range(3):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return "went on"


@pytest.mark.parametrize(("num_ranks", "kind"), checkered([2, 4], ["kill", "raise"]))
def test_a_rank_that_leaves_an_exchange_of_whole_matrices_is_named(num_ranks: int, kind: str) -> None:
    with Job(leaves_before_it_steps, kind, num_ranks=num_ranks) as job:
        for rank in set(range(num_ranks)) - {1}:
            error = job.outcome(rank, limit_s=30).error
            assert error is not None
            assert error[0] is TransportError
            assert re.search(r"rank 1\b", error[1]), error[1]


def raises_in_an_exchange_and_lives_on() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    fully_shard(model)
    optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.Muon)
    model(torch.ones(2, 8)).square().sum().backward()
    kind = KeyError if dist.get_rank() == 1 else TransportError
    with faults.raise_at("exchange", rank=1, error=KeyError), pytest.raises(kind) as caught:
        optimizer.step()
    dist.distributed_c10d._get_default_store().add("caught", 1)
    while dist.distributed_c10d._get_default_store().add("caught", 0) < dist.get_world_size():
        time.sleep(0.01)  # nobody ends before the others have heard
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", [2, FOUR])
def test_nobody_waits_for_the_timeout_of_the_group_when_a_rank_raises_in_an_exchange(
    pool: WorkerPool, num_ranks: int
) -> None:
    texts = pool.run(raises_in_an_exchange_and_lives_on, num_ranks=num_ranks, group_timeout_s=600, timeout_s=50)
    for text in (each for rank, each in enumerate(texts) if rank != 1):
        assert "the last error of rank 1: KeyError: " in text


def test_who_is_told_of_a_call_that_it_did_not_make_hears_which_rank_made_it(pool: WorkerPool) -> None:
    texts = pool.run(one_consolidates_and_the_other_steps, num_ranks=2, group_timeout_s=2)
    assert re.search(r"rank 1 .*consolidate_state_dict", texts[0]), texts


def one_consolidates_and_the_other_steps() -> str:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, 8)).square().sum().backward()
    with pytest.raises(DesyncError) as caught:
        if dist.get_rank() == 1:
            optimizer.consolidate_state_dict(to=0)
        else:
            optimizer.step()
    return str(caught.value)

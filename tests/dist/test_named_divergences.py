"""Ranks that build or do different things hear of it by name, behind the doors whose ranks would else mix tensors up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import DesyncError, ShardedOptimizer, fully_shard
from shardwise.testing import WorkerPool


def builds_another_model() -> str:
    more = int(dist.get_rank() == 1)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3 + more)))
    fully_shard(model)
    with pytest.raises(DesyncError) as caught:
        ShardedOptimizer(dict(model.named_parameters()), torch.optim.Muon)
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_with_other_matrices_are_named_when_a_whole_matrix_optimizer_is_made(
    pool: WorkerPool, num_ranks: int
) -> None:
    for text in pool.run(builds_another_model, num_ranks=num_ranks):
        assert "rank 1: 3.weight of shape (8, 8), torch.float32" in text
        assert "nothing" in text

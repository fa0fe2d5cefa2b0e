"""What moves and what is held: units of volume per step, shares of state."""

import pytest
import torch
from helpers.ranks import FOUR
from helpers.scripts import load_script

from shardwise import ZeroRedundancyOptimizer


def _counts(width: int):
    return load_script("benchmarks/zero_bytes.py").count_all(width)


@pytest.mark.parametrize("num_ranks", [2, FOUR])
def test_zero_2_sends_two_units_and_zero_1_torchs_three(pool, num_ranks: int) -> None:
    for found in pool.run(_counts, num_ranks=num_ranks, width=192):
        assert found["torch_zero"]["by_operator"] == {"allreduce_": 2.0, "broadcast_": 1.0}
        for way in ("ours_after", "ours_in_backward", "ours_interleaved"):
            assert found[way]["by_operator"] == {"allreduce_": 2.0, "broadcast_": 1.0}
        assert found["ours_interleaved"]["state_bytes_share"] <= 1.02 / num_ranks
        assert found["ours_zero2"]["units"] == 2.0


def _embedding_heavy_share(partition: str) -> float:
    """A small GPT-2: the embedding is most of the model."""
    params = [torch.zeros(5000, 32, requires_grad=True), *(torch.zeros(32, 96, requires_grad=True) for _ in range(8))]
    zero = ZeroRedundancyOptimizer(params, torch.optim.Adam, partition=partition, lr=1e-3)
    for p in params:
        p.grad = torch.ones_like(p)
    zero.step()
    held = sum(v.numel() for values in zero.optim.state.values() for v in values.values() if v.dim() > 0)
    return held / (2 * sum(p.numel() for p in params))


@pytest.mark.parametrize("num_ranks", [2, FOUR])
def test_even_is_even_where_whole_cannot_be(pool, num_ranks: int) -> None:
    whole = pool.run(_embedding_heavy_share, num_ranks=num_ranks, partition="whole")
    even = pool.run(_embedding_heavy_share, num_ranks=num_ranks, partition="even")
    assert max(whole) > 0.85
    assert max(even) <= 1.02 / num_ranks
    assert sum(whole) == pytest.approx(1.0)
    assert sum(even) == pytest.approx(1.0)


def _frozen_moves_nothing() -> dict[str, float]:
    benchmark = load_script("benchmarks/zero_bytes.py")
    params = [torch.zeros(1000), torch.zeros(50, requires_grad=True)]
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    params[1].grad = torch.ones(50)
    zero.step()
    counter = benchmark.CountBytes()
    with counter:
        zero.step()
    return counter.units


def test_a_step_is_only_the_broadcasts_of_trainable_parameters(pool) -> None:
    for found in pool.run(_frozen_moves_nothing):
        assert found == {"broadcast_": 200.0}

"""What moves and what is held: units of volume per step, shares of state, gradients of others."""

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from helpers.scripts import load_script

from shardwise import ZeroRedundancyOptimizer
from shardwise.zero.optimizer import zero_backend


def _counts(width: int):
    return load_script("benchmarks/zero_bytes.py").count_all(width)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_units_against_torchs_three(pool, num_ranks: int) -> None:
    for found in pool.run(_counts, num_ranks=num_ranks, width=192):
        assert found["torch_zero"]["by_operator"] == {"allreduce_": 2.0, "broadcast_": 1.0}
        assert found["ours_after"]["units"] == 3.0
        for way in ("ours_owner", "ours_owner_even"):
            assert found[way]["by_operator"] == {"alltoall_base_": 1.0, "broadcast_": 1.0}
        assert found["ours_owner_even"]["state_bytes_share"] <= 1.02 / num_ranks


def _embedding_heavy_share(partition: str) -> float:
    """A small GPT-2: the embedding is most of the model."""
    params = [torch.zeros(5000, 32, requires_grad=True), *(torch.zeros(32, 96, requires_grad=True) for _ in range(8))]
    zero = ZeroRedundancyOptimizer(params, torch.optim.Adam, partition=partition, lr=1e-3)
    for p in params:
        p.grad = torch.ones_like(p)
    zero.step()
    held = sum(v.numel() for values in zero.optim.state.values() for v in values.values() if v.dim() > 0)
    return held / (2 * sum(p.numel() for p in params))


@pytest.mark.parametrize("num_ranks", [2, 4])
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


@on_ranks(2, 4)
def test_reduce_gradients_matches_all_reduce() -> None:
    for partition in ("whole", "even"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3).double())
        model[0].to(memory_format=torch.channels_last)
        plain = copy.deepcopy(model)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, mixed_dtypes=True, partition=partition, lr=1e-2
        )
        adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(4):
            batch = torch.rand(2, 3, 9, 9)
            for module, optim in ((model, zero), (plain, adam)):
                optim.zero_grad()
                for _ in range(2):  # accumulation
                    module[2](module[:2](batch).double()).square().mean().backward()
            for p in plain.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            zero.reduce_gradients()
            own = {id(local.param): local.owned_slice.numel for local in zero_backend(zero).rank_partition.local_slices}
            for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert sum(part.numel() for part in p.grad.parts) == own.get(id(p), 0)  # and nothing of the others'
                assert p.grad.is_whole == (own.get(id(p)) == p.numel())
                if p.grad.is_whole:
                    torch.testing.assert_close(p.grad, expected.grad)
            zero.step()
            adam.step()
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

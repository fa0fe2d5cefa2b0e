"""What people try with sharded parameters works, or is refused with what was found and what to do, not in torch's own words."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_gradients, full
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import ConfigError, ShardwiseError, StateError, fully_shard


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    fully_shard(model[0])
    return fully_shard(model, **options)


@on_ranks(2)
def test_shards_are_no_inputs_of_a_backward() -> None:
    model, plain = sharded(net()), net()
    assert_trains_alike(model, plain)
    shards = list(model.parameters())
    for _ in range(2):  # the second time with gradients of the first
        with pytest.raises(RuntimeError, match="to not have been used in the graph"):
            torch.autograd.grad(model(batch(0)).sum(), shards)
        model(batch(0)).sum().backward()
    model.zero_grad()
    assert_trains_alike(model, plain)


@on_ranks(2)
def test_gradients_of_inputs_and_ignored_parameters_are_given() -> None:
    model, plain = net(), net()
    ignored = model[2].bias
    sharded(model, ignored_params={ignored})
    x = batch(0).requires_grad_()
    expected = torch.autograd.grad(plain(x).square().sum(), [x, plain[2].bias])
    assert all(map(torch.equal, torch.autograd.grad(model(x).square().sum(), [x, ignored]), expected))


@on_ranks(2)
def test_two_models_over_one_trunk_are_sharded_by_their_parts() -> None:
    def made() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        trunk = nn.Linear(6, 6)
        return nn.Sequential(trunk, nn.Linear(6, 2)), nn.Sequential(trunk, nn.Linear(6, 1))

    actor, critic = made()
    for each in (actor[0], actor, critic):
        fully_shard(each)
    actor(batch(0))
    with pytest.raises(
        ShardwiseError, match=r"lazily initialized for 0\n.*has run before.*call fully_shard on their parts"
    ):
        critic(batch(0))
    actor, critic = made()
    plain = made()
    for each in (actor[0], actor[1], critic[1]):
        fully_shard(each)
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for step in range(3):
        for one, two in ((actor, critic), plain):
            optimizer = torch.optim.SGD({*one.parameters(), *two.parameters()}, lr=0.1)
            (one(x).sum() * (step + 1) + two(x).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for found, expected in zip((actor, critic), plain, strict=True):
        for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(full(mine), theirs)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_ranks(2)
def test_experts_of_each_rank_and_unequal_plain_gradients_are_not_clipped_as_copies(norm_type: float) -> None:
    experts = init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "shards"))
    for kind in ("experts", "copies", "plain"):
        torch.manual_seed(0)
        first = nn.Linear(4, 4)
        torch.manual_seed(0 if kind == "copies" else dist.get_rank())
        model = nn.Sequential(first, nn.Linear(4, 4))
        if kind == "plain":
            fully_shard(model, ignored_params={*model[1].parameters()})
        else:
            fully_shard(model[1], mesh=experts["shards"])
            fully_shard(model)
        model(torch.linspace(-1, 1, 12).view(3, 4)).square().sum().backward()
        if kind == "copies":
            shardwise.clip_grad_norm_(model.parameters(), 1.0, norm_type)
            continue
        with pytest.raises(ConfigError, match="gradients that ranks are to have copies of, .* differ between ranks"):
            shardwise.clip_grad_norm_(model.parameters(), 1.0, norm_type)


def imported_before(params: Iterable[torch.Tensor], limit: float, norm_type: float) -> torch.Tensor:
    """Clip as a module does that has imported torch's function before shardwise was imported."""
    return torch.nn.utils.clip_grad_norm_.__wrapped__(params, limit, norm_type)


def in_halves(params: Iterable[torch.Tensor], limit: float, norm_type: float) -> torch.Tensor:
    given = list(params)
    norm = torch.nn.utils.get_total_norm([each.grad for each in given if each.grad is not None], norm_type)
    torch.nn.utils.clip_grads_with_norm_(given, limit, norm)
    return norm


WAYS_TO_CLIP: dict[str, Any] = {
    "torch's": torch.nn.utils.clip_grad_norm_,
    "imported before": imported_before,
    "in halves": in_halves,
    "ours": shardwise.clip_grad_norm_,
}


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_ranks(2)
def test_every_way_of_clipping_takes_ignored_parameters_several_meshes_and_empty_shards(norm_type: float) -> None:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for clip in WAYS_TO_CLIP.values():
        for kind in ("ignored", "meshes", "empty"):
            model = net()
            model[2] = nn.Linear(6, 1) if kind == "empty" else model[2]
            plain = copy.deepcopy(model)
            if kind == "meshes":
                fully_shard(model[0], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s")))
            fully_shard(model, ignored_params={model[2].bias} if kind == "ignored" else None)
            for each in (model, plain):
                each(x).square().sum().backward()
            norms = [clip(each.parameters(), 0.1, norm_type) for each in (model, plain)]
            if norm_type != 2.0:  # always ours, and no DTensor
                assert f"{norms[0]:.4f}" == f"{norms[0].item():.4f}"
            torch.testing.assert_close(*[full(each) for each in norms])
            assert_gradients(model, plain)


@pytest.mark.parametrize("way", WAYS_TO_CLIP)
@on_ranks(2)
def test_no_way_of_clipping_while_a_unit_is_unsharded_leaves_gradients_as_they_are(way: str) -> None:
    clip = WAYS_TO_CLIP[way]
    model, plain = net(), net()
    fully_shard(model)
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for each in (model, plain):
        each(x).square().sum().backward()
    expected = clip(plain.parameters(), 0.1, 2.0)
    model.unshard()
    if way in ("imported before", "in halves"):
        with pytest.raises(StateError, match=r"0\.weight is unsharded.*nothing was clipped. Call model.reshard\(\)"):
            clip(model.parameters(), 0.1, 2.0)
        model.reshard()
    norm = clip(model.parameters(), 0.1, 2.0)
    torch.testing.assert_close(full(norm), expected)
    model.reshard()
    assert_gradients(model, plain)

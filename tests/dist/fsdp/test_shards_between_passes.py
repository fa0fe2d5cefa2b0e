"""Between passes modules have the parameters that optimizers have: also after an evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.compare import REORDERED, assert_same, average_gradients, full
from helpers.models import build
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from helpers.sharded import loss_of, shard_units
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import replicate

EVALUATIONS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def made(api: str, name: str) -> Any:
    if api == "replicate":
        return replicate(build(name), mesh=init_device_mesh("cpu", (2,)))
    if api == "hsdp":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        return shard_units(build(name), name, mesh=mesh)
    return shard_units(build(name), name, **({"reshard_after_forward": 2} if api == "int" else {}))


@pytest.mark.parametrize(
    ("api", "name", "evaluation"),
    checkered(["fully_shard", "hsdp", "replicate", "int"], ["plain", "tied", "mixed"], EVALUATIONS, every=4),
)
@on_ranks(2)
def test_after_an_evaluation_the_modules_have_what_the_optimizer_has(api: str, name: str, evaluation: str) -> None:
    model, plain = made(api, name), build(name)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    shards = list(model.parameters())
    averages: list[list[torch.Tensor]] = [[], []]
    for step in range(2):
        for each in (model, plain):
            loss_of(each, step, name).backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with EVALUATIONS[evaluation]():
            model(torch.zeros(3, dtype=torch.long) if name == "tied" else torch.zeros(3, 7))
        assert all(found is shard for found, shard in zip(model.parameters(), shards, strict=True))
        for each, optimizer, average in zip((model, plain), optimizers, averages, strict=True):
            for group in optimizer.param_groups:  # the learning rate of a group that is found by identity
                if any(param is next(iter(each.parameters())) for param in group["params"]):
                    group["lr"] *= 0.5
            for param in each.parameters():  # moments that are set back
                if optimizer.state[param]:
                    optimizer.state[param]["exp_avg"].zero_()
            for number, param in enumerate(each.parameters()):
                if step == 0:
                    average.append(param.detach().clone())
                else:
                    average[number].lerp_(param.detach(), 0.1)
    assert_same(model, plain, REORDERED)
    for ours, theirs in zip(*averages, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, **REORDERED)  # pyright: ignore[reportAttributeAccessIssue]


@on_ranks(2)
def test_a_backward_with_parameters_that_are_unsharded_as_inputs_trains() -> None:
    for api in ("fully_shard", "replicate"):
        model, plain = made(api, "matrices") if api == "replicate" else shard_whole("matrices"), build("matrices")
        for each in (model, plain):
            loss = loss_of(each, 0, "matrices")
            loss.backward(inputs=list(each.parameters()))
        average_gradients(plain)
        assert_same(model, plain, REORDERED)


def shard_whole(name: str) -> Any:
    from shardwise import fully_shard

    return fully_shard(build(name))


@pytest.mark.parametrize("clip", ["ours", "torch's"])
@on_ranks(2)
def test_gradients_are_clipped_after_a_forward_whose_backward_never_runs(clip: str) -> None:
    model, plain = made("int", "plain"), build("plain")
    function = shardwise.clip_grad_norm_ if clip == "ours" else torch.nn.utils.clip_grad_norm_
    for each in (model, plain):
        loss_of(each, 0, "plain").backward()
    average_gradients(plain)
    norms: list[torch.Tensor] = []
    for each in (model, plain):
        loss_of(each, 1, "plain")  # it builds a graph, so that full parameters stay registered
        norms.append(full(function(each.parameters(), 1e-3)))
    torch.testing.assert_close(*norms)
    model.reshard()
    assert_same(model, plain, REORDERED)

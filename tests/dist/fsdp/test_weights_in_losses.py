"""A loss may take a weight itself, outside the forward of its unit, after ``unshard()``; a shard that it reads is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.compare import REORDERED, assert_averaged
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwise
from shardwise import StateError, fully_shard, replicate, shard_model


class _Net(nn.Module):
    """``tied``: the head's weight is the embedding's."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(13, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(self.embedding(tokens)))


class _Liger(torch.autograd.Function):
    """The gradients of both are computed in forward, a chunk of rows at a time, as Liger's fused linear cross entropy does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        by_hidden, by_weight, loss = torch.zeros_like(hidden), torch.zeros_like(weight), hidden.new_zeros(())
        for rows in torch.arange(len(hidden)).chunk(2):
            probabilities = (hidden[rows] @ weight.T).softmax(-1)
            loss += -probabilities[torch.arange(len(rows)), targets[rows]].log().sum() / len(hidden)
            probabilities[torch.arange(len(rows)), targets[rows]] -= 1
            by_hidden[rows] = probabilities @ weight / len(hidden)
            by_weight += probabilities.T @ hidden[rows] / len(hidden)
        ctx.save_for_backward(by_hidden, by_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        by_hidden, by_weight = ctx.saved_tensors
        return gradients[0] * by_hidden, gradients[0] * by_weight, None


class _Apple(torch.autograd.Function):
    """Logits are computed again in backward from the weight, which is saved, as Apple's cut cross entropy does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        return F.cross_entropy(hidden @ weight.T, targets)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, targets = ctx.saved_tensors
        errors = (hidden @ weight.T).softmax(-1)
        errors[torch.arange(len(hidden)), targets] -= 1
        errors *= gradients[0] / len(hidden)
        return errors @ weight, errors.T @ hidden, None


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda hidden, weight, targets: F.cross_entropy(hidden @ weight.T, targets),
    "liger": _Liger.apply,
    "apple": _Apple.apply,
}


def _unsharded(net: _Net) -> torch.Tensor:
    head: Any = net.head
    if hasattr(head, "unshard"):
        head.unshard()
    return net.head.weight


def _per_layer(net: nn.Module, shard: Callable[..., object] = fully_shard, **options: Any) -> None:
    for layer in (net.body, net.head):
        shard(layer, **options)
    shard(net, **options)


def _hybrid(net: nn.Module) -> None:
    _per_layer(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


APIS: dict[str, Callable[[nn.Module], object]] = {
    "fully_shard": _per_layer,
    "one unit": lambda net: fully_shard(net, reshard_after_forward=True),
    "smaller mesh": lambda net: _per_layer(net, reshard_after_forward=2),
    "kept": lambda net: _per_layer(net, reshard_after_forward=False),
    "hybrid": _hybrid,
    "shard_model": shard_model,
    "replicate": lambda net: _per_layer(net, replicate, mesh=init_device_mesh("cpu", (4,))),
}


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return tuple(torch.randint(13, (2, 5), generator=generator))  # pyright: ignore[reportReturnType]


def _backward(net: _Net, weight_of: Callable[[_Net], torch.Tensor], loss: str, step: int) -> None:
    tokens, targets = _batch(step)
    hidden = net(tokens)
    LOSSES[loss](hidden, weight_of(net), targets).backward()


@pytest.mark.parametrize("api", [api for api in APIS if api not in ("one unit", "shard_model")])
@on_ranks(4)
def test_an_unsharded_weight_that_a_loss_takes_gets_the_mean_gradient(api: str) -> None:
    for loss in LOSSES if api == "fully_shard" else ("liger",):
        plain, model = _Net(), _Net()
        APIS[api](model)
        for step in range(2):
            for net in (plain, model):
                net.zero_grad()
                _backward(net, _unsharded, loss, step)
            assert_averaged(model, plain, **REORDERED)


@on_ranks(2)
def test_a_tied_weight_gets_both_its_gradients() -> None:
    plain, model = _Net(tied=True), _Net(tied=True)
    _per_layer(model)
    for step in range(2):
        for net in (plain, model):
            _backward(net, _unsharded, "liger", step)
        assert_averaged(model, plain, **REORDERED)


@on_ranks(2)
def test_gradients_of_losses_accumulate_without_sync() -> None:
    plain, model = _Net(), _Net()
    _per_layer(model)
    for net in (plain, model):
        for step in range(3):
            if net is model:
                shardwise.FSDPModule.set_requires_gradient_sync(model, step == 2)  # pyright: ignore[reportArgumentType]
            _backward(net, _unsharded, "apple", step)
    assert_averaged(model, plain, **REORDERED)


READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "whole": lambda weight: weight.full_tensor().sum(),
    "local": lambda weight: weight.to_local().sum(),
    "cast": lambda weight: weight.bfloat16().full_tensor().sum(),
    "penalty": lambda weight: weight.square().sum().full_tensor(),
}


@pytest.mark.parametrize("api", APIS)
@on_ranks(4)
def test_a_loss_that_reads_a_shard_is_refused_and_the_next_step_is_right(api: str) -> None:
    for read in READS.values() if api == "fully_shard" else (READS["whole"],):
        plain, model = _Net(), _Net()
        APIS[api](model)
        if api in ("kept", "shard_model"):
            with pytest.raises(StateError, match=r"a loss has read (head\.)?weight.*or call unshard\(\) on the module"):
                read(model.head.weight).backward()  # before any forward, which leaves the full parameter registered
        else:
            for tokens in (_batch(0)[0], _batch(1)[0]):
                shard = model.head.weight
                with pytest.raises(
                    StateError, match=r"a loss has read (head\.)?weight outside of the forward of its unit"
                ):
                    (model(tokens).sum() + read(shard)).backward()
            model.zero_grad()
        for net in (plain, model):
            net(_batch(2)[0]).square().mean().backward()
        assert_averaged(model, plain, **REORDERED)


@on_ranks(2)
def test_shards_are_refused_after_conversions_copies_loading_and_once_they_are_trained() -> None:
    model = _Net()
    _per_layer(model)
    model.to(torch.float64)
    loaded = _Net().double()
    _per_layer(loaded)
    loaded.load_state_dict(model.state_dict(), assign=True)
    loaded(_batch(0)[0])  # the first forward takes the loaded parameters up
    frozen = _Net()
    frozen.head.weight.requires_grad_(False)
    _per_layer(frozen)
    (
        frozen.head.weight.square().sum().full_tensor() * frozen(_batch(0)[0]).sum()
    ).backward()  # frozen: nothing to refuse
    frozen.head.weight.requires_grad_(True)
    frozen.head(torch.ones(6))
    for net in (model, copy.deepcopy(model), loaded, frozen):
        with pytest.raises(StateError, match=r"a loss has read"):
            net.head.weight.square().sum().full_tensor().backward()


@on_ranks(2)
def test_activations_that_users_distribute_on_the_same_mesh_keep_their_gradients() -> None:
    mesh = init_device_mesh("cpu", (2,))
    plain, model = _Net(), _Net()
    fully_shard(model, mesh=mesh)
    for net in (plain, model):
        hidden = net(_batch(0)[0])
        if net is model:
            hidden = DTensor.from_local(
                hidden, mesh, [Shard(0)]
            ).full_tensor()  # each rank gets its rows' gradient of its loss
        (hidden * torch.arange(1.0, 7) * (1 + dist.get_rank())).sum().backward()
    assert_averaged(model, plain, **REORDERED)


class _Leaves(nn.Module):
    """Its forward leaves a tensor of its weight where nobody looks for outputs."""

    def __init__(self, left: list[torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.left = nn.Linear(6, 6), lambda each: left.append(each)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left(self.inner.weight.sum())
        return self.inner(x)


@on_ranks(2)
def test_gradients_of_a_tensor_that_no_output_leads_to_count_in_a_backward_of_outputs_and_are_an_error_alone() -> None:
    left: list[torch.Tensor] = []
    model = nn.Sequential(nn.Linear(6, 6), _Leaves(left))
    plain = copy.deepcopy(model)
    fully_shard(model[1])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 6) + dist.get_rank()
    (model(x).square().sum() + left.pop()).backward()
    (plain(x).square().sum() + left.pop()).backward()
    assert_averaged(model, plain, **REORDERED)
    optimizer.step()
    optimizer.zero_grad()
    model(x)
    left.pop().backward()
    with pytest.raises(StateError, match=r"gradient of 1\.inner\.weight without reaching an output"):
        optimizer.step()
    model(x).sum().backward()
    optimizer.step()

"""A loss may take a weight itself, outside the forward of its unit: gathered by ``full_tensor()``, or by ``unshard()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.compare import EXACT, REORDERED, assert_averaged, full
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwise
from shardwise import MixedPrecisionPolicy, fully_shard, replicate, shard_model


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


def _full_tensor(net: _Net) -> torch.Tensor:
    weight: Any = net.head.weight
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


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


@pytest.mark.parametrize("weight_of", [_full_tensor, _unsharded])
@pytest.mark.parametrize("api", APIS)
@on_ranks(4)
def test_a_weight_that_a_loss_takes_gets_the_mean_gradient(api: str, weight_of: Callable[[_Net], torch.Tensor]) -> None:
    if api in ("one unit", "shard_model") and weight_of is _unsharded:
        return  # the head is in the root's unit: there is nothing to unshard by itself
    for loss in LOSSES if api == "fully_shard" else ("liger" if weight_of is _unsharded else "apple",):
        plain, model = _Net(), _Net()
        APIS[api](model)
        for step in range(2):
            for net in (plain, model):
                net.zero_grad()
                _backward(net, weight_of, loss, step)
            assert_averaged(model, plain, **REORDERED)


@on_ranks(2)
def test_a_weight_of_which_a_loss_takes_the_whole_before_any_forward_is_trained() -> None:
    plain, model = _Net(), _Net()
    _per_layer(model)
    for net in (plain, model):
        (_full_tensor(net) * (dist.get_rank() + 1)).square().sum().backward()
    assert_averaged(model, plain, **EXACT)


@on_ranks(2)
def test_a_tied_weight_gets_both_its_gradients() -> None:
    plain, model = _Net(tied=True), _Net(tied=True)
    _per_layer(model)
    for step in range(2):
        for net in (plain, model):
            _backward(net, _full_tensor, "liger", step)
        assert_averaged(model, plain, **REORDERED)


@on_ranks(2)
def test_gradients_of_losses_accumulate_without_sync_and_follow_freezing() -> None:
    plain, model = _Net(), _Net()
    _per_layer(model)
    for net in (plain, model):
        net.body.weight.requires_grad_(False)
        _backward(net, _full_tensor, "plain", 0)  # once, so that the unit has been whole while it is trained
        net.zero_grad()
        for step in range(3):
            if net is model:
                shardwise.FSDPModule.set_requires_gradient_sync(model, step == 2)  # pyright: ignore[reportArgumentType]
            _backward(net, _full_tensor, "apple", step)
    assert_averaged(model, plain, **REORDERED)
    for net in (plain, model):
        net.zero_grad()
        net.head.weight.requires_grad_(False)
        _backward(net, _full_tensor, "plain", 3)
    assert model.head.weight.grad is None
    assert_averaged(model, plain, **REORDERED)


@on_ranks(2)
def test_a_gathered_weight_is_the_users_own_and_keeps_its_dtype() -> None:
    model = _Net()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    _per_layer(model, mp_policy=policy)
    weight = _full_tensor(model)
    before = weight.detach().clone()
    assert weight.dtype is torch.float32
    tokens, targets = _batch(0)
    LOSSES["plain"](model(tokens).float(), weight, targets).backward()
    model(tokens).sum().backward()  # gathers other weights meanwhile
    assert torch.equal(weight, before)
    assert torch.equal(before, full(model.head.weight))


@on_ranks(4)
def test_a_weight_beside_tensor_parallelism_gets_the_mean_gradient() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = _Net(), _Net()
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel()})
    _per_layer(model, mesh=mesh["dp"])
    rank = mesh["dp"].get_local_rank()
    for net in (plain, model):
        weight = _full_tensor(net)
        tokens = torch.arange(5) + rank
        F.cross_entropy(net(tokens) @ weight.T, tokens).backward()
    assert_averaged(model, plain, **REORDERED)


@pytest.mark.parametrize("api", ["fully_shard", "hybrid"])
@on_ranks(4)
def test_a_penalty_on_shards_is_no_part_of_the_reduction(api: str) -> None:
    penalties: list[Callable[[Any], Any]] = [
        lambda weight: weight.square().sum(),
        lambda weight: (weight / weight.norm()).sum(),  # its gradient is a sum over ranks, not a shard
    ]
    for penalty in penalties:
        plain, model = _Net(), _Net()
        APIS[api](model)
        for step in range(2):
            for net in (plain, model):
                tokens, targets = _batch(step)
                loss = LOSSES["plain"](net(tokens), _full_tensor(net), targets)
                (loss + full(penalty(net.head.weight))).backward()
        assert_averaged(model, plain, **REORDERED)


DERIVED: dict[str, Callable[[Any], Any]] = {
    "product": lambda weight: weight * 2,
    "transposed": lambda weight: weight.T,
    "cast": lambda weight: weight.to(torch.float64),
    "normalized": lambda weight: weight / weight.norm(),
    "moved": lambda weight: (
        weight.redistribute(placements=[Shard(1)] * weight.device_mesh.ndim) if isinstance(weight, DTensor) else weight
    ),
}


@pytest.mark.parametrize(("api", "num_ranks"), [("fully_shard", 2), ("hybrid", 4), ("shard_model", 2)])
@on_ranks()
def test_what_a_loss_gathers_of_a_function_of_a_weight_has_the_mean_gradient(api: str) -> None:
    for name, derive in DERIVED.items():
        if name == "moved" and api == "hybrid":
            continue  # that placement would cut the tensor's dim twice
        plain, model = _Net(), _Net()
        APIS[api](model)
        for step in range(2):
            for net in (plain, model):
                tokens, targets = _batch(step)
                weight = full(derive(net.head.weight)).float()
                hidden = net(tokens)
                F.cross_entropy(hidden @ (weight if name == "transposed" else weight.T), targets).backward()
                LOSSES["plain"](net(tokens), _full_tensor(net), targets).backward()  # in one step with the whole weight
            assert_averaged(model, plain, **REORDERED)


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


@on_ranks(2)
def test_a_compiled_loss_that_gathers_a_weight_gives_it_the_mean_gradient() -> None:
    def loss(hidden: torch.Tensor, weight: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(hidden @ full(weight * 1).T, targets) + F.cross_entropy(hidden @ full(weight).T, targets)

    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager")
    plain, model = _Net(), _Net()
    _per_layer(model)
    for step in range(2):
        for net in (plain, model):
            net.zero_grad()
            tokens, targets = _batch(step)
            (loss if net is plain else compiled)(net(tokens), net.head.weight, targets).backward()
        assert_averaged(model, plain, **REORDERED)
    torch.compiler.reset()
    whole = torch.compile(loss, backend="aot_eager", fullgraph=True)
    tokens, targets = _batch(0)
    with pytest.raises(RuntimeError, match=r"shardwise reduces the gradient of a gathered parameter.*outside"):
        whole(model(tokens), model.head.weight, targets)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["tp"]
    other = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]).requires_grad_()  # on a mesh of its own: in one graph
    torch.compile(lambda each: each.full_tensor().sum(), backend="aot_eager", fullgraph=True)(other).backward()
    assert other.grad is not None
    assert torch.equal(full(other.grad), torch.ones(2, 2))


@on_ranks(2)
def test_a_weight_that_was_tied_after_sharding_is_gathered_for_one_unit_on_all_ranks() -> None:
    plain, model = _Net(tied=True), _Net()
    model.head.register_parameter("bias", None)
    fully_shard(model.head)
    fully_shard(model)
    model.head.weight = model.embedding.weight
    for net in (plain, model):
        _backward(net, _full_tensor, "plain", 0)
    assert_averaged(model, plain, **REORDERED)

"""Models that are made on the meta device have, sharded and initialized, the values that one process gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import comparable, full
from helpers.folders import folder_of_all
from helpers.inside import over
from helpers.live_bytes import LiveBytes
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardwise import (
    CheckpointError,
    MixedPrecisionPolicy,
    StateError,
    fully_shard,
    init_parameters,
    replicate,
    shard_model,
)
from shardwise.checkpoint import load, save


class _Layer(nn.Module):
    """Uneven, padded, recurrent, with buffers of three kinds and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6, bias=False)
        self.norm, self.memory = nn.BatchNorm1d(3), nn.LSTM(6, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.down.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.memory(self.norm(x + self.down(torch.tanh(self.up(x)))))[0]
        return self.attention(x, x, x)[0]


class _Net(nn.Module):
    """Two layers between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=2)
        self.layers = nn.ModuleList([_Layer(), _Layer()])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _on_meta(build: Callable[[], nn.Module] = _Net) -> Any:
    with torch.device("meta"):
        return build()


def _per_layer(net: Any, **options: Any) -> None:
    for layer in net.layers:
        fully_shard(layer, **options)
    fully_shard(net, **options)


def _hybrid(net: nn.Module) -> None:
    _per_layer(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


def _beside_tensor_parallelism(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {f"layers.{number}.up": ColwiseParallel() for number in range(2)}
    parallelize_module(net, mesh["tp"], plan)  # pyright: ignore[reportArgumentType]
    _per_layer(net, mesh=mesh["dp"])


APIS: dict[str, Callable[[nn.Module], object]] = {
    "fully_shard": _per_layer,
    "smaller mesh": lambda net: _per_layer(net, reshard_after_forward=2),
    "mixed precision": lambda net: _per_layer(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    "hybrid": _hybrid,
    "tensor parallel": _beside_tensor_parallelism,
    "shard_model": lambda net: shard_model(net, min_unit_bytes=0),
    "replicate": lambda net: replicate(net, mesh=init_device_mesh("cpu", (4,))),
    "replicate, older": lambda net: replicate(net, device_ids=None),
    "plain": lambda net: net,
}


def _by_hand(net: Any) -> None:
    """Initialize in an order of its own, between units, by more than one function and by values of other parameters."""
    params = list(net.parameters())
    for param in params:
        nn.init.trunc_normal_(param, std=0.02) if param.ndim > 1 else nn.init.uniform_(param)
    first, second = net.layers
    nn.init.orthogonal_(first.up.weight)
    second.up.weight.data[1:3].zero_()
    second.up.weight.data.add_(first.up.weight.data, alpha=0.5)
    with torch.no_grad():
        second.down.weight.copy_(first.down.weight * 2)
        first.up.bias[0] = second.up.bias.sum()
        second.up.bias.copy_(torch.stack([first.up.bias, second.up.bias]).sum(0))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()


def _assert_same(model: nn.Module, plain: nn.Module) -> None:
    for name, expected in plain.state_dict().items():
        assert torch.equal(*comparable(model.state_dict()[name], expected)), name


# Parameters are initialized as with fully_shard, and the test of another init_fn has the last two.
ALIKE = ("smaller mesh", "mixed precision", "shard_model", "tensor parallel", "replicate, older")


@pytest.mark.parametrize(
    ("api", "init_fn"),
    [
        *(pytest.param(api, None, marks=[pytest.mark.exhaustive] * (api in ALIKE)) for api in APIS),
        *((api, _by_hand) for api in ("tensor parallel", "replicate, older", "plain")),
        pytest.param("fully_shard", _by_hand, marks=pytest.mark.exhaustive),
    ],
)
@on_ranks(4)
def test_an_initialized_model_has_the_values_of_one_process(
    api: str, init_fn: Callable[[nn.Module], object] | None
) -> None:
    plain, model = _on_meta(), _on_meta()
    APIS[api](model)
    torch.manual_seed(1)
    init_parameters(plain, init_fn)
    expected = torch.rand(3)
    torch.manual_seed(1 if api == "plain" else 1 + dist.get_rank())  # a plain model does not know of other ranks
    init_parameters(model, init_fn)
    _assert_same(model, plain)
    assert model.head.weight is model.embedding.weight
    assert not torch.isnan(plain.head.weight).any()
    if api != "plain" and dist.get_rank():  # it would have drawn otherwise, and goes on as before
        expected = torch.rand(3, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    assert torch.equal(torch.rand(3), expected)
    if api not in ("plain", "mixed precision", "tensor parallel"):
        for net in (plain, model):
            net.eval()
        tokens = torch.arange(6).view(2, 3)
        torch.testing.assert_close(full(model(tokens)), plain(tokens))
    torch.manual_seed(2)
    init_parameters(model, init_fn)  # a second time, with values that are there
    torch.manual_seed(2)
    init_parameters(plain, init_fn)
    _assert_same(model, plain)


@on_ranks(2)
def test_what_an_init_fn_that_fails_has_written_stays_and_generators_go_on_as_before() -> None:
    def init(net: Any) -> None:
        nn.init.ones_(net.head.weight)
        torch.rand(3)
        raise ValueError("it fails")

    model = _on_meta()
    fully_shard(model)
    torch.manual_seed(10 + dist.get_rank())
    expected = torch.Generator().manual_seed(10 + dist.get_rank())
    with pytest.raises(ValueError, match="it fails"):
        init_parameters(model, init)
    assert torch.equal(full(model.head.weight), torch.ones(7, 6))
    if dist.get_rank():
        assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))


@on_ranks(2)
def test_one_unit_at_a_time_is_whole_while_it_is_initialized() -> None:
    model = _on_meta(lambda: nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]))
    shard_model(model, min_unit_bytes=0)
    peaks: list[int] = []

    def measured(net: Any) -> None:
        with LiveBytes() as live:
            for module in net:
                module.reset_parameters()
        peaks.append(live.peak)

    init_parameters(model, measured)
    assert peaks[0] < 2 * 64 * 64 * 4  # the whole one and a rank's shard of it on its way


class _Rotary(nn.Module):
    """Buffers that no file holds: of numbers and of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make_buffers()

    def make_buffers(self) -> None:
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.angles * self.mask


@on_ranks(2)
def test_buffers_that_nothing_has_given_values_are_named() -> None:
    x = torch.ones(2, 4)
    with folder_of_all() as folder:
        saved = _Rotary()
        fully_shard(saved)
        save(folder, {"model": saved}, step=1)
        model = _on_meta(_Rotary)
        fully_shard(model)
        model.to_empty(device="cpu")
        with pytest.raises(CheckpointError, match=r"model/angles .*model/mask .*init_parameters"):
            load(folder, {"model": model})
        assert [name.split()[0] for name in load(folder, {"model": model}, strict=False).missing] == [
            "model/angles",
            "model/mask",
        ]
        with pytest.raises(StateError, match=r"angles, mask have no values.*init_parameters"):
            model(x)
        model = _on_meta(_Rotary)
        fully_shard(model)
        init_parameters(model, _Rotary.make_buffers)  # pyright: ignore[reportArgumentType]
        load(folder, {"model": model})
        torch.testing.assert_close(model(x), saved(x), rtol=0, atol=0)


@on_ranks(2)
def test_parameters_that_some_ranks_alone_have_left_without_values_are_named_on_all() -> None:
    model = _on_meta(lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 3)))  # of the first, rank 1 has no row
    fully_shard(model)
    model.to_empty(device="cpu")
    model[1].reset_parameters()
    for _ in range(2):  # no first refusal makes the next forward right
        with pytest.raises(StateError, match=r"0\.bias, 0\.weight have no values"):
            model(torch.ones(1, 1))
    init_parameters(model)
    model(torch.ones(1, 1))


@pytest.mark.parametrize("api", ["fully_shard", "shard_model"])
@on_ranks(2)
def test_local_tensors_that_are_drawn_with_one_seed_are_named(api: str) -> None:
    """Draws on the shards themselves differ: test_random_numbers_on_shards.py."""

    def build() -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 5))

    def reset(net: Any, draws_locally: bool) -> None:
        net[0].reset_parameters()
        for param in net[1:].parameters():
            (param.to_local().detach() if draws_locally else param.detach()).uniform_()

    for seeds, draws_locally in (((0, 0), True), ((0, 1), True), ((0, 0), False)):
        model = _on_meta(build)
        fully_shard(model) if api == "fully_shard" else shard_model(model)
        model.to_empty(device="cpu")
        torch.manual_seed(seeds[dist.get_rank()])
        reset(model, draws_locally)
        if seeds[0] == seeds[1] and draws_locally:
            with pytest.raises(StateError, match=r"1\.weight.* begin with the same values on all ranks"):
                model(torch.ones(2, 8))
        model(torch.ones(2, 8))  # refused once: the values may be meant so


@on_ranks(2)
def test_shards_of_other_sizes_that_one_seed_has_drawn_are_named() -> None:
    model = _on_meta(lambda: nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 4)))  # after the first, generators differ
    fully_shard(model[0])
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for param in model.parameters():
        param.to_local().detach().uniform_()
    with pytest.raises(StateError, match=r"0\.weight.* begin with the same values on all ranks"):
        model(torch.ones(2, 8))


@pytest.mark.parametrize("transport", ["auto", "gloo", "collective"])
@on_ranks(2)
def test_tensors_of_a_model_on_meta_are_like_any_others(transport: Any) -> None:
    with over(transport):
        torch.manual_seed(0)
        plain = _Net().eval()
        model = _on_meta()
        _per_layer(model)
        for state in (model.state_dict(), copy.deepcopy(model).state_dict()):
            assert {name: tensor.is_meta for name, tensor in state.items()} == dict.fromkeys(plain.state_dict(), True)
        for param in model.parameters():
            for alias in (
                param.detach(),
                param.data,
                param.to_local(),
                param.detach().view_as(param),
                copy.deepcopy(param),
            ):
                assert alias.is_meta
        values = {
            name: distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor
            for (name, tensor), like in zip(plain.state_dict().items(), model.state_dict().values(), strict=True)
        }
        model.load_state_dict(values, assign=True)
        tokens = torch.arange(6).view(2, 3)
        torch.testing.assert_close(model.eval()(tokens), plain(tokens))
        _assert_same(model, plain)


@on_ranks(2)
def test_a_forward_on_meta_says_first_what_to_do() -> None:
    model = _on_meta(lambda: nn.Linear(2, 2))
    fully_shard(model)
    with pytest.raises(
        StateError, match=r"^Call shardwise\.init_parameters\(model\).*still on meta device: \['weight'"
    ):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("first", ["0.weight", "1.weight"])
@on_ranks(2)
def test_a_state_dict_that_is_loaded_part_by_part_can_be_read_between(first: str) -> None:
    values = {
        f"{number}.weight": torch.randn(5, 5, generator=torch.Generator().manual_seed(number)) for number in range(2)
    }
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)))
    mesh, (one, other) = init_device_mesh("cpu", (2,)), sorted(values, key=lambda name: name != first)
    shards = {key: distribute_tensor(values[key], mesh, value.placements) for key, value in model.state_dict().items()}
    model.load_state_dict({one: shards[one]}, assign=True, strict=False)
    assert full(model.state_dict()[one]).equal(values[one])
    model.load_state_dict({other: shards[other]}, assign=True, strict=False)
    # What is taken after the load shows every later step: a state dict would move shards to their places, this does not.
    kept = {name: param.to_local() for name, param in model.named_parameters() if isinstance(param, DTensor)}
    model(torch.ones(2, 5)).sum().backward()
    model.reshard()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    for name, value in model.state_dict().items():
        assert full(value).equal(values[name] + 1)
        assert kept[name].equal(value.to_local())

"""Parity with the unsharded optimizer, for every class in torch.optim and every kind of parameter, to the bit.

Gradients are given, not computed: with equal gradients the updates must be equal, whatever order shards are stepped in.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from helpers.sharded_tensors import cut, set_gradients
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.optim import Optimizer

from shardwise import ConfigError, ShardedOptimizer, fully_shard

CLASSES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
)
REFUSED = ("LBFGS", "SparseAdam")
MATRICES_ONLY = ("Muon",)
# Options beside the defaults that take other paths through the optimizers.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"foreach": True, "maximize": True}, {"fused": True}],
    "Adam": [{"amsgrad": True, "foreach": True}, {"fused": True}],
    "AdamW": [{"fused": True, "maximize": True}, {"foreach": True, "weight_decay": 0.5}],
    "Adagrad": [{"fused": True}, {"initial_accumulator_value": 0.1}],
    "RMSprop": [{"momentum": 0.5, "centered": True}],
    "Muon": [{"adjust_lr_fn": "match_rms_adamw", "nesterov": False}],
    "Adafactor": [{"foreach": True, "weight_decay": 0.1}],
}
MATRICES = {"square": (8, 8), "uneven": (9, 5), "few_rows": (3, 6), "one_row": (1, 7), "tall": (21, 2)}
OTHERS = {"vector": (10,), "short": (2,), "cube": (5, 2, 3)}


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    return MATRICES if name in MATRICES_ONLY else {**MATRICES, **OTHERS}


def _whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Bag(nn.Module):
    """Parameters of any shapes, used by nobody."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for index, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(_whole(shape, index)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(parameter.sum() for parameter in self.parameters())


def _plain(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return dict(Bag(shapes).named_parameters())


def _units(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """fully_shard: the shards of all parameters in one flat buffer."""
    return _packed(fully_shard(Bag(shapes), mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


def _hybrid(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    return _packed(fully_shard(Bag(shapes), mesh=mesh))


def _packed(model: Any) -> dict[str, torch.Tensor]:
    model.unshard()
    model.reshard()
    return dict(model.named_parameters())


def _mixed(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """DTensors on one and two mesh axes, replicated ones, ShardedTensors (one and several shards), plain tensors."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    found: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        whole, kind = _whole(shape, index), index % 7
        last = len(shape) - 1
        if kind == 0:
            found[name] = _sharded_tensor(whole, 0, tuple(range(size)))
        elif kind == 1:
            found[name] = nn.Parameter(place(whole, grid, [Shard(0), Shard(last)]))
        elif kind == 2:
            found[name] = nn.Parameter(whole)
        elif kind == 3:
            found[name] = nn.Parameter(place(whole, mesh, [Shard(last)]))
        elif kind == 4:
            found[name] = _sharded_tensor(whole, 0, (*range(size), 0, 1))
        elif kind == 5:
            found[name] = nn.Parameter(place(whole, grid, [Replicate(), Shard(0)]))
        else:
            found[name] = nn.Parameter(place(whole, mesh, [Replicate()]))
    return found


def _sharded_tensor(whole: torch.Tensor, dim: int, ranks: tuple[int, ...]) -> torch.Tensor:
    spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])
    found = sharded_tensor.zeros(spec, *whole.shape)
    for shard in found.local_shards():
        shard.tensor = cut(whole, shard.metadata).clone().requires_grad_()
    return found


def place(whole: torch.Tensor, mesh: Any, placements: Any) -> DTensor:
    """Return this rank's shard of a tensor that all ranks have, without communication."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


LAYOUTS = {layout.__name__[1:]: layout for layout in (_units, _hybrid, _mixed)}


def gradients(shapes: dict[str, tuple[int, ...]], seed: int, without: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return whole gradients that depend on a parameter's place and ``seed`` alone."""
    drawn = {name: _whole(shape, 1000 * (seed + 1) + index) for index, (name, shape) in enumerate(shapes.items())}
    return {name: gradient for name, gradient in drawn.items() if name not in without}


def lay_gradients_flat(params: dict[str, torch.Tensor]) -> None:
    """Move gradients into one buffer, as far from each other as the shards, as fully_shard's reduction leaves them."""
    locals_ = {name: param.to_local() for name, param in params.items()}
    places = {name: local.data_ptr() // local.element_size() for name, local in locals_.items() if local.numel()}
    start = min(places.values())
    flat = torch.empty(max(place + locals_[name].numel() for name, place in places.items()) - start)
    for name, param in params.items():
        local = locals_[name]
        window = flat.as_strided(local.shape, local.stride(), places.get(name, start) - start)
        window.copy_(param.grad.to_local())
        param.grad = DTensor.from_local(
            window, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
        )


def assert_equal(found: Any, expected: Any, what: object, fused: bool) -> None:
    """To the bit, but for fused CPU kernels: they round the last few elements of a tensor (those that do not fill a
    vector) in another way than the rest, so that any sharding changes last bits."""
    if fused:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")
    else:
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), what


def assert_same(
    params: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object, fused: bool = False
) -> None:
    for name, param in params.items():
        if isinstance(param, sharded_tensor.ShardedTensor):
            for shard in param.local_shards():
                assert_equal(shard.tensor, cut(expected[name], shard.metadata), (what, name), fused)
        elif isinstance(param, DTensor):
            wanted = place(expected[name].detach(), param.device_mesh, param.placements)
            assert_equal(param.to_local(), wanted.to_local(), (what, name), fused)
        else:
            assert_equal(param, expected[name], (what, name), fused)


def assert_same_state(full: dict[str, Any], plain: Optimizer, what: object, fused: bool = False) -> None:
    expected = plain.state_dict()
    assert full["state"].keys() == expected["state"].keys(), what
    for index, values in expected["state"].items():
        assert full["state"][index].keys() == values.keys(), what
        for key, value in values.items():
            found = full["state"][index][key]
            assert_equal(found, value, (what, index, key), fused)
    for found, wanted in zip(full["param_groups"], expected["param_groups"], strict=True):
        assert {k: v for k, v in found.items() if k != "param_names"} == wanted, what


def parity(name: str, has_variants: bool = True) -> None:
    """Steps with all gradients, with gradients in flat memory, and with some missing; then state and options.

    Each variant has one layout, the plain options have all of them.
    """
    optimizer_class = getattr(torch.optim, name)
    shapes = _shapes(name)
    for number, options in enumerate([{}, *(VARIANTS.get(name, []) if has_variants else [])]):
        for layout, make in list(LAYOUTS.items())[number % 3 :: 3 if number else 1]:
            what = (name, options, layout, dist.get_world_size())
            params, plain = make(shapes), _plain(shapes)
            found = ShardedOptimizer(params, optimizer_class, lr=0.1, **options)
            expected = optimizer_class(list(plain.values()), lr=0.1, **options)
            for step in range(4):
                without = ("uneven", "short") if step in (1, 2) else ()
                drawn = gradients(shapes, step, without)
                for tensors, optimizer in ((params, found), (plain, expected)):
                    optimizer.zero_grad()
                    set_gradients(tensors, drawn)
                if layout != "mixed" and not without:
                    lay_gradients_flat(params)
                found.step()
                expected.step()
                assert_same(params, plain, (*what, step), "fused" in options)
            assert_same_state(found.full_state_dict(by_index=True), expected, what, "fused" in options)


def refused(name: str) -> None:
    """Refused with the reason, on shards and on plain tensors."""
    optimizer_class = getattr(torch.optim, name)
    for make in (*LAYOUTS.values(), lambda _: {"weight": nn.Parameter(_whole((4, 3), 0))}):
        with pytest.raises(ConfigError, match=f"{name} cannot be run over sharded parameters: "):
            ShardedOptimizer(make(dict(OTHERS)), optimizer_class)


@on_ranks(2)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_torch_optim(name: str) -> None:
    (refused if name in REFUSED else parity)(name=name)


@on_ranks(4)
@pytest.mark.parametrize("name", ["AdamW", "Muon", "Adafactor"])
def test_four_ranks(name: str) -> None:
    parity(name, has_variants=False)

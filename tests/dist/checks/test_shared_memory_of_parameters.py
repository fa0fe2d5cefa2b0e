"""Parameters and buffers over the same memory: a named error where shards would become different, else right numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise import ConfigError, ShardwiseError, ZeroRedundancyOptimizer, fully_shard, replicate, shard_model


class _Tied(nn.Module):
    """An embedding and a head over one memory, as ``make`` makes the head's weight of the embedding's."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight) -> None:
        super().__init__()
        self.first = nn.Embedding(10, 6)
        weight = make(self.first.weight)
        self.last = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.last.weight = nn.Parameter(weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(tokens))


def _each(api: Callable[..., Any], *names: str) -> Callable[[nn.Module], object]:
    return lambda model: [api(model.get_submodule(name)) for name in names]


WAYS: dict[str, Callable[[Any], object]] = {
    "one unit": fully_shard,
    "units and root": _each(fully_shard, "first", "last", ""),
    "inner and root": _each(fully_shard, "first", ""),
    "list": lambda model: fully_shard([model.first, model.last]),
    "root kept": lambda model: fully_shard(model, reshard_after_forward=False),
    "shard_model": shard_model,
    "replicate": replicate,
    "replicate each": _each(replicate, "first", "last", ""),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_parameters_over_one_memory_are_refused(way: str) -> None:
    first, last = (r"modules\[0\]", r"modules\[1\]") if way == "list" else (r"model\.first", r"model\.last")
    with pytest.raises(
        ConfigError, match=rf"share memory.* Write {last}\.weight = {first}\.weight first, which ties them"
    ):
        WAYS[way](_Tied())
    assigned = _Tied(torch.zeros_like)
    assigned.last.weight.data = assigned.first.weight.data
    before = dict(assigned.named_parameters())
    with pytest.raises(ConfigError, match="share memory"):
        WAYS[way](assigned)
    if way in ("one unit", "shard_model", "list"):  # nothing has changed
        assert {name: id(param) for name, param in assigned.named_parameters()} == {k: id(v) for k, v in before.items()}
        assigned.last.weight = assigned.first.weight
        WAYS[way](assigned)
    for make in (lambda weight: weight[3:], lambda weight: weight.detach().t()):
        with pytest.raises(ConfigError, match="share memory.*Give one of them memory of its own"):
            WAYS[way](_Tied(make))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_buffers_and_ignored_parameters_over_the_memory_of_a_parameter_are_refused(way: str) -> None:
    for holder in ("first", "last"):
        model = _Tied(torch.clone)
        model.get_submodule(holder).register_buffer("seen", model.first.weight.detach()[1:])
        with pytest.raises(ConfigError, match=r"weight and .*seen share memory"):
            WAYS[way](model)
    if way == "one unit":
        model = _Tied()
        with pytest.raises(ConfigError, match=r"first\.weight and model\.last\.weight share memory"):
            fully_shard(model, ignored_params={model.last.weight})
        fully_shard(model, ignored_params={*model.parameters()})  # both stay where they are


@on_ranks(2)
def test_all_ranks_are_told_if_only_the_first_has_values() -> None:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = _Tied()
    with pytest.raises(ShardwiseError, match="share memory"):
        fully_shard(model, sync_module_states=True)


def _flat(model: nn.Module) -> nn.Module:
    """Put all parameters into one storage, as flattened models have them."""
    params = list(model.parameters())
    flat = torch.cat([param.detach().flatten() for param in params])
    for param, values in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.data = values.view_as(param)
    return model


class _Columns(nn.Module):
    """Three weights that are columns of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(2, 6, bias=False) for _ in range(3))
        both = torch.randn(6, 6)
        for part, columns in zip(self.parts, both.split(2, 1), strict=True):
            part.weight.data = columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(0)


class _Frozen(_Tied):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


class _Lstm(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def _by_identity() -> nn.Module:
    model = _Tied()
    model.last.weight = model.first.weight
    return model


FINE: dict[str, Callable[[], nn.Module]] = {
    "flat": lambda: _flat(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 3))),
    "copy of flat": lambda: copy.deepcopy(_flat(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)))),
    "flat lstm": lambda: _flat(_Lstm(2, 3, num_layers=2)),
    "frozen": _Frozen,
    "identity": _by_identity,
}


@on_ranks(2)
def test_columns_of_one_matrix_need_memory_of_their_own() -> None:
    """Their bytes lie between each other, and only ranges of bytes are compared."""
    for api in (fully_shard, replicate):
        with pytest.raises(ConfigError, match=r"share memory.*Give one of them memory of its own first \(clone\(\)\)"):
            api(_Columns())


@pytest.mark.parametrize("kind", FINE)
@on_ranks(2)
def test_parts_of_one_storage_that_do_not_overlap_are_sharded(kind: str) -> None:
    names = [name for name, _ in FINE[kind]().named_children()]
    for api in (fully_shard, shard_model, replicate, _each(fully_shard, *names, "")):
        torch.manual_seed(0)
        plain = FINE[kind]()
        torch.manual_seed(0)
        model = FINE[kind]()
        api(model)
        x = torch.arange(6).view(3, 2) if kind in ("frozen", "identity") else torch.ones(3, 2)
        for each in (plain, model):
            optimizer = torch.optim.SGD([param for param in each.parameters() if param.requires_grad], 0.1)
            for _ in range(2):
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(mine, DTensor)
            torch.testing.assert_close(mine.full_tensor(), other)


@on_ranks(2)
def test_aliases_without_memory_are_no_ties_and_plain_replicas_stay_tied() -> None:
    with torch.device("meta"):
        fully_shard(_Tied())
    torch.manual_seed(0)
    ddp = DistributedDataParallel(_Tied())
    torch.manual_seed(0)
    model = replicate(_Tied(), process_group=None)
    for each in (ddp, model):
        optimizer = torch.optim.AdamW(each.parameters(), 0.1)
        for step in range(2):
            each(torch.arange(4) + step + dist.get_rank()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.first.weight, model.last.weight)
    for mine, other in zip(model.parameters(), ddp.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("partition", ["whole", "even"])
@on_ranks(2)
def test_zero_refuses_parameters_over_one_memory(partition: Any) -> None:
    for make in (lambda weight: weight, lambda weight: weight[3:]):
        with pytest.raises(ShardwiseError, match="parameters 0 and 1 share memory"):
            ZeroRedundancyOptimizer(_Tied(make).parameters(), torch.optim.SGD, lr=0.1, partition=partition)
    model = _Tied()
    optimizer = ZeroRedundancyOptimizer([model.first.weight], torch.optim.SGD, lr=0.1, partition=partition)
    with pytest.raises(ShardwiseError, match="parameters 0 and 1 share memory"):
        optimizer.add_param_group({"params": [model.last.weight]})
    ZeroRedundancyOptimizer(_by_identity().parameters(), torch.optim.SGD, lr=0.1, partition=partition)
    flat = _flat(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)))
    ZeroRedundancyOptimizer(flat.parameters(), torch.optim.SGD, lr=0.1, partition=partition)

"""Attributes that users set on parameters, as marks for optimizers and others: they follow into every form of a parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_same
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardwise import CPUOffloadPolicy, ZeroRedundancyOptimizer, fully_shard, replicate, shard_model


class Net(nn.Module):
    """Marked weights, of which one is tied and one frozen; what its forward finds on them is in ``seen``."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5, device=device)
        self.second = nn.Linear(5, 3, device=device)
        self.tied = nn.Linear(3, 5, bias=False, device=device)
        self.tied.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.seen: list[Any] = []
        for param in self.parameters():
            param.no_weight_decay = param.ndim < 2
            param.notes = [param.ndim]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.parameters():
            self.seen.append((param.ndim, param.no_weight_decay, param.notes))
            param.was_used = True
        return self.tied(self.second(self.first(x)))


def _in_parts(model: Net) -> None:
    fully_shard(model.second)
    fully_shard(model)


def _beside_tensor_parallelism(model: Net) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    marks = [copy.copy(vars(param)) for param in model.second.parameters()]
    parallelize_module(model.second, mesh["tp"], ColwiseParallel(output_layouts=None))
    for param, attributes in zip(model.second.parameters(), marks, strict=True):  # torch leaves them behind
        vars(param).update(attributes)
    fully_shard(model, mesh=mesh["dp"])


WAYS: dict[str, Callable[[Net], object]] = {
    "fully_shard": fully_shard,
    "units": _in_parts,
    "kept": lambda model: fully_shard(model, reshard_after_forward=False),
    "smaller mesh": lambda model: fully_shard(model, reshard_after_forward=max(2, dist.get_world_size() // 2)),
    "offloaded": lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy()),
    "tensor parallel": _beside_tensor_parallelism,
    "shard_model": shard_model,
    "replicate": replicate,
    "older replicate": lambda model: replicate(model, device_ids=None),
}


def _assert_marked(model: nn.Module, **more: object) -> None:
    for name, param in model.named_parameters():
        found = {key: getattr(param, key, None) for key in ("no_weight_decay", "notes", *more)}
        assert found == {"no_weight_decay": param.ndim < 2, "notes": [param.ndim], **more}, name


@pytest.mark.parametrize(
    ("way", "num_ranks"), [*((way, 2) for way in WAYS), ("smaller mesh", 4), ("tensor parallel", 4)]
)
@on_ranks()
def test_attributes_follow_both_ways(way: str) -> None:
    model = Net()
    WAYS[way](model)
    _assert_marked(model)
    assert not any(isinstance(value, nn.Parameter) for value in vars(model.first.weight).values())
    if way == "tensor parallel":
        return  # its forward needs inputs of another kind; the next test unshards it
    shards = list(model.parameters())
    for _ in range(2):
        loss = model(torch.ones(2, 3)).sum()
        _assert_marked(model, was_used=True)
        loss.backward()
        assert all(param.was_used for param in shards)
        assert model.seen
        assert all(mark == (ndim < 2) and notes == [ndim] for ndim, mark, notes in model.seen)
        _assert_marked(model, was_used=True)
        model.reshard() if way != "older replicate" else None
        for param in model.parameters():
            del param.was_used
            param.no_weight_decay = param.ndim < 2
        assert not any(hasattr(param, "was_used") for param in shards)
        model.seen.clear()


@on_ranks(4)
def test_attributes_follow_into_full_parameters_that_are_distributed() -> None:
    model = Net()
    _beside_tensor_parallelism(model)
    model.unshard()
    assert isinstance(model.second.weight, DTensor)
    _assert_marked(model)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "tensor parallel"])
@on_ranks(2)
def test_attributes_follow_through_copies_and_conversions(way: str) -> None:
    model = Net()
    WAYS[way](model)
    for has_run in (False, True):
        copied = copy.deepcopy(model)
        _assert_marked(copied)
        copied.second.weight.notes.append(0)
        copied(torch.ones(2, 3)).sum().backward()
        _assert_marked(model)
        for convert in (nn.Module.float, nn.Module.double, nn.Module.float):
            convert(model)
            _assert_marked(model, **({"was_used": True} if has_run else {}))
        model(torch.ones(2, 3)).sum().backward()
        assert all(notes == [ndim] for ndim, _, notes in model.seen)


@pytest.mark.parametrize("way", ["fully_shard", "units", "replicate", "older replicate"])
@on_ranks(2)
def test_attributes_stay_where_memory_is_given_to_a_model_of_the_meta_device(way: str) -> None:
    model = Net("meta")
    WAYS[way](model)
    _assert_marked(model)
    model.to_empty(device="cpu")
    _assert_marked(model)


class Marked(torch.optim.SGD):
    """Notes what its last step has found on the tensors."""

    found: ClassVar[list[object]]

    def step(self, closure: Any = None) -> Any:
        Marked.found = [getattr(param, "notes", None) for group in self.param_groups for param in group["params"]]
        return super().step(closure)


@pytest.mark.parametrize("partition", ["whole", "even"])
@on_ranks(2)
def test_zeros_optimizer_finds_attributes_on_what_it_steps(partition: Any) -> None:
    model, plain = Net(), Net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Marked, partition=partition, lr=0.1)
    for net, stepped in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))):
        net(torch.ones(2, 3)).sum().backward()
        stepped.step()
    assert_same(model, plain)
    assert Marked.found or dist.get_rank()
    assert all(Marked.found)

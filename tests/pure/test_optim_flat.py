"""Runs in memory and the state of their pieces: found by address, split and merged without loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import ConfigError, ShardedOptimizer
from shardwise.optim.elementwise import MANY_LAYOUTS, ElementwiseStep
from shardwise.optim.slices import slices_of


def test_neighbours_by_chance_do_not_cost_a_layout_per_step() -> None:
    """Gradients that an allocator puts side by side in every other step: after a while pieces are left apart, for a while."""
    memory, single = torch.randn(4), []
    tensors = {"0": memory[:2].clone(), "1": memory[2:].clone()}
    together = torch.cat(list(tensors.values())).split(2)
    tensors = dict(zip(tensors, together, strict=True))
    single = [tensor.clone() for tensor in together]
    flat = ElementwiseStep(
        lambda groups: torch.optim.Adam(groups, lr=0.1),
        [([slices_of(name, tensor) for name, tensor in tensors.items()], {})],
        True,
    )
    expected = torch.optim.Adam(single, lr=0.1)
    counts: list[int] = []
    for step in range(20 * MANY_LAYOUTS):
        gradients = torch.randn(5)
        apart = step % 2
        for index, (tensor, other) in enumerate(zip(tensors.values(), single, strict=True)):
            start = 2 * index + apart * index
            tensor.grad = gradients[start : start + 2]
            other.grad = tensor.grad.clone()
        flat.step()
        expected.step()
        counts.append(len(flat.optimizer.param_groups[0]["params"]))
    assert all(torch.equal(a, b) for a, b in zip(tensors.values(), single, strict=True))
    assert counts[:4] == [1, 2, 1, 2]
    assert sum(count == 1 for count in counts) < 2 * MANY_LAYOUTS, counts


def test_indices_with_names_are_read_by_the_names() -> None:
    """A plain optimizer's state dict says which is which, if it was given names, whatever their order."""
    weights = {name: nn.Parameter(torch.full((2,), float(i))) for i, name in enumerate("abc")}
    plain = torch.optim.SGD([(name, weights[name]) for name in "cab"], lr=0.1, momentum=0.9)
    for index, param in enumerate(weights.values()):
        param.grad = torch.full((2,), 1.0 + index)
    plain.step()
    found = ShardedOptimizer(weights, torch.optim.SGD, lr=0.1, momentum=0.9)
    found.load_state_dict(plain.state_dict())
    for index, name in enumerate("abc"):
        assert found.state_dict()["state"][name]["momentum_buffer"].tolist() == [1.0 + index] * 2


def test_names_of_groups_are_no_entries() -> None:
    optimizer = ShardedOptimizer({"weight": nn.Parameter(torch.ones(2))}, torch.optim.SGD, lr=0.1)
    group = optimizer.param_groups[0]
    assert group["param_names"] == group.get("param_names") == ["weight"]
    assert "param_names" not in set(group)
    assert group.get("nothing", 3) == 3
    with pytest.raises(KeyError):
        group["nothing"]
    optimizer.add_param_group({"params": {"bias": nn.Parameter(torch.ones(1))}})
    assert optimizer.param_groups[1]["param_names"] == ["bias"]


def test_wrong_arguments_are_named() -> None:
    weight = nn.Parameter(torch.ones(2))
    for params, error, text in (
        (weight, TypeError, "need names"),
        ({}, ConfigError, "no parameters"),
        ([weight], TypeError, "expected \\(name, tensor\\)"),
        ({"weight": 3}, TypeError, "weight: expected a Tensor"),
        ({"weight": weight, "tied": weight}, ConfigError, "tied is given twice \\(first as weight\\)"),
    ):
        with pytest.raises(error, match=text):
            ShardedOptimizer(params, torch.optim.SGD, lr=0.1)  # pyright: ignore[reportArgumentType]
    for groups, text in (([{"weight_decay": 1.0}], '"names"'), ([{"names": "*bias"}], "matches")):
        with pytest.raises(ConfigError, match=text):
            ShardedOptimizer({"weight": weight}, torch.optim.SGD, lr=0.1, groups=groups)

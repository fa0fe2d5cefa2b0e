"""Runs in memory and the state of their pieces: found by address, split and merged without loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise import ConfigError, ShardedOptimizer
from shardwise.optim.elementwise import (
    MANY_LAYOUTS,
    ElementwiseStep,
    LiveSlice,
    breaks,
    find_joins,
    in_memory_order,
    make_run,
    merged,
)
from shardwise.optim.slices import slices_of
from shardwise.optim.state_dict import ByName, NamedGroup, in_form


def _windows(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return list(torch.arange(float(sum(sizes))).to(dtype).split(sizes))


def _found(locals_: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> list[LiveSlice]:
    return [
        LiveSlice(slices_of(str(i), local)[0], local, gradient)
        for i, (local, gradient) in enumerate(zip(locals_, gradients, strict=True))
    ]


def test_neighbours_join_and_nothing_else_does() -> None:
    sizes = [4, 3, 0, 5]
    found = _found(_windows(sizes), list(_windows(sizes)))
    found = [found[i] for i in in_memory_order(found)]
    assert [f.local.numel() for f in found] == [4, 3, 5, 0]
    assert find_joins(found, frozenset(), 100) == [False, True, True, True]
    assert find_joins(found, frozenset({2}), 100) == [False, True, False, True]
    assert find_joins(found, frozenset(), 7) == [False, True, False, True]
    apart = _found(_windows([4, 3]), [torch.ones(4), torch.ones(3)])
    assert find_joins(apart, frozenset(), 100) == [False, False]
    missing = _found(_windows([2, 2, 2]), [_windows([2])[0], None, _windows([2])[0]])
    assert find_joins(missing, frozenset(), 100) == [False, False, False]


def test_a_gap_ends_a_run() -> None:
    memory, gradients = torch.zeros(9), torch.zeros(9)
    spans = [(0, 4), (5, 4)]
    found = _found([memory.narrow(0, *s) for s in spans], [gradients.narrow(0, *s) for s in spans])
    assert find_joins(found, frozenset(), 100) == [False, False]


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6))
@settings(max_examples=50)
def test_state_of_neighbours_joins_where_it_lies(sizes: list[int]) -> None:
    sizes = sorted(sizes, reverse=True)  # as in memory order, empty ones come last
    found = _found(_windows(sizes), [None] * len(sizes))
    flat = torch.randn(sum(sizes))
    parts = [{"step": torch.tensor(3.0), "average": part, "flag": None} for part in flat.split(sizes)]
    states = {item.param_slice: part for item, part in zip(found, parts, strict=True)}
    assert breaks(found, states) <= {0}
    state = merged(parts, make_run(found).shapes)
    assert torch.equal(state["average"], flat)
    assert torch.equal(state["step"], torch.tensor(3.0))
    if sum(sizes):
        assert state["average"].data_ptr() == flat.data_ptr()


def test_other_numbers_and_state_elsewhere_do_not_join() -> None:
    found = _found(_windows([2, 2]), [None, None])
    memory = torch.ones(4)
    first, second = ({"step": torch.tensor(1.0), "average": part} for part in memory.split(2))
    for other, is_joined in (
        (second, True),
        ({**second, "step": torch.tensor(2.0)}, False),
        ({"average": second["average"]}, False),
        ({**second, "average": torch.ones(2, dtype=torch.float64)}, False),
        ({**second, "average": torch.ones(2)}, False),
    ):
        assert (1 not in breaks(found, {found[0].param_slice: first, found[1].param_slice: other})) == is_joined


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    masks=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=5),
)
@settings(max_examples=40)
def test_flat_steps_equal_single_ones_whatever_gradients_come(sizes: list[int], masks: list[list[bool]]) -> None:
    memory = torch.randn(sum(sizes))
    tensors = {str(i): t for i, t in enumerate(memory.clone().split(sizes))}
    single = [t.clone() for t in memory.split(sizes)]
    params = [slices_of(name, tensor) for name, tensor in tensors.items()]
    flat = ElementwiseStep(lambda groups: torch.optim.Adam(groups, lr=0.1), [(params, {})], True)
    expected = torch.optim.Adam(single, lr=0.1)
    for mask in masks:
        gradients = torch.randn(sum(sizes))
        for tensor, other, part, there in zip(tensors.values(), single, gradients.split(sizes), mask, strict=False):
            tensor.grad = part if there else None
            other.grad = part.clone() if there else None
        flat.step()
        expected.step()
        assert all(torch.equal(a, b) for a, b in zip(tensors.values(), single, strict=True))


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


def test_state_dicts_change_form() -> None:
    state = {"a": {"step": 1, "deep": {"left": 2}}, "a.b": {"step": 3}}
    groups = [{"params": ["a.b"], "lr": 0.1}, {"params": ["a"], "lr": 0.2, "betas": (0.9, 0.99)}]
    assert in_form("indexed", state, groups)["state"] == {1: state["a"], 0: state["a.b"]}
    assert in_form("named", state, groups) == {"state": state, "param_groups": groups}
    with pytest.raises(ConfigError, match="the form is 'by name'"):
        in_form("by name", state, groups)  # pyright: ignore[reportArgumentType]


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


def test_names_and_indices_are_the_same_keys() -> None:
    state = ByName(["a", "b"], {"a": 1})
    state[1] = 2
    assert state == {"a": 1, "b": 2}
    assert state[0] == 1
    group = NamedGroup(["a", "b"], {"lr": 0.1})
    group["params"] = [1, "a"]
    assert group["params"] == ["b", "a"]


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

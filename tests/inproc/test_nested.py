"""Tensors are found in, and replaced in, every container that modules take and return."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from shardwise.fsdp.hooks import cast_floating, map_tensors, tensors_in

Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    tag: str


class ModelOutput(collections.OrderedDict):
    pass


X = torch.ones(2)
CASES = [
    X,
    [X, 1, "a"],
    (X, (X, None)),
    Pair(X, [X]),
    {"x": X, "n": {"y": X}},
    collections.defaultdict(list, x=X),
    ModelOutput(x=X),
    Record(X, "tag"),
    {"deep": [Record(X, "tag"), {"z": (X,)}]},
]


@pytest.mark.parametrize("value", CASES, ids=lambda value: type(value).__name__)
def test_every_tensor_is_found_and_replaced(value: object) -> None:
    before = list(tensors_in(value))
    assert before
    assert all(tensor is X for tensor in before)
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert type(doubled) is type(value)
    after = list(tensors_in(doubled))
    assert len(after) == len(before)
    assert all(torch.equal(tensor, 2 * X) for tensor in after)
    assert all(tensor is X for tensor in tensors_in(value)), "the input was changed"


def test_default_factory_survives() -> None:
    result = map_tensors(lambda tensor: tensor, collections.defaultdict(list, x=X))
    assert result["missing"] == []


def test_only_floating_tensors_are_cast() -> None:
    packed = pack_sequence([torch.ones(3, 2)])
    whole, index, sequence = cast_floating((X, torch.ones(2, dtype=torch.int64), packed), torch.bfloat16)
    assert (whole.dtype, index.dtype, sequence.data.dtype) == (torch.bfloat16, torch.int64, torch.bfloat16)
    assert cast_floating(X, torch.float32) is X

"""Tensors are found in, and replaced in, every container that modules take and return."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from shardwise.containers import Conversion, tensors_in

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
    doubled = Conversion(torch.float64, copies=True)(value)
    assert type(doubled) is type(value)
    after = list(tensors_in(doubled))
    assert len(after) == len(before)
    assert all(tensor.dtype == torch.float64 and torch.equal(tensor, X.double()) for tensor in after)
    assert all(tensor is X for tensor in tensors_in(value)), "the input was changed"


def test_default_factory_survives() -> None:
    result = Conversion(torch.float64, copies=True)(collections.defaultdict(list, x=X))
    assert result["missing"] == []


def test_only_floating_tensors_are_cast() -> None:
    packed = pack_sequence([torch.ones(3, 2)])
    whole, index, sequence = Conversion(torch.bfloat16)((X, torch.ones(2, dtype=torch.int64), packed))
    assert (whole.dtype, index.dtype, sequence.data.dtype) == (torch.bfloat16, torch.int64, torch.bfloat16)
    assert Conversion(torch.float32)(X) is X


def test_what_is_moved_to_a_device_is_moved_in_containers_too() -> None:
    meta = torch.device("meta")
    box = {
        "x": [X],
        "n": torch.ones(2, dtype=torch.int64),
        "sequence": pack_sequence([X[:, None]], enforce_sorted=False),
    }
    sequence = box["sequence"]
    conversion = Conversion(torch.bfloat16, meta)
    (x, moved), kwargs = conversion.arguments((X, box), {"y": X})
    assert x is kwargs["y"] is moved["x"][0]
    assert x.device == moved["n"].device == moved["sequence"].sorted_indices.device == meta
    assert moved["sequence"].batch_sizes is sequence.batch_sizes
    assert x.dtype == torch.bfloat16
    moved["x"].append("put")
    conversion.take_back()
    assert moved is box
    assert box["sequence"] is sequence
    assert box["x"][0] is X
    assert box["x"][1:] == ["put"]

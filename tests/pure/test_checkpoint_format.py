"""What a checkpoint is made of: names, plans, values, the manifest, headers; and that nothing wrong in them gets through."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_with_safetensors

from shardwise.checkpoint.contents import decode, encode
from shardwise.checkpoint.format import (
    DTYPE_BYTES,
    Entry,
    FileRecord,
    Held,
    Manifest,
    PartRecord,
    TensorRecord,
    Window,
    from_bytes,
    from_fields,
    header_bytes,
    is_part_file,
    join,
    make_header,
    parse_header,
    plain,
    share_out,
    split,
    step_folder,
    step_of,
    sum_of,
    to_bytes,
    whole,
)
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpointError

# ---- names ----


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_names_are_split_as_they_were_joined(parts: list[str]) -> None:
    assert split(join(*parts)) == parts


def test_no_name_of_a_file_leaves_the_folder() -> None:
    assert is_part_file("part-00001.safetensors")
    for name in (
        "../part-00001.safetensors",
        "/part-00001.safetensors",
        "part-00001.safetensors\n",
        "manifest.json",
        "",
    ):
        assert not is_part_file(name)


def test_steps_have_one_name() -> None:
    assert [step_of(step_folder(step)) for step in (0, 7, 10**9)] == [0, 7, 10**9]
    assert [step_of(name) for name in ("step-1", ".saving-00000001", "step-0000000x", "step-00000001.old")] == [
        None
    ] * 4
    assert plain("_orig_mod.a._checkpoint_wrapped_module.b") == "a.b"


# ---- who writes what ----


def test_what_does_not_make_up_a_tensor_is_refused() -> None:
    half = Held("a", "F32", (4,), (Window((0,), (2,)),))
    rest = Held("a", "F32", (4,), (Window((1,), (3,)),))
    for ranks in ([[half]], [[half], [rest]], [[half], [Held("a", "F64", (4,), (Window((2,), (2,)),))]]):
        with pytest.raises(CheckpointError, match="^a: "):
            share_out(ranks)


# ---- values ----

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary()
)
KEYS = st.text() | st.integers() | st.just("$")
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.lists(inner).map(tuple),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    through = json.loads(json.dumps(encode(value, "x"), allow_nan=False))
    found = decode(through, "x")
    assert found == value
    assert repr(found) == repr(value)


def test_values_of_other_kinds() -> None:
    value = {"nan": float("nan"), "lr": np.float64(0.1), "count": Counter({3: 2}), "tensor_lr": torch.tensor(0.5)}
    found = decode(json.loads(json.dumps(encode(value, "x"))), "x")
    assert math.isnan(found["nan"])
    assert found["lr"] == 0.1
    assert type(found["count"]) is Counter
    assert torch.equal(found["tensor_lr"], torch.tensor(0.5))


class _Evil:
    def __reduce__(self) -> Any:
        raise AssertionError("nothing is pickled")


@pytest.mark.parametrize("value", [_Evil(), {1, 2}, print, 2**5000, torch.float32])
def test_what_json_cannot_carry_is_an_error_that_names_the_key(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^scheduler/a/0/b: "):
        encode({"a": [{"b": value}]}, "scheduler")


def test_a_value_within_itself_is_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="within itself"):
        encode(value, "x")


# ---- blocks ----


# ---- the manifest and headers ----


def _example() -> Manifest:
    files = tuple(FileRecord(f"part-{i:05d}.safetensors", 100, 64, ("ab" * 16, "cd" * 16)) for i in range(2))
    halves = tuple(PartRecord(i, f"model/a@{2 * i},0", Window((2 * i, 0), (2, 3)), 60, 84) for i in range(2))
    tensors = {
        "model/a": TensorRecord("F32", (4, 3), halves),
        "model/n": TensorRecord("I64", (), (PartRecord(0, "model/n", Window((), ()), 84, 92),)),
    }
    values = {
        "optimizer/groups": [{"params": ["a"], "options": {"lr": 0.1, "betas": {"$": "tuple", "v": [0.9, 0.99]}}}]
    }
    return Manifest("0123456789abcdef" * 2, 12, 2, files, tensors, {"model/b": "model/a"}, values)


def test_every_changed_byte_of_a_manifest_is_found() -> None:
    data = to_bytes(_example())
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 + place % 255
        with pytest.raises(DamagedCheckpointError):
            from_bytes(bytes(changed))
        with pytest.raises(DamagedCheckpointError):
            from_bytes(data[:place])


JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**63, 2**2000, 1e308, "", "..", "../../etc/passwd", "/etc/passwd", "part-00009.safetensors",
    [], [[]], {}, {"a": 1}, [0] * 100, "x" * 1000, {"$": "tensor", "v": "model/none"}, {"$": "pickle", "v": "gASV"},
    {"$": "bytes", "v": 3}, {"$": "number", "dtype": "F32", "shape": [2**40], "v": ""},
]  # fmt: skip


def mutate(value: Any, chance: random.Random) -> Any:
    """Change, drop, repeat or replace something within JSON."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.85:
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        how = chance.random()
        if how < 0.12:
            del value[key]
        elif how < 0.2 and isinstance(value, list):
            value.append(copy.deepcopy(value[key]))
        elif how < 0.26 and isinstance(value, dict):
            value[chance.choice(["", "../x", "a" * 500, "model/a", "$"])] = value.pop(key)
        else:
            value[key] = mutate(value[key], chance)
        return value
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return value + chance.choice([-(2**40), -8, -1, 1, 4, 2**40])
    return copy.deepcopy(chance.choice(JUNK))


def _is_unclear(error: CheckpointError) -> bool:
    assert 10 < len(str(error)) < 2000
    return False


def check_mutation(seed: int) -> bool:
    """Read a mutated manifest, whose sum is right; return True if it is taken, and then it claims no more than its files."""
    chance = random.Random(seed)
    fields = json.loads(to_bytes(_example()))
    del fields["sum"]
    for _ in range(chance.choice((1, 1, 2, 3))):
        fields = mutate(fields, chance)
    if not isinstance(fields, dict):
        return False
    try:
        found = from_fields(fields, "m")
        assert sum(tensor.num_bytes for tensor in found.tensors.values()) <= sum(file.num_bytes for file in found.files)
        assert all(is_part_file(file.name) for file in found.files)
        for name, value in found.values.items():
            decode(
                value, name, lambda wanted: torch.empty(found.tensors[wanted].shape if wanted in found.tensors else ())
            )
    except CheckpointError as error:
        return _is_unclear(error)
    return True


def test_a_mutated_manifest_is_a_clear_error_or_claims_no_more_than_its_files() -> None:
    taken = sum(check_mutation(seed) for seed in range(1500))
    assert 0 < taken < 900


def _file() -> bytes:
    first = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    second = torch.arange(5, dtype=torch.int16)
    rows = [
        Held("a", "F64", (2, 3), (whole((2, 3)),)),
        Held("b", "I16", (9,), (Window((0,), (5,)), Window((5,), (4,)))),
    ]
    writes = [write for write in share_out([rows]) if write.window != Window((5,), (4,))]
    header, begins = make_header(writes, {"format": "pt", "shardwise.save": "1"})
    data = header + first.numpy().tobytes() + second.numpy().tobytes()
    assert begins == [len(header), len(header) + 48]
    return data


def test_the_safetensors_library_reads_our_files() -> None:
    found = load_with_safetensors(_file())
    assert sorted(found) == ["a", "b@0"]
    assert torch.equal(found["a"], torch.arange(6, dtype=torch.float64).reshape(2, 3))
    header = parse_header(_file()[: header_bytes(_file()[:8], len(_file()), "f")], len(_file()), "f")
    assert header.entries["b@0"] == Entry("I16", (5,), len(_file()) - 10, len(_file()))
    assert header.metadata["shardwise.save"] == "1"


def check_header_mutation(seed: int) -> bool:
    """Read the header of a mutated file as if no sum had protected it; return True if it is taken."""
    chance = random.Random(seed)
    data = bytearray(_file())
    length = 8 + int.from_bytes(data[:8], "little")
    if chance.random() < 0.5:
        for _ in range(chance.choice((1, 1, 2, 8))):
            data[chance.randrange(length)] = chance.randrange(256)
    else:
        fields = mutate(json.loads(data[8:length]), chance)
        body = json.dumps(fields).encode()
        data = bytearray(len(body).to_bytes(8, "little") + body + data[length:])
    try:
        length = header_bytes(bytes(data[:8]), len(data), "f")
        header = parse_header(bytes(data[:length]), len(data), "f")
    except DamagedCheckpointError as error:
        return _is_unclear(error)
    sizes = [math.prod(each.shape) * DTYPE_BYTES[each.dtype] for each in header.entries.values()]
    assert sum(sizes) <= len(data)
    return True


def test_a_mutated_header_is_a_clear_error_or_claims_no_more_than_its_file() -> None:
    taken = sum(check_header_mutation(seed) for seed in range(1500))
    assert 0 < taken < 900


def test_json_that_is_nested_without_end_is_an_error() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000, "NaN", '{"a":1,"a":2}', "[1]"):
        body = text.encode()
        with pytest.raises(DamagedCheckpointError):
            from_bytes(body[:-1] + b',"sum":"' + sum_of(body[:-1]).encode() + b'"}\n')


def test_two_tensors_on_the_same_bytes_are_refused() -> None:
    fields = json.loads(to_bytes(_example()))
    fields["tensors"]["model/again"] = copy.deepcopy(fields["tensors"]["model/n"])
    with pytest.raises(DamagedCheckpointError, match="two tensors share bytes 84:92 of part-00000"):
        from_fields(fields, "m")


def test_tensors_of_a_header_lie_one_after_the_other() -> None:
    for places in ([[0, 4], [0, 4], [4, 8]], [[0, 4], [8, 12]], [[0, 8]]):
        fields = {str(i): {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for i, (a, b) in enumerate(places)}
        body = json.dumps(fields).encode()
        data = len(body).to_bytes(8, "little") + body
        with pytest.raises(DamagedCheckpointError, match="header"):
            parse_header(data, len(data) + (8 if len(places) == 3 else 12), "f")

"""Positions take the fewest bytes and come back; changes lead from one tensor to the next, one after the other."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.optim.slices import Window
from shardwise.publish.delta import bits_of, change_of, decode_positions, encode_positions

NUMEL = 2**40
SHAPE = (6, 4, 3)
NUMBERS = st.lists(st.integers(0, NUMEL - 1), unique=True, max_size=20).map(sorted)
DTYPES = st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool])


@given(NUMBERS)
def test_positions_come_back(numbers: list[int]) -> None:
    data = encode_positions(torch.tensor(numbers, dtype=torch.int64))
    assert decode_positions(np.frombuffer(data, np.uint8), len(numbers), NUMEL).tolist() == numbers


def test_a_position_takes_a_byte_for_each_seven_bits_of_its_distance() -> None:
    for gap, expected in ((0, 1), (127, 1), (128, 2), (2**14 - 1, 2), (2**14, 3), (2**35 - 1, 5), (2**35, 6)):
        assert len(encode_positions(torch.tensor([gap]))) == expected


@given(NUMBERS.filter(bool), st.data())
def test_positions_that_are_not_what_was_written_are_refused_or_in_range(
    numbers: list[int], data: st.DataObject
) -> None:
    found = bytearray(encode_positions(torch.tensor(numbers)))
    found[data.draw(st.integers(0, len(found) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        positions = decode_positions(np.frombuffer(found, np.uint8), len(numbers), NUMEL)
    except ValueError:
        return
    assert len(positions) == len(numbers)
    assert (positions[1:] > positions[:-1]).all()
    assert 0 <= positions[0] <= positions[-1] < NUMEL


@pytest.mark.parametrize(
    ("data", "count", "numel"),
    [(b"\x80", 0, 9), (b"\x05", 1, 5), (b"\x01\x01", 1, 9), (b"", 1, 9), (b"\xff" * 8 + b"\x01", 1, 2**62)],
)
def test_positions_out_of_place_are_refused(data: bytes, count: int, numel: int) -> None:
    with pytest.raises(ValueError, match="positions"):
        decode_positions(np.frombuffer(data, np.uint8), count, numel)


def tensor_of(seed: int, dtype: torch.dtype) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, SHAPE, generator=noise).to(dtype)


def windows_of(splits: tuple[int, int, int]) -> list[Window]:
    """Return the eight parts that one split of each dim makes, some of them empty."""
    found = [Window((), ())]
    for size, split in zip(SHAPE, splits, strict=True):
        ranges = ((0, split), (split, size - split))
        found = [Window((*w.offsets, start), (*w.sizes, count)) for w in found for start, count in ranges]
    return found


SPLITS = st.tuples(*(st.integers(0, size) for size in SHAPE))


@given(SPLITS, DTYPES, st.lists(st.integers(0, 9), min_size=2, max_size=4))
def test_changes_lead_from_one_tensor_to_the_next(
    splits: tuple[int, int, int], dtype: torch.dtype, seeds: list[int]
) -> None:
    tensors = [bits_of(tensor_of(seed, dtype)) for seed in seeds]
    plain, strided = tensors[0].clone(), tensors[0].transpose(0, 2).contiguous().transpose(0, 2)
    for window in windows_of(splits):
        for old, new in pairwise(tensors):
            change, positions = change_of("", window, window.cut(new).contiguous(), window.cut(old).contiguous())
            assert change.bits.nbytes + len(positions) <= window.numel * dtype.itemsize
            for target in (plain, strided):
                change.put(window.cut(target))
    assert torch.equal(plain, tensors[-1])
    assert torch.equal(strided, tensors[-1])


@given(SPLITS, st.integers(0, 5), st.integers(0, 3))
def test_new_rows_are_those_of_the_tensor(splits: tuple[int, int, int], row: int, column: int) -> None:
    old = torch.zeros(SHAPE, dtype=torch.int16)
    new = old.clone()
    new[row, column, 0] = 1
    rows: set[int] = set()
    for window in windows_of(splits):
        change, _ = change_of("", window, window.cut(new).contiguous(), window.cut(old).contiguous())
        if change.bits.numel():
            assert change.rows().tolist() == sorted({*change.rows().tolist()})
            rows |= {*change.rows().tolist()} if change.local is not None else {row}
    assert rows == {row}

"""Positions take the fewest bytes and come back; digests of parts add up to that of the whole; changes compose."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.optim.slices import Window, whole
from shardwise.publish.delta import MODULUS, PartChange, bits_of, decode_positions, digest_of, encode_positions

NUMEL = 2**40
SHAPE = (6, 4, 3)
NUMBERS = st.lists(st.integers(0, NUMEL - 1), unique=True, max_size=20).map(sorted)
DTYPES = st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool])


@given(NUMBERS)
def test_positions_come_back(numbers: list[int]) -> None:
    data = encode_positions(torch.tensor(numbers, dtype=torch.int64))
    assert decode_positions(data, len(numbers), NUMEL).tolist() == numbers


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
        positions = decode_positions(found, len(numbers), NUMEL)
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
        decode_positions(data, count, numel)


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


def part(bits: torch.Tensor, window: Window) -> PartChange:
    return PartChange(SHAPE, window, None, window.cut(bits).contiguous())


@given(SPLITS, DTYPES, st.integers(0, 9))
def test_digests_of_parts_add_up_to_that_of_the_whole(
    splits: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> None:
    bits = bits_of(tensor_of(seed, dtype))
    expected = digest_of(bits.reshape(-1), torch.arange(bits.numel()), 7)
    parts = [part(bits, window) for window in windows_of(splits)]
    assert sum(each.digest(each.bits, 7) for each in parts) % MODULUS == expected


@given(SPLITS, DTYPES, st.lists(st.integers(0, 9), min_size=2, max_size=4))
def test_changes_lead_from_one_tensor_to_the_next_alone_and_together(
    splits: tuple[int, int, int], dtype: torch.dtype, seeds: list[int]
) -> None:
    tensors = [tensor_of(seed, dtype) for seed in seeds]
    strided = tensors[0].transpose(0, 2).contiguous().transpose(0, 2)
    for window in windows_of(splits):
        together: PartChange | None = None
        for old, new in pairwise(tensors):
            change = part(bits_of(new), window).since(part(bits_of(old), window))
            assert change.bits.nbytes + len(change.positions) <= window.numel * dtype.itemsize
            together = change.after(together)
        assert together is not None
        together.put(strided)
    assert torch.equal(strided, tensors[-1])


@given(st.integers(0, SHAPE[0] - 1), st.integers(0, 2**63 - 1))
def test_a_digest_follows_from_what_has_changed(row: int, key: int) -> None:
    old, new = bits_of(tensor_of(0, torch.bfloat16)), bits_of(tensor_of(0, torch.bfloat16)).clone()
    new[row, 1] ^= 1
    full = whole(SHAPE)
    change = part(new, full).since(part(old, full))
    assert change.local is not None
    assert change.rows().tolist() == [row]
    known = part(old, full).digest(old, key)
    follows = known - change.digest(change.old(old), key) + change.digest(change.bits, key)
    assert follows % MODULUS == part(new, full).digest(new, key) != known


def test_digests_tell_positions_values_and_tensors_apart() -> None:
    ones = torch.ones(3, dtype=torch.int16)
    at = torch.arange(3)
    assert (
        len(
            {digest_of(ones, at, 1), digest_of(ones, at + 1, 1), digest_of(ones * 2, at, 1), digest_of(ones, at, 2**60)}
        )
        == 4
    )
    swapped = torch.tensor([1, 2], dtype=torch.int16)
    assert digest_of(swapped, at[:2], 1) != digest_of(swapped.flip(0), at[:2], 1)

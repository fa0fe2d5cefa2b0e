"""Tensors carved out of one allocation are like any others."""

from __future__ import annotations

import gc

import pytest
import torch

from shardwise.collectives.streams import are_neighbours, is_own, join_from, suballocate
from shardwise.torch_private import storage_use_count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_carved_tensor_has_its_own_storage(dtype: torch.dtype) -> None:
    flat = torch.zeros(64, dtype=dtype)
    part = suballocate(flat, 8, (3, 4))
    assert is_own(part)
    part.fill_(1)
    expected = torch.zeros(64, dtype=dtype)
    expected[8:20] = 1
    assert torch.equal(flat.view(torch.uint8), expected.view(torch.uint8))


def test_a_memory_order_is_kept() -> None:
    flat = torch.arange(24.0)
    part = suballocate(flat, 0, (1, 2, 3, 4), (24, 1, 8, 2))
    assert part.is_contiguous(memory_format=torch.channels_last)
    assert is_own(part)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0)])
def test_an_empty_part_has_no_memory(shape: tuple[int, ...]) -> None:
    part = suballocate(torch.arange(4.0), 4, shape)
    assert part.shape == shape
    assert is_own(part)


def test_neighbours_can_be_joined_and_keep_the_allocation_alive() -> None:
    flat = torch.arange(10.0)
    storage = flat.untyped_storage()
    parts = [suballocate(flat, 2, (2, 2)), suballocate(flat, 6, (0,)), suballocate(flat, 6, (3,))]
    del flat
    whole = join_from(parts[0], 7, tuple(parts))
    assert is_own(whole)
    whole.mul_(10)
    assert parts[2].tolist() == [60.0, 70.0, 80.0]
    del parts
    gc.collect()
    assert whole.tolist() == [20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0]
    assert storage_use_count(storage) > 0
    del whole
    gc.collect()
    assert storage_use_count(storage) == 0


def test_neighbours_are_told_by_addresses_whatever_their_storages() -> None:
    flat = torch.arange(10.0)
    left, nothing, right = suballocate(flat, 0, (2, 2)), suballocate(flat, 4, (0, 3)), flat[4:9]
    assert are_neighbours([left, nothing, right])
    assert are_neighbours([nothing])
    assert not are_neighbours([right, left])
    assert not are_neighbours([left, flat[5:9]])

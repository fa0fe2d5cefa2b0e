"""Sketches of the parts of a tensor add up to that of the whole, and those of two tensors tell how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shardwise.prove.compare import distance, factor_of, norm
from shardwise.prove.sketch import Box, sketch


def parts_of(whole: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    found, start = torch.zeros(13, dtype=torch.float64), 0
    for part in whole.split(tuple(sizes), dim):
        offsets = tuple(start * (each == dim) for each in range(whole.ndim))
        found += sketch(part, Box(tuple(whole.shape), offsets, tuple(part.shape)))
        start += part.shape[dim]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (5, 300), (5, 6, 3), (4, 3, 2, 90)])
def test_sketches_of_parts_add_up_however_a_tensor_is_cut(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = (torch.randn(shape) * 9).to(dtype)
    for dim, size in enumerate(shape):
        assert torch.allclose(parts_of(whole, dim, (1, size - 1, 0)), sketch(whole), rtol=1e-5, atol=1e-3)


def test_a_place_has_a_sign_of_its_own_in_each_sum() -> None:
    ones = torch.eye(200).unsqueeze(2)  # one element at each place of a vector, and of a matrix of one column
    signs = torch.stack([sketch(each[:, 0])[:12] for each in ones])
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    assert len({tuple(each) for each in signs.tolist()}) > 190
    assert signs.mean(0).abs().max() < 0.3


def test_distances_and_factors_are_those_of_the_tensors() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        first = torch.randn(40, 90)
        second = first + torch.randn(40, 90) * 1e-3
        a, b = sketch(first).numpy(), sketch(second).numpy()
        assert 0.4 < distance(a, b) / float((first - second).norm()) < 2
        assert norm(a) == pytest.approx(float(first.norm()), rel=1e-5)
        assert factor_of(sketch(first * 0.5).numpy(), a) == pytest.approx(0.5, rel=1e-5)
        assert factor_of(sketch(torch.randn(40, 90)).numpy(), a) is None
        changed = first.clone()
        changed[3, 5] += 1e-2  # one element
        assert distance(sketch(changed).numpy(), a) == pytest.approx(1e-2, rel=1e-2)

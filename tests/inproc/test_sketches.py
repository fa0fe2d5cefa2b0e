"""Sketches of the parts of a tensor add up to that of the whole, and those of two tensors tell how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shardwise.prove.compare import distance, factor_of, norm
from shardwise.prove.sketch import Box, sketch, sketches_of


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return sketches_of({"w": tensor})["w"][0]


def parts_of(full: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    found, start = torch.zeros(13, dtype=torch.float64), 0
    for part in full.split(tuple(sizes), dim):
        offsets = tuple(start * (each == dim) for each in range(full.ndim))
        found += sketch(part[None], Box(tuple(full.shape), offsets, tuple(part.shape)))[0]
        start += part.shape[dim]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (64, 300), (5, 6, 3), (4, 16, 2, 90)])
def test_sketches_of_parts_add_up_however_a_tensor_is_cut(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    full = (torch.randn(shape) * 9).to(dtype)
    for dim, size in enumerate(shape):
        for sizes in ((1, size // 2, size - size // 2 - 1), (size // 2, size - size // 2, 0)):
            assert torch.allclose(parts_of(full, dim, sizes), whole(full), rtol=1e-5, atol=1e-3)


def test_a_place_has_a_sign_of_its_own_in_each_sum() -> None:
    ones = torch.eye(200).unsqueeze(2)  # one element at each place of a vector, and of a matrix of one column
    signs = torch.stack([whole(each[:, 0])[:12] for each in ones])
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    assert len({tuple(each) for each in signs.tolist()}) > 190
    assert signs.mean(0).abs().max() < 0.3


def test_distances_and_factors_are_those_of_the_tensors() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        first = torch.randn(40, 90)
        second = first + torch.randn(40, 90) * 1e-3
        a, b = whole(first).numpy(), whole(second).numpy()
        assert 0.4 < distance(a, b) / float((first - second).norm()) < 2
        assert norm(a) == pytest.approx(float(first.norm()), rel=1e-5)
        assert factor_of(whole(first * 0.5).numpy(), a) == pytest.approx(0.5, rel=1e-5)
        assert factor_of(whole(torch.randn(40, 90)).numpy(), a) is None
        changed = first.clone()
        changed[3, 5] += 1e-2  # one element
        assert distance(whole(changed).numpy(), a) == pytest.approx(1e-2, rel=1e-2)
    for number in range(5):  # a row, a column, and what rows have alike: none of them is added to nothing
        alike = torch.zeros(3, 64, 90)
        alike[0, number], alike[1, :, number], alike[2] = torch.randn(90), torch.randn(64), torch.randn(90)
        assert all(
            0.4 < distance(whole(each).numpy(), whole(each * 0).numpy()) / float(each.norm()) < 2.5 for each in alike
        )


def test_tensors_that_are_sketched_together_have_the_sketches_of_each_alone() -> None:
    shapes = {"a": (40, 9), "b": (7,), "c": (40, 9), "empty": (0, 9), "large": (200, 100), "as large": (200, 100)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {
        "half": tensors["a"].half(),
        "sparse": tensors["a"].relu().to_sparse(),
        "meta": torch.empty(3, device="meta"),
    }
    with torch.autocast("cpu", torch.bfloat16):  # as in a hook of a module
        found = sketches_of(tensors, exact=True)
    assert [*found] == [name for name in tensors if name != "meta"]
    for name, (sums, ranks) in found.items():
        assert ranks == ()
        assert torch.equal(sums[13:], sketches_of({name: tensors[name]}, exact=True)[name][0][13:])
        assert torch.allclose(sums[:13], whole(tensors[name].to_dense()), rtol=1e-5, atol=1e-4)

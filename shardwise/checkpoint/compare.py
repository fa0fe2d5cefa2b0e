"""Two checkpoints beside each other: which tensors and values differ, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from shardwise.checkpoint.files import Files
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.stream import MOST_NUMEL, stream


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same to the bit in both.

    Attributes:
        num_different: elements with other bits (with other values where dtypes differ); None where shapes differ.
        most: largest absolute difference; nan if one of the two is nan.  largest: largest absolute value in the first.
    """

    name: str
    first: str
    second: str
    num_different: int | None
    most: float
    largest: float


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value that is no tensor; None where it is missing."""

    name: str
    first: object | None
    second: object | None


@dataclass(frozen=True, slots=True)
class _Gap:
    """How many elements differ, by how much at most, and the largest absolute value of the first."""

    number: int = 0
    most: float = 0.0
    largest: float = 0.0

    def widened(self, other: _Gap) -> _Gap:
        return _Gap(self.number + other.number, _higher(self.most, other.most), _higher(self.largest, other.largest))


def names_in(manifest: Manifest) -> set[str]:
    """Return the names of all tensors, those that share another one's memory too."""
    return {*manifest.tensors, *manifest.ties}


def compare_tensors(
    files: Files, first: tuple[Path, Manifest], second: tuple[Path, Manifest], seen: Callable[[int], None]
) -> Iterator[TensorDifference]:
    """Compare the tensors that are in both, in the order of their names.

    ``seen`` is told the bytes of the first one that were compared.  Memory: a few windows of
    :func:`~shardwise.checkpoint.stream.stream`.  Raises: DamagedCheckpointError.
    """
    common = sorted(names_in(first[1]) & names_in(second[1]))
    same_shape: list[str] = []
    for name in common:
        mine, theirs = (_described(manifest, name) for _, manifest in (first, second))
        if mine[1] == theirs[1]:
            same_shape.append(name)
        else:
            yield TensorDifference(name, _text(mine), _text(theirs), None, 0.0, 0.0)
    left, right = (stream(files, path, manifest, same_shape, MOST_NUMEL) for path, manifest in (first, second))
    gap = _Gap()
    for mine, theirs in zip(left, right, strict=True):
        seen(mine.tensor.numel() * mine.tensor.element_size())
        gap = gap.widened(_measure(mine.tensor, theirs.tensor))
        if not mine.is_last:
            continue
        described = [_described(manifest, mine.name) for _, manifest in (first, second)]
        if gap.number or described[0] != described[1]:
            yield TensorDifference(
                mine.name, _text(described[0]), _text(described[1]), gap.number, gap.most, gap.largest
            )
        gap = _Gap()


def compare_values(first: Manifest, second: Manifest) -> list[ValueDifference]:
    """Return the values that differ, each by its path."""
    mine, theirs = (dict(_leaves(each.values, "")) for each in (first, second))
    return [
        ValueDifference(name, mine.get(name), theirs.get(name))
        for name in sorted({*mine, *theirs})
        if name not in mine or name not in theirs or mine[name] != theirs[name]
    ]


def _described(manifest: Manifest, name: str) -> tuple[str, tuple[int, ...]]:
    record = manifest.record_of(name)
    assert record is not None, name
    return record.dtype, record.shape


def _text(described: tuple[str, tuple[int, ...]]) -> str:
    return f"{described[0]} {list(described[1])}"


def _measure(mine: torch.Tensor, theirs: torch.Tensor) -> _Gap:
    if not mine.numel():
        return _Gap()
    if mine.is_complex():
        mine, theirs = torch.view_as_real(mine), torch.view_as_real(theirs.to(mine.dtype))
    left, right = mine.double(), theirs.double()
    if mine.dtype == theirs.dtype:
        width = mine.element_size()
        bits = [each.contiguous().view(-1).view(torch.uint8).view(-1, width) for each in (mine, theirs)]
        number = int((bits[0] != bits[1]).any(1).sum())
    else:
        number = int((left != right).sum())
    if not number:
        return _Gap(largest=float(left.abs().max()))
    gap = torch.where(left == right, 0.0, (left - right).abs())  # two infinities of one sign are no gap
    return _Gap(number, float(gap.max()), float(left.abs().max()))


def _higher(left: float, right: float) -> float:
    return max(left, right) if left == left and right == right else float("nan")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        fields = cast(Mapping[str, Any], value)
        for key in fields:
            yield from _leaves(fields[key], f"{path}/{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(cast(list[Any], value)):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value

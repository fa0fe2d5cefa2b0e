"""Matrices that the same ranks hold parts of, and who owns which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.matrices import Ranks
from shardwise.optim.pieces import ParamSlice, RowBox


@dataclass(slots=True, eq=False)
class Matrix:
    """A parameter that is updated as a whole.

    Attributes:
        pieces: what this rank holds of it.
        owner: the place of its owner in ``Meeting.ranks``; None if every rank holds it whole.
        leaf: what the optimizer of the owner holds; its memory comes for each step.  None on the other ranks.
        boxes: on the owner, what each rank holds.
        has_state: there is state on the owner, wherever that is: known on every rank.
    """

    name: str
    group_index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[ParamSlice]
    owner: int | None = None
    leaf: torch.Tensor | None = None
    boxes: list[list[RowBox]] | None = None
    has_state: bool = False


@dataclass(slots=True, eq=False)
class Meeting:
    """Matrices cut over the same ranks, which exchange them together."""

    ranks: Ranks
    matrices: list[Matrix]
    loads: list[int]

    def owned_by(self, rank: int) -> list[Matrix]:
        """Return the matrices of ``rank``, in the order of all."""
        return [matrix for matrix in self.matrices if matrix.owner == rank]

    @property
    def mine(self) -> list[Matrix]:
        """The matrices that this rank owns."""
        return self.owned_by(self.ranks.rank)


def make_matrix(group_index: int, pieces: list[ParamSlice]) -> Matrix:
    """Return the matrix of a parameter's pieces, without an owner."""
    param = pieces[0].param
    return Matrix(pieces[0].name, group_index, tuple(param.shape), param.dtype, pieces)


def without_memory(matrix: Matrix, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor of the matrix's shape that takes the memory of one element."""
    place = matrix.leaf.device if matrix.leaf is not None else device
    return torch.zeros((), dtype=matrix.dtype, device=place).expand(matrix.shape)


def leaf_of(matrix: Matrix) -> torch.Tensor:
    """Return what the optimizer holds of a matrix that this rank updates."""
    assert matrix.leaf is not None
    return matrix.leaf


def boxes_of(matrix: Matrix, rank: int) -> list[RowBox]:
    """Return what ``rank`` holds of a matrix that this rank owns."""
    assert matrix.boxes is not None
    return matrix.boxes[rank]


def all_boxes(matrices: Sequence[Matrix], rank: int) -> Iterator[tuple[Matrix, RowBox]]:
    """Yield what ``rank`` holds of each of the matrices, which this rank owns."""
    for matrix in matrices:
        for box in boxes_of(matrix, rank):
            yield matrix, box

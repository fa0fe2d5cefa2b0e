"""Runs: pieces that lie one after the other in memory, parameters and gradients alike, updated as one 1-D tensor.

Found by address alone, so nothing here knows of units: whoever packs shards and gradients into flat memory gets one
update per run, and whoever does not gets one per piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwise.optim.pieces import Piece

State = dict[str, Any]


class Found(NamedTuple):
    """A piece as it is in this step (a NamedTuple: one is made per piece and step)."""

    piece: Piece
    local: torch.Tensor
    gradient: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Pieces that the optimizer sees as one tensor.

    Attributes:
        tensor: what the optimizer holds, sharing the pieces' memory: of the piece's shape for one piece, else 1-D.
        shapes: of the pieces.
        address: where the run starts.
    """

    tensor: torch.Tensor
    pieces: tuple[Piece, ...]
    shapes: tuple[torch.Size, ...]
    address: int


def in_memory_order(found: Sequence[Found]) -> list[int]:
    """Return the indices by address; empty tensors, which have none, go last."""
    return sorted(range(len(found)), key=lambda i: (not found[i].local.numel(), found[i].local.data_ptr()))


def find_joins(found: Sequence[Found], blocked: frozenset[int], max_numel: int) -> list[bool]:
    """Return for each item whether it continues the one before: the same gap-free memory, in gradients too.

    Gaps end a run even where they are padding: what lies in one cannot be known.  An empty piece joins any run that has
    a gradient.  ``blocked`` items never join; no run grows beyond ``max_numel`` elements by joining.
    """
    joins: list[bool] = []
    next_local = next_gradient = -1
    dtype: torch.dtype | None = None
    numel = 0
    for index, item in enumerate(found):
        local, gradient = item.local, item.gradient
        if gradient is None or not local.dim() or gradient.layout != torch.strided:
            joins.append(False)
            dtype = None
            continue
        size = local.numel()
        if size == 0:
            joined = dtype is local.dtype and index not in blocked
            joins.append(joined)
            if not joined:
                next_local, dtype = -1, local.dtype
            continue
        address, from_gradient = local.data_ptr(), gradient.data_ptr()
        joined = (
            address == next_local
            and from_gradient == next_gradient
            and dtype is local.dtype
            and numel + size <= max_numel
            and index not in blocked
        )
        is_dense = local.is_contiguous() and gradient.is_contiguous() and gradient.dtype is local.dtype
        joined = joined and is_dense
        joins.append(joined)
        numel = numel + size if joined else size
        num_bytes = size * local.element_size()
        dtype = local.dtype if is_dense else None
        next_local, next_gradient = address + num_bytes, from_gradient + num_bytes
    return joins


def make_run(found: Sequence[Found]) -> Run:
    """Return the run of ``found``, which :func:`find_joins` has joined and which share storage."""
    pieces = tuple(item.piece for item in found)
    shapes = tuple(item.local.shape for item in found)
    first = found[0].local.detach()
    tensor = first if len(found) == 1 else flat_over(first, sum(item.local.numel() for item in found))
    return Run(tensor, pieces, shapes, first.data_ptr())


def flat_over(first: torch.Tensor, numel: int) -> torch.Tensor:
    """Return ``numel`` elements from where ``first`` starts as a 1-D tensor on the same storage."""
    return first.detach().as_strided((numel,), (1,), first.storage_offset())


def share_storage(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if neighbours in memory are in one allocation; the caching allocator hands out adjacent ones."""
    real = [tensor for tensor in tensors if tensor.numel()]
    return not real or real[0].untyped_storage().data_ptr() == real[-1].untyped_storage().data_ptr()


def split_state(run: Run, state: State) -> list[State]:
    """Return the state of each piece; values per element are views of ``state``, others copies."""
    if len(run.pieces) == 1:
        return [state]
    parts: list[State] = [{} for _ in run.pieces]
    numels = [shape.numel() for shape in run.shapes]
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == run.tensor.shape:
            for part, window, shape in zip(parts, value.split(numels), run.shapes, strict=True):
                part[key] = window.view(shape)
        else:
            for part in parts:
                part[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return parts


def merge_states(states: Sequence[State], shapes: Sequence[torch.Size]) -> State:
    """Return one state for pieces that :func:`can_merge`; no copy where the parts are neighbours already."""
    merged: State = {}
    for key, value in states[0].items():
        if is_per_element(value, shapes[0]):
            merged[key] = _as_one([state[key] for state in states])
        else:
            merged[key] = value
    return merged


def can_merge(first: State, shape: torch.Size, other: State, other_shape: torch.Size) -> bool:
    """Return True if two pieces differ in values per element only: one step count serves both."""
    if first.keys() != other.keys():
        return False
    for key, left in first.items():
        right = other[key]
        if is_per_element(left, shape) or is_per_element(right, other_shape):
            if not (is_per_element(left, shape) and is_per_element(right, other_shape) and left.dtype == right.dtype):
                return False
        elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            if left.dtype != right.dtype or not torch.equal(left, right):
                return False
        elif isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor) or left != right:
            return False
    return True


def is_per_element(value: object, shape: torch.Size) -> bool:
    """Return True if ``value`` holds a number for each element of a parameter of ``shape`` (one with dims)."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape


def _as_one(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    real = [part for part in parts if part.numel()]
    if not real:
        return parts[0].reshape(-1)
    address = real[0].data_ptr()
    for part in real:
        if part.data_ptr() != address or not part.is_contiguous():
            return torch.cat([part.reshape(-1) for part in parts])
        address += part.numel() * part.element_size()
    numel = sum(part.numel() for part in real)
    return flat_over(real[0], numel) if share_storage(real) else torch.cat([part.reshape(-1) for part in parts])

"""State of whole-matrix optimizers: from owners to the shards of everybody, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from shardwise.comm.matrices import Expected
from shardwise.errors import StateError
from shardwise.optim.exchanges import exchange, exchange_objects
from shardwise.optim.matrix_owners import Matrix, Meeting, boxes_of
from shardwise.optim.pieces import PerPiece

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Cut:
    """State of the parameter's shape: comes in the shards of the parameter."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Whole:
    """State of another shape: comes whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def send_states(meeting: Meeting, source: Mapping[int, State], device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the state of the meeting's matrices by name, sent from their owners.

    ``source``: the state of owned matrices by ``id``.  Values of the matrix's shape come as this rank's pieces, others
    whole.  One exchange of descriptions, one of tensors.
    """
    ranks = meeting.ranks
    described = [(m.name, [(key, _describe(value, m)) for key, value in source[id(m)].items()]) for m in meeting.mine]
    sends: list[list[torch.Tensor]] = [[] for _ in range(ranks.size)]
    for matrix in meeting.mine:
        for value in source[id(matrix)].values():
            if _is_sent(value):
                for rank in range(ranks.size):
                    sends[rank] += [b.cut(value) for b in boxes_of(matrix, rank)] if is_cut(value, matrix) else [value]
    by_name = {matrix.name: matrix for matrix in meeting.matrices}
    arrived = exchange_objects([described] * ranks.size, ranks, device)
    expected = [
        [e for name, items in described for _, item in items for e in _expected_state(item, by_name[name])]
        for described in arrived
    ]
    windows = exchange(sends, expected, ranks, device)
    found: dict[str, dict[str, Any]] = {}
    for described, received in zip(arrived, windows, strict=True):
        tensors = iter(received)
        for name, items in described:
            if items:
                found[name] = {key: _taken(item, by_name[name], tensors) for key, item in items}
    return found


def receive_states(meeting: Meeting, values: Mapping[str, Mapping[str, Any]], device: torch.device) -> dict[int, State]:
    """Return the state of owned matrices by ``id``, put together from the pieces in ``values``.

    Raises: StateError on all ranks that see it if ranks have other entries.
    """
    ranks = meeting.ranks
    _check_same(meeting, values, device)
    sends = [
        [t for m in meeting.owned_by(r) for v in values.get(m.name, {}).values() if isinstance(v, PerPiece) for t in v]
        for r in range(ranks.size)
    ]
    cut = [
        (m, key, value[0].dtype)
        for m in meeting.mine
        for key, value in values.get(m.name, {}).items()
        if isinstance(value, PerPiece)
    ]
    expected = [
        [Expected(box.sizes, dtype) for m, _, dtype in cut for box in boxes_of(m, rank)] for rank in range(ranks.size)
    ]
    arrived = exchange(sends, expected, ranks, device)
    found: dict[int, State] = {
        id(m): {
            key: torch.empty(m.shape, dtype=value[0].dtype, device=device) if isinstance(value, PerPiece) else value
            for key, value in values[m.name].items()
        }
        for m in meeting.mine
        if m.name in values
    }
    for rank, items in enumerate(arrived):
        windows = iter(items)
        for matrix, key, _ in cut:
            for box in boxes_of(matrix, rank):
                box.cut(found[id(matrix)][key]).copy_(next(windows))
    return found


def _check_same(meeting: Meeting, values: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    mine = {
        m.name: [(key, isinstance(value, PerPiece)) for key, value in values.get(m.name, {}).items()]
        for m in meeting.matrices
    }
    for rank, theirs in enumerate(exchange_objects([mine] * meeting.ranks.size, meeting.ranks, device)):
        wrong = [name for name in mine if mine[name] != theirs[name]]
        if wrong:
            raise StateError(
                f"{wrong[0]}: this rank loads state {mine[wrong[0]]}, rank {meeting.ranks.members[rank]} loads "
                f"{theirs[wrong[0]]}. Load the same entries on every rank; flattened state dicts of torch cannot be "
                "loaded by whole-matrix optimizers, since only owners know the names of their state"
            )


def is_cut(value: object, matrix: Matrix) -> bool:
    """Return True for state with a number per element, which is sharded like the matrix."""
    return _is_sent(value) and tuple(value.shape) == matrix.shape


def _is_sent(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for plain numbers; tensors in a form of their own (quantized state) travel as objects, and whole."""
    return type(value) is torch.Tensor and value.dim() > 0


def _describe(value: Any, matrix: Matrix) -> Any:
    if is_cut(value, matrix):
        return _Cut(value.dtype)
    if _is_sent(value):
        return _Whole(tuple(value.shape), value.dtype)
    return value.detach().cpu().clone() if type(value) is torch.Tensor else value


def _expected_state(item: Any, matrix: Matrix) -> list[Expected]:
    if isinstance(item, _Cut):
        return [Expected(piece.box.sizes, item.dtype) for piece in matrix.pieces]
    return [Expected(item.shape, item.dtype)] if isinstance(item, _Whole) else []


def _taken(item: Any, matrix: Matrix, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(item, _Cut):
        return PerPiece(next(tensors).clone() for _ in matrix.pieces)
    return next(tensors).clone() if isinstance(item, _Whole) else item

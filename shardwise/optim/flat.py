"""Runs: slices that are contiguous in memory, with contiguous gradients, updated as one 1-D tensor.

Runs are found by address only, independent of FSDP units: shards and gradients in flat memory get one update per run,
others one per slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from shardwise.collectives.buffer_pool import are_neighbours, join_from, suballocate
from shardwise.optim.slices import ParamSlice, local_of
from shardwise.torch_private import storage_use_count

State = dict[str, Any]


class LiveSlice(NamedTuple):
    """A slice in this step (a NamedTuple, because every step creates one per slice)."""

    param_slice: ParamSlice
    local: torch.Tensor
    gradient: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class FlatRun:
    """Slices that the optimizer updates as one tensor.

    Attributes:
        tensor: the optimizer's parameter, which shares the slices' memory: of the slice's shape for one slice, else
            1-D.
        shapes: of the slices.
        address: of the first element.
    """

    tensor: torch.Tensor
    slices: tuple[ParamSlice, ...]
    shapes: tuple[torch.Size, ...]
    address: int


def in_memory_order(found: Sequence[LiveSlice]) -> list[int]:
    """Return the indices sorted by address; empty tensors, which have none, come last."""
    return sorted(range(len(found)), key=lambda i: (not found[i].local.numel(), found[i].local.data_ptr()))


def find_joins(found: Sequence[LiveSlice], blocked: frozenset[int], max_numel: int) -> list[bool]:
    """Return for each item whether it continues the one before: contiguous memory of one dtype, gradients too.

    A gap ends a run even if it is padding: its contents are unknown.  An empty slice joins any run that has gradients.
    ``blocked`` indices never join; no run grows beyond ``max_numel`` elements by a join.
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


def make_run(found: Sequence[LiveSlice]) -> FlatRun:
    """Return the run of ``found``, whose items :func:`find_joins` has joined."""
    slices = tuple(item.param_slice for item in found)
    shapes = tuple(item.local.shape for item in found)
    first = found[0].local
    tensor = _alone(found[0]) if len(found) == 1 else flat_over([item.local for item in found])
    return FlatRun(tensor, slices, shapes, first.data_ptr())


def _alone(item: LiveSlice) -> torch.Tensor:
    """Return the parameter for an optimizer over one slice; no alias if possible: :func:`is_referenced` counts them."""
    is_internal = (
        isinstance(item.param_slice.param, DTensor) and not item.local.requires_grad
    )  # nothing else references it as a leaf with a gradient
    return item.local if is_internal else item.local.detach()


def flat_over(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one 1-D tensor over neighbours in memory, some of which may be empty."""
    first, last, numel = tensors[0], tensors[-1], 0
    for tensor in tensors:
        size = tensor.numel()
        if size:
            last = tensor
            if not numel:
                first = tensor
            numel += size
    storage = first.untyped_storage()
    if storage.data_ptr() == last.untyped_storage().data_ptr():  # views of one tensor: half the cost of joining
        return first.detach().as_strided((numel,), (1,), first.storage_offset())
    return join_from(first, numel, tensors)


def split_state(run: FlatRun, state: State, known: Sequence[State] = ()) -> list[State]:
    """Return the state of each slice: values per element as tensors of their own on the memory of ``state``, others as copies.

    ``known``: per slice, the entries that exist already.
    """
    if len(run.slices) == 1:
        return [state]
    parts: list[State] = [dict(part) for part in known] or [{} for _ in run.slices]
    for key, value in state.items():
        if is_per_element(value, run.tensor.shape):
            start = 0
            for part, shape in zip(parts, run.shapes, strict=True):
                if key not in part:
                    part[key] = suballocate(value, start, shape).detach()
                start += shape.numel()
        else:
            for part in parts:
                if not isinstance(value, torch.Tensor):
                    part[key] = value
                elif key not in part:
                    part[key] = value.clone()
    return [{key: part[key] for key in state} for part in parts]


def merge_states(states: Sequence[State], shapes: Sequence[torch.Size]) -> State:
    """Return one state for slices that :func:`can_merge`; without a copy if the values are contiguous already."""
    merged: State = {}
    for key, value in states[0].items():
        if is_per_element(value, shapes[0]):
            parts = [state[key] for state in states]
            is_flat = are_neighbours(parts) and all(part.is_contiguous() for part in parts)
            merged[key] = flat_over(parts) if is_flat else torch.cat([part.reshape(-1) for part in parts])
        else:
            merged[key] = value.clone() if isinstance(value, torch.Tensor) and is_referenced(value) else value
    return merged


def can_merge(first: State, shape: torch.Size, other: State, other_shape: torch.Size) -> bool:
    """Return True if the states of two slices differ only in values per element, so that one step count serves both."""
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


def is_per_element(value: object, shape: torch.Size) -> TypeGuard[torch.Tensor]:
    """Return True if ``value`` has a plain number for each element of a parameter of ``shape`` (with one dim or more)."""
    return type(value) is torch.Tensor and value.dim() > 0 and value.shape == shape


def is_referenced(value: torch.Tensor) -> bool:
    """Return True if other tensors share the memory of ``value``, so that it must not move."""
    return storage_use_count(value.untyped_storage()) > 1


class Chain:
    """A growing run, with a check whether the memory of its slices' state allows it.

    State that is contiguous stays in place; other state is copied, unless a part of it is referenced elsewhere.
    """

    def __init__(self, state: State, shape: torch.Size) -> None:
        self._head, self._head_shape = state, shape
        self._needs_copy = False
        self._is_referenced = self._has_references(state, shape)
        self._ends: dict[str, int] = {}
        self._follow(state, shape)

    def take(self, state: State, shape: torch.Size) -> bool:
        """Add a slice with this state if it can be merged with the slices before it; return whether it was added."""
        if not can_merge(self._head, self._head_shape, state, shape):
            return False
        referenced = self._has_references(state, shape)
        needs_copy = self._needs_copy or not self._is_next(state, shape)
        if needs_copy and (referenced or self._is_referenced):
            return False
        self._needs_copy, self._is_referenced = needs_copy, self._is_referenced or referenced
        self._follow(state, shape)
        return True

    @staticmethod
    def _has_references(state: State, shape: torch.Size) -> bool:
        return any(is_per_element(value, shape) and value.numel() and is_referenced(value) for value in state.values())

    def _is_next(self, state: State, shape: torch.Size) -> bool:
        real = {k: v for k, v in state.items() if is_per_element(v, shape) and v.numel()}
        return all(v.is_contiguous() and self._ends.get(k, v.data_ptr()) == v.data_ptr() for k, v in real.items())

    def _follow(self, state: State, shape: torch.Size) -> None:
        for key, value in state.items():
            if is_per_element(value, shape) and value.numel():
                self._needs_copy |= not value.is_contiguous()
                self._ends[key] = value.data_ptr() + value.numel() * value.element_size()


def packed(states: Mapping[ParamSlice, State], found: Sequence[LiveSlice]) -> dict[ParamSlice, State]:
    """Return ``states`` with values per element packed in the order in which slices will be joined; joins need no copy."""
    copies = {param_slice: dict(state) for param_slice, state in states.items()}
    rows: dict[str, list[tuple[State, torch.Tensor]]] = {}
    for index in in_memory_order(found):
        item = found[index]
        for key, value in copies.get(item.param_slice, {}).items():
            if is_per_element(value, item.local.shape) and value.dtype == item.local.dtype:
                rows.setdefault(key, []).append((copies[item.param_slice], value))
    for key, row in rows.items():
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[State, torch.Tensor]]] = {}
        for state, value in row:
            by_kind.setdefault((value.dtype, value.device), []).append((state, value))
        for members in by_kind.values():
            if are_neighbours([value for _, value in members]) and all(value.is_contiguous() for _, value in members):
                continue
            memory = torch.cat([value.reshape(-1) for _, value in members])
            start = 0
            for state, value in members:
                state[key] = suballocate(memory, start, value.shape).detach()
                start += value.numel()
    return copies


def empty_states(
    slices: Sequence[ParamSlice], dtypes: Mapping[str, Mapping[str, torch.dtype]]
) -> dict[ParamSlice, dict[str, torch.Tensor]]:
    """Return new memory for each slice and key of ``dtypes`` (by the slice's name), laid out as :func:`packed` does.

    One allocation per key, dtype and device; values whose dtype differs from the slice's get their own.
    """
    found = [LiveSlice(param_slice, local_of(param_slice), None) for param_slice in slices]
    targets: dict[ParamSlice, dict[str, torch.Tensor]] = {param_slice: {} for param_slice in slices}
    rows: dict[tuple[str, torch.dtype, torch.device], list[LiveSlice]] = {}
    for index in in_memory_order(found):
        item = found[index]
        for key, dtype in dtypes[item.param_slice.name].items():
            if dtype == item.local.dtype:
                rows.setdefault((key, dtype, item.local.device), []).append(item)
            else:
                targets[item.param_slice][key] = torch.empty(item.local.shape, dtype=dtype, device=item.local.device)
    for (key, dtype, device), items in rows.items():
        memory = torch.empty(sum(item.local.numel() for item in items), dtype=dtype, device=device)
        start = 0
        for item in items:
            targets[item.param_slice][key] = suballocate(memory, start, item.local.shape).detach()
            start += item.local.numel()
    return targets


def lies_at(known: torch.Tensor, value: object, start: int, shape: torch.Size) -> bool:
    """Return True if ``known`` has ``shape`` and its memory is that of the 1-D tensor ``value`` from element ``start`` on."""
    if not isinstance(value, torch.Tensor) or known.shape != shape or known.dtype != value.dtype or value.dim() != 1:
        return False
    return not known.numel() or known.data_ptr() == value.data_ptr() + start * value.element_size()

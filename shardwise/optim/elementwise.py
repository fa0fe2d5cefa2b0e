"""Step an element-wise optimizer over local pieces, in as few updates as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.optim.flat import (
    Found,
    Run,
    State,
    can_merge,
    find_joins,
    flat_over,
    in_memory_order,
    make_run,
    merge_states,
    share_storage,
    split_state,
)
from shardwise.optim.pieces import Piece, gradient_of, local_of

# Unfused updates on a CPU pass over memory about ten times: joined further, large parameters leave the caches
# (benchmarks/optimizer_step.py, few_large: 97 ms joined without a limit, 79 ms not joined).
CACHED_NUMEL = 1 << 16
UNLIMITED_NUMEL = 1 << 62

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


class _Group:
    """The pieces of one param group and the runs they are in at the moment."""

    def __init__(self, pieces: Sequence[Piece], runs: list[Run]) -> None:
        self.pieces = list(pieces)
        self.order = list(range(len(pieces)))
        self.joins = [False] * len(pieces)
        self.runs = runs
        self.blocked: frozenset[int] = frozenset()  # places in ``order`` whose state differs from their neighbour's

    def find(self) -> list[Found]:
        """Return the pieces with their tensors and gradients of this moment, in ``order``."""
        pieces = self.pieces
        return [Found(pieces[i], local_of(pieces[i]), gradient_of(pieces[i])) for i in self.order]


class ElementwiseStep:
    """An optimizer over plain tensors that share memory with the pieces.

    State lies in the inner optimizer under the runs' tensors.  When gradients come in other memory, or not for all
    pieces, runs are split (state becomes views) or joined (state is copied once unless it still is one block), so a step
    is always the one that a plain optimizer would make on each piece.

    Args:
        make: builds the optimizer from param groups.
        groups: pieces and options of each param group.
        is_flat: join pieces into runs.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Sequence[tuple[Sequence[Piece], Mapping[str, Any]]],
        is_flat: bool,
    ) -> None:
        self._make = make
        self._is_flat = is_flat
        self._groups = [_Group(pieces, _alone(pieces)) for pieces, _ in groups]
        self.optimizer = make(
            [
                {**options, "params": [run.tensor for run in group.runs]}
                for group, (_, options) in zip(self._groups, groups, strict=True)
            ]
        )

    def add_group(self, pieces: Sequence[Piece], options: Mapping[str, Any]) -> None:
        """Add a param group to the optimizer."""
        group = _Group(pieces, _alone(pieces))
        self.optimizer.add_param_group({**options, "params": [run.tensor for run in group.runs]})
        self._groups.append(group)

    def step(self) -> None:
        """Update the pieces from their gradients of now."""
        try:
            for index, group in enumerate(self._groups):
                self._prepare(index, group)
            torch_private.step_inside(self.optimizer)
        finally:
            for group in self._groups:
                for run in group.runs:
                    run.tensor.grad = None

    @property
    def num_runs(self) -> int:
        """Number of tensors that the optimizer sees."""
        return sum(len(group.runs) for group in self._groups)

    def states(self) -> dict[Piece, State]:
        """Return the state of every piece that has any; tensors are views of the live state."""
        found: dict[Piece, State] = {}
        for group in self._groups:
            for run in group.runs:
                state = self.optimizer.state.get(run.tensor)
                if state:
                    found.update(zip(run.pieces, split_state(run, state), strict=True))
        return found

    def blank_states(self) -> dict[Piece, State]:
        """Return state of the right names, shapes and dtypes with values that mean nothing; nothing is changed."""
        options = [_options(group) for group in self.optimizer.param_groups]
        copies = [[torch.zeros_like(local_of(piece)) for piece in group.pieces] for group in self._groups]
        trial = self._make([{**option, "params": tensors} for option, tensors in zip(options, copies, strict=True)])
        for tensors in copies:
            for tensor in tensors:
                tensor.requires_grad_(False)
                tensor.grad = torch.zeros_like(tensor)
        torch_private.step_inside(trial)
        return {
            piece: dict(trial.state[tensor])
            for group, tensors in zip(self._groups, copies, strict=True)
            for piece, tensor in zip(group.pieces, tensors, strict=True)
            if trial.state.get(tensor)
        }

    def load(self, states: Mapping[Piece, State], options: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state and options, by the optimizer's own ``load_state_dict``."""
        self._groups = [_Group(group.pieces, _alone(group.pieces)) for group in self._groups]
        for index, group in enumerate(self._groups):
            self.optimizer.param_groups[index]["params"] = [run.tensor for run in group.runs]
        numbered: dict[int, State] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for group, option in zip(self._groups, options, strict=True):
            for offset, piece in enumerate(group.pieces):
                if piece in states:
                    numbered[count + offset] = states[piece]
            groups.append({**option, "params": list(range(count, count + len(group.pieces)))})
            count += len(group.pieces)
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    def _prepare(self, index: int, group: _Group) -> None:
        found = group.find()
        joins = find_joins(found, group.blocked, self._max_numel(index)) if self._is_flat else group.joins
        if joins != group.joins or not _is_current(group.runs, found):
            found = self._lay_out(index, group)
        start = 0
        for run in group.runs:
            first = found[start].gradient
            if len(run.pieces) > 1:
                assert first is not None
                run.tensor.grad = flat_over(_first_real(found, start, len(run.pieces)), run.tensor.numel())
            elif first is not None:
                run.tensor.grad = first.detach() if first.requires_grad else first
            start += len(run.pieces)

    def _lay_out(self, index: int, group: _Group) -> list[Found]:
        states = self._states_of(group)
        for run in group.runs:
            self.optimizer.state.pop(run.tensor, None)
        group.order = list(range(len(group.pieces)))
        found = group.find()
        if self._is_flat:
            group.order = [group.order[i] for i in in_memory_order(found)]
            found = group.find()
        group.blocked, group.joins = self._join(found, states, self._max_numel(index))
        group.runs = []
        for start, stop in _ranges(group.joins):
            run = make_run(found[start:stop])
            group.runs.append(run)
            parts = [states.get(piece, {}) for piece in run.pieces]
            if parts[0]:
                state = merge_states(parts, run.shapes) if len(parts) > 1 else parts[0]
                self.optimizer.state[run.tensor] = state
        self.optimizer.param_groups[index]["params"] = [run.tensor for run in group.runs]
        return found

    def _join(
        self, found: Sequence[Found], states: Mapping[Piece, State], max_numel: int
    ) -> tuple[frozenset[int], list[bool]]:
        if not self._is_flat:
            return frozenset(), [False] * len(found)
        blocked: frozenset[int] = frozenset()
        while True:  # a blocked piece starts a run, and the next ones are compared with it instead
            joins = find_joins(found, blocked, max_numel)
            more = _mismatches(found, joins, states)
            if not more:
                return blocked, joins
            blocked |= more

    def _max_numel(self, index: int) -> int:
        group = self.optimizer.param_groups[index]
        is_cached = not group.get("fused") and all(tensor.device.type == "cpu" for tensor in group["params"][:1])
        return CACHED_NUMEL if is_cached else UNLIMITED_NUMEL

    def _states_of(self, group: _Group) -> dict[Piece, State]:
        found: dict[Piece, State] = {}
        for run in group.runs:
            state = self.optimizer.state.get(run.tensor)
            if state:
                found.update(zip(run.pieces, split_state(run, state), strict=True))
        return found


def _alone(pieces: Sequence[Piece]) -> list[Run]:
    return [make_run([Found(piece, local_of(piece), None)]) for piece in pieces]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_current(runs: Sequence[Run], found: Sequence[Found]) -> bool:
    start = 0
    for run in runs:
        if run.tensor.numel() and found[start].local.data_ptr() != run.address:
            return False
        if len(run.pieces) == 1:
            local = found[start].local
            if local.shape != run.tensor.shape or local.stride() != run.tensor.stride():
                return False
        elif not share_storage([f.gradient for f in found[start : start + len(run.pieces)] if f.gradient is not None]):
            return False
        start += len(run.pieces)
    return True


def _mismatches(found: Sequence[Found], joins: Sequence[bool], states: Mapping[Piece, State]) -> frozenset[int]:
    """Return the joins between pieces of different allocations or with different state."""
    wrong: set[int] = set()
    head = 0
    for index, joined in enumerate(joins):
        if not joined:
            head = index
            continue
        first, item = found[head], found[index]
        gradients = [f.gradient for f in (first, item) if f.gradient is not None]
        mine, theirs = states.get(first.piece, {}), states.get(item.piece, {})
        is_same = can_merge(mine, first.local.shape, theirs, item.local.shape)
        if not (is_same and share_storage([first.local, item.local]) and share_storage(gradients)):
            wrong.add(index)
            head = index
    return frozenset(wrong)


def _ranges(joins: Sequence[bool]) -> list[tuple[int, int]]:
    starts = [index for index, joined in enumerate(joins) if not joined]
    return list(zip(starts, [*starts[1:], len(joins)], strict=True))


def _first_real(found: Sequence[Found], start: int, count: int) -> torch.Tensor:
    """Return the first gradient with elements: where the run's gradient memory starts."""
    for item in found[start : start + count]:
        assert item.gradient is not None
        if item.gradient.numel():
            return item.gradient
    first = found[start].gradient
    assert first is not None
    return first

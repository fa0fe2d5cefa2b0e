"""State of single pieces, for those who hold it, while the optimizer has that of several as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from shardwise import torch_private
from shardwise.optim.flat import FlatRun, State, is_held, is_per_element, lies_at, split_state
from shardwise.optim.pieces import ParamSlice

PRUNE_EVERY = 16  # steps between looks whether what was given out is still held


class _Part(NamedTuple):
    """Values of a piece's elements, on the memory of its run; ``address``: where they were when it was made."""

    tensor: torch.Tensor
    address: int


class GivenState:
    """Tensors that stand for the state of pieces in runs of several.

    Values per element are tensors of their own on the memory of the run's state.  Numbers that a run has once, such as a
    step count, are copies, kept equal in both directions while somebody holds them.  Pieces in runs of their own are not
    here: the optimizer has their tensors themselves.
    """

    def __init__(self) -> None:
        self._parts: dict[ParamSlice, dict[str, _Part]] = {}
        self._copies: dict[ParamSlice, State] = {}
        self._num_steps = 0

    def split(self, run: FlatRun, state: State) -> list[State]:
        """Return the state of each piece of ``run``, in the tensors that were given out for it before if there are any."""
        if len(run.pieces) == 1:
            return [state]
        known: list[State] = []
        start = 0
        for piece, shape in zip(run.pieces, run.shapes, strict=True):
            parts = {
                key: part.tensor
                for key, part in self._parts.get(piece, {}).items()
                if part.tensor.data_ptr() != part.address or lies_at(part.tensor, state.get(key), start, shape)
            }
            known.append({**parts, **self._copies.get(piece, {})})
            start += shape.numel()
        found = split_state(run, state, known)
        for piece, part, shape in zip(run.pieces, found, run.shapes, strict=True):
            tensors = {key: value for key, value in part.items() if isinstance(value, torch.Tensor)}
            self._parts[piece] = {k: _part(v) for k, v in tensors.items() if is_per_element(v, shape)}
            self._copies[piece] = {k: v for k, v in tensors.items() if not is_per_element(v, shape)}
        self._num_steps = 0
        return found

    def merge(self, run: FlatRun, parts: Sequence[State], state: State) -> None:
        """Remember of ``parts``, the state of the pieces of a new run, what others hold and ``state`` lies under."""
        start = 0
        for piece, part, shape in zip(run.pieces, parts, run.shapes, strict=True):
            self._parts.pop(piece, None)
            self._copies.pop(piece, None)
            if len(run.pieces) > 1:
                held = {k: v for k, v in part.items() if isinstance(v, torch.Tensor) and is_held(v)}
                self._parts[piece] = {k: _part(v) for k, v in held.items() if lies_at(v, state[k], start, shape)}
                self._copies[piece] = {k: v for k, v in held.items() if not is_per_element(v, shape)}
            start += shape.numel()

    def was_changed(self, runs: Iterable[FlatRun], state_of: Callable[[FlatRun], State]) -> bool:
        """Return whether somebody has written to a copy, or moved the memory of a part (``share_memory_`` does)."""
        numbers: dict[tuple[FlatRun, str], float] = {}
        for run, piece in self._pieces(runs):
            if any(part.tensor.data_ptr() != part.address for part in self._parts.get(piece, {}).values()):
                return True
            for key, value in self._copies.get(piece, {}).items():
                if value.numel() != 1 or value.device.type != "cpu":
                    if not torch.equal(value, state_of(run)[key]):
                        return True
                    continue
                if (run, key) not in numbers:
                    numbers[run, key] = state_of(run)[key].item()
                if value.item() != numbers[run, key]:
                    return True
        return False

    def follow(self, runs: Iterable[FlatRun], state_of: Callable[[FlatRun], State]) -> None:
        """After a step: bring copies up to date, and now and then forget what nobody holds any more."""
        if not self._parts and not self._copies:
            return
        if self._num_steps % PRUNE_EVERY == 0:
            self._forget()
        self._num_steps += 1
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for run, piece in self._pieces(runs):
            for key, value in self._copies.get(piece, {}).items():
                targets.append(value)
                sources.append(state_of(run)[key])
        if targets:
            torch_private.copy_all(targets, sources)

    def mark(self) -> Callable[[], None]:
        """Return what brings back what is given out now, and the numbers in it."""
        parts = {piece: dict(of) for piece, of in self._parts.items()}
        copies = {piece: dict(of) for piece, of in self._copies.items()}
        numbers = [(value, value.detach().clone()) for of in copies.values() for value in of.values()]

        def put_back() -> None:
            self._parts, self._copies = parts, copies
            for value, was in numbers:
                value.detach().copy_(was)

        return put_back

    def _forget(self) -> None:
        parts = {p: {k: v for k, v in of.items() if is_held(v.tensor)} for p, of in self._parts.items()}
        copies = {p: {k: v for k, v in of.items() if is_held(v)} for p, of in self._copies.items()}
        self._parts = {piece: of for piece, of in parts.items() if of}
        self._copies = {piece: of for piece, of in copies.items() if of}

    def _pieces(self, runs: Iterable[FlatRun]) -> Iterator[tuple[FlatRun, ParamSlice]]:
        if self._parts or self._copies:
            yield from ((run, piece) for run in runs if len(run.pieces) > 1 for piece in run.pieces)


def _part(tensor: torch.Tensor) -> _Part:
    return _Part(tensor, tensor.data_ptr())

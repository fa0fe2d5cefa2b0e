"""What ranks hold in each strategy, and what follows: the part of the whole on one rank, and what a step sends."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple


class Row(NamedTuple):
    """What ranks hold along each axis of the mesh, outermost first: all, a part of each tensor, or some tensors."""

    parameter: tuple[str, ...]  # between a unit's forward and its backward
    gradient: tuple[str, ...]
    optimizer: tuple[str, ...]


_R, _S = "replicated", "sharded"
STRATEGIES = {
    "zero3": Row((_S,), (_S,), (_S,)),
    "hsdp": Row((_R, _S), (_R, _S), (_R, _S)),
    "hfsdp": Row((_R, _S), (_S, _S), (_S, _S)),
    "zero2": Row((_R,), (_S,), (_S,)),
    "zero1": Row((_R,), (_R,), ("owned",)),
    "ddp": Row((_R,), (_R,), (_R,)),
}

# The collective that leads from one placement to another, and its cost in sizes of the tensor per rank, for many ranks.
MOVES: dict[tuple[str, str], tuple[str, int]] = {
    ("partial", "replicated"): ("all-reduce", 2),  # a gradient that each rank has computed from its own batch
    ("partial", "sharded"): ("reduce-scatter", 1),
    ("sharded", "replicated"): ("all-gather", 1),
    ("owned", "replicated"): ("broadcast", 1),
}


def held(placements: Sequence[str], sizes: Sequence[int]) -> Fraction:
    """Return the part of the whole that one rank holds on a mesh of these ``sizes``."""
    return Fraction(1, prod(n for n, each in zip(sizes, placements, strict=True) if each != "replicated"))


def moves(row: Row, axis: int) -> tuple[str, ...]:
    """Return the collectives of a step along ``axis``."""
    state, kept = row.optimizer[axis], row.parameter[axis]
    reduced = MOVES["partial", row.gradient[axis]][0]
    if state == "replicated":
        return (reduced,)
    gather = MOVES[state, "replicated"][0]
    return (reduced, gather) if kept == "replicated" else (gather, gather, reduced)  # for forward and for backward


def sent(row: Row, axis: int, sizes: Sequence[int]) -> Fraction:
    """Return what one rank sends along ``axis`` in a step, in sizes of the model: what inner axes have left of a tensor."""
    costs = dict(MOVES.values())
    return sum(costs[move] for move in moves(row, axis)) * held(row.gradient[axis + 1 :], sizes[axis + 1 :])

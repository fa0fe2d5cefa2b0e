"""Strategies as rows of a table: where parameters, gradients and optimizer state lie, and what a step sends between.

Sources: ZeRO, arXiv 1910.02054 (stages 1 to 3); hybrid sharding, arXiv 2304.11277; state over all ranks beside hybrid
sharding ("HFSDP"), Megatron-FSDP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction
from math import prod
from types import MappingProxyType
from typing import Literal

from shardwise.errors import ConfigError

Placement = Literal["replicated", "sharded", "owned"]

# The collective that leads from one placement to another, and its cost in sizes of the tensor per rank, for many ranks.
MOVES: Mapping[tuple[str, str], tuple[str, int]] = MappingProxyType(
    {
        ("partial", "replicated"): ("all-reduce", 2),  # a gradient that each rank has computed from its own batch
        ("partial", "sharded"): ("reduce-scatter", 1),
        ("sharded", "replicated"): ("all-gather", 1),
        ("owned", "replicated"): ("broadcast", 1),
    }
)


@dataclass(frozen=True, slots=True)
class Placements:
    """Where the ranks of a data-parallel strategy hold what they train: one entry per axis of the mesh, outermost first.

    "replicated": every rank has all of it; "sharded": every rank has a part of each tensor; "owned": every rank has some of
    the tensors.

    Attributes:
        parameter: between a unit's forward and its backward.
        gradient: after backward.
        optimizer: the optimizer's state, and the values that it updates.

    Raises: ConfigError for what is no strategy of :data:`STRATEGIES`.

    Example:
        >>> Placements(("replicated",), ("sharded",), ("sharded",)).strategy
        'zero2'
    """

    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if astuple(self) not in _ROWS.values():
            known = "; ".join(f"{name}: {', '.join(map(str, row))}" for name, row in _ROWS.items())
            raise ConfigError(f"{self} is no strategy. Parameter, gradient and optimizer of each: {known}")

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return next(name for name, row in _ROWS.items() if row == astuple(self))

    def held(self, what: Literal["parameter", "gradient", "optimizer"], sizes: Sequence[int]) -> Fraction:
        """Return the part of the whole that one rank holds on a mesh of these ``sizes``."""
        placements: tuple[Placement, ...] = getattr(self, what)
        return Fraction(1, prod(n for n, each in zip(sizes, placements, strict=True) if each != "replicated"))

    def moves(self, axis: int) -> tuple[str, ...]:
        """Return the collectives of a step along ``axis``."""
        state, kept = self.optimizer[axis], self.parameter[axis]
        reduced = MOVES["partial", self.gradient[axis]][0]
        if state == "replicated":
            return (reduced,)
        gather = MOVES[state, "replicated"][0]
        return (reduced, gather) if kept == "replicated" else (gather, gather, reduced)  # for forward and for backward

    def sent(self, axis: int, sizes: Sequence[int]) -> Fraction:
        """Return what one rank sends along ``axis`` in a step, in sizes of the model, for many ranks per axis.

        Along an axis travels what the axes inside it have left of a tensor.
        """
        costs = dict(MOVES.values())
        inside = zip(sizes[axis + 1 :], self.gradient[axis + 1 :], strict=True)
        divided = prod(n for n, each in inside if each != "replicated")
        return Fraction(sum(costs[move] for move in self.moves(axis)), divided)


_R, _S = "replicated", "sharded"
_ROWS: Mapping[str, tuple[tuple[Placement, ...], ...]] = MappingProxyType(
    {
        "zero3": ((_S,), (_S,), (_S,)),
        "hsdp": ((_R, _S), (_R, _S), (_R, _S)),
        "hfsdp": ((_R, _S), (_S, _S), (_S, _S)),
        "zero2": ((_R,), (_S,), (_S,)),
        "zero1": ((_R,), (_R,), ("owned",)),
        "ddp": ((_R,), (_R,), (_R,)),
    }
)
STRATEGIES: Mapping[str, Placements] = MappingProxyType({name: Placements(*row) for name, row in _ROWS.items()})


def row_of(given: object) -> Placements:
    """Return the row that a name or placements stand for.  Raises: ConfigError for anything else."""
    if isinstance(given, Placements):
        return given
    if not isinstance(given, str) or given not in STRATEGIES:
        raise ConfigError(f"strategy is {given!r}, expected Placements or one of {', '.join(STRATEGIES)}")
    return STRATEGIES[given]

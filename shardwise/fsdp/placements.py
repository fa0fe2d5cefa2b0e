"""Strategies as rows of a table: where parameters, gradients and optimizer state lie.

Sources: ZeRO, arXiv 1910.02054 (stages 1 to 3); hybrid sharding, arXiv 2304.11277; state over all ranks beside hybrid
sharding ("HFSDP"), Megatron-FSDP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import Literal

from shardwise.errors import ConfigError

Placement = Literal["replicated", "sharded", "owned"]


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

"""The states of a unit and the moves between them that are legal."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.comm.communicator import Pending
from shardwise.errors import StateError
from shardwise.events import unit_in_words


@dataclass(frozen=True, slots=True)
class Sharded:
    """This rank holds its shards alone; the sharded parameters are registered."""


@dataclass(frozen=True, slots=True)
class GatherSource:
    """The shards that something was gathered from.

    Attributes:
        version: a number that changes when they are written to.
        span: the forward or backward in which they were seen to have it; None: outside of any.
    """

    version: int
    span: int | None


@dataclass(frozen=True, slots=True)
class Gathering:
    """All-gather launched; the full parameters may not be read yet."""

    source: GatherSource
    pending: tuple[Pending | None, ...]


@dataclass(frozen=True, slots=True)
class Unsharded:
    """The full parameters are registered."""

    source: GatherSource


@dataclass(frozen=True, slots=True)
class Subsharded:
    """Resharded to a smaller mesh after forward; the parameters on that mesh are registered."""

    source: GatherSource


UnitState = Sharded | Gathering | Unsharded | Subsharded

LEGAL_MOVES: frozenset[tuple[type, type]] = frozenset(
    {
        (Sharded, Gathering),
        (Subsharded, Gathering),
        (Gathering, Unsharded),
        (Gathering, Sharded),
        (Unsharded, Gathering),
        (Unsharded, Sharded),
        (Unsharded, Subsharded),
        (Subsharded, Sharded),
    }
)


def check_move(unit: str, old: UnitState, new: UnitState) -> None:
    """Raise StateError if a unit may not go from ``old`` to ``new``."""
    if (type(old), type(new)) not in LEGAL_MOVES:
        raise StateError(
            f"{unit_in_words(unit)} is {type(old).__name__} and cannot become {type(new).__name__}; "
            f"legal next states: {sorted(to.__name__ for start, to in LEGAL_MOVES if start is type(old))}"
        )

"""The order in which a step used its units, as it happened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Edge(str, Enum):
    """Which side of which part of a step."""

    ENTER_FORWARD = "enter forward"
    EXIT_FORWARD = "exit forward"
    ENTER_BACKWARD = "enter backward"
    EXIT_BACKWARD = "exit backward"  # its gradients are there
    RELEASE_BACKWARD = "release in backward"  # no gradient came
    ENTER_RECOMPUTE = "enter recompute"  # forward again, inside backward
    EXIT_RECOMPUTE = "exit recompute"


FORWARD = (Edge.ENTER_FORWARD, Edge.EXIT_FORWARD)


@dataclass(frozen=True, slots=True)
class Visit:
    """The step passed ``edge`` of unit number ``unit``."""

    unit: int
    edge: Edge


@dataclass(frozen=True, slots=True)
class ExecutionOrder:
    """All visits of one step: one forward of the root and the backward that followed it, if one did."""

    visits: tuple[Visit, ...]

    @property
    def forward(self) -> tuple[Visit, ...]:
        """The visits of the forward part."""
        return tuple(visit for visit in self.visits if visit.edge in FORWARD)

    @property
    def backward(self) -> tuple[Visit, ...]:
        """The visits of the backward part."""
        return tuple(visit for visit in self.visits if visit.edge not in FORWARD)

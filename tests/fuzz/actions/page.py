"""The text of a program as it grows, and what adds to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Page:
    """The text of a program as it grows.

    Attributes:
        params: names of the model's parameters.  units: paths of units' first modules, the root's last.
        gates: paths of modules that can be switched off.
        losses: names of variables whose graph has not been freed.  kept: names under which aliases are kept.
    """

    params: Sequence[str]
    units: Sequence[str]
    gates: Sequence[str]
    lines: list[str] = field(default_factory=list[str])
    losses: list[str] = field(default_factory=list[str])
    kept: list[str] = field(default_factory=list[str])
    handles: list[str] = field(default_factory=list[str])
    serial: int = 0

    def begin(self) -> None:
        """Start another program, in which nothing of the one before is known."""
        for names in (self.lines, self.losses, self.kept, self.handles):
            names.clear()

    def number(self) -> int:
        """Return a number that no variable has yet."""
        self.serial += 1
        return self.serial - 1

    def write(self, *lines: str) -> None:
        """Add lines."""
        self.lines += lines

    def mark(self, label: str, loss: str = "") -> None:
        """Add a moment of comparison, perhaps with a loss."""
        self.lines.append(f"yield {label!r}, {loss}" if loss else f"yield {label!r}")

    def param(self, index: int) -> str:
        """Return the name of a parameter."""
        return self.params[index % len(self.params)]

    def unit(self, index: int) -> str:
        """Return an expression for the first module of a unit."""
        return f"s.unit({self.units[index % len(self.units)]!r})"


@dataclass(frozen=True, slots=True)
class Action(ABC):
    """Something that a program does."""

    @property
    def is_engines(self) -> bool:
        """True if only the engine's APIs can do it."""
        return False

    @abstractmethod
    def write(self, page: Page) -> None:
        """Add its lines to ``page``; nothing if what it refers to is not there any more."""

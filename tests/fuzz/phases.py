"""What the text of a case defines, loaded; and which rank this is."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fuzz.case import Contender, Settings

Program = Callable[[Any], Any]
MODULE = "shardwise_fuzz_case"


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a program between restarts; ``then``: how it was saved, and the API and update that go on ("": the same)."""

    num_ranks: int
    program: Program
    then: tuple[str, str, str] | None

    def contender(self, first: Contender) -> Contender:
        """Return who carries this phase out when ``first`` has begun."""
        if self.then is None or not self.then[1]:
            return first
        return Contender(self.then[1], first.transport, self.then[2])


@dataclass(frozen=True, slots=True)
class Play:
    """The text of a case, loaded.

    Attributes:
        build: makes the whole, plain model; ``make``: without values.
        units: paths of the modules of each unit, in the order of sharding.
    """

    seed: int
    settings: Settings
    build: Callable[[], nn.Module]
    units: tuple[tuple[str, ...], ...]
    phases: tuple[Phase, ...]
    contenders: tuple[Contender, ...]
    make: Callable[[], nn.Module] | None = None

    @classmethod
    def load(cls, text: str, name: str = "<case>") -> Play:
        """Run the text of :func:`fuzz.render.render` and take out what it defines."""
        module = types.ModuleType(MODULE)
        sys.modules[MODULE] = module  # where dataclasses and pickle look for what the text defines
        names = module.__dict__
        exec(compile(text, name, "exec"), names)
        make = names["make"]
        phases = tuple(Phase(*phase) for phase in names["PHASES"])
        contenders = tuple(names["CONTENDERS"])
        return cls(names["SEED"], names["SETTINGS"], names["build"], tuple(names["UNITS"]), phases, contenders, make)


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank this is.

    Attributes:
        data_rank, num_data_ranks: among those that have batches of their own; ranks that share heads share batches.
    """

    rank: int
    num_ranks: int
    data_rank: int
    num_data_ranks: int

    @classmethod
    def of(cls, rank: int, num_ranks: int, mesh: str) -> Seat:
        """Return the seat of ``rank`` on a mesh that :class:`Settings` names."""
        shared = 2 if mesh == "tensor" else 1
        return cls(rank, num_ranks, rank // shared, num_ranks // shared)

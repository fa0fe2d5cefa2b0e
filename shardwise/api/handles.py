"""What a sharded module returns for work that is under way: handles to wait on."""

from __future__ import annotations

from shardwise.engine.by_hand import complete
from shardwise.engine.engine import Engine, engine_of
from shardwise.units.unit import Unit


class UnshardHandle:
    """A launched unshard."""

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Make the full parameters readable on the current stream and register them; a second call does nothing."""
        unit, self._unit = self._unit, None
        if unit is not None:
            wait_by_hand(unit)


def wait_by_hand(unit: Unit) -> None:
    """Make the full parameters of ``unit`` readable, as the user's own call of ``unshard`` does outside of a forward."""
    unit.wait()
    engine = engine_of(unit)
    if engine is None or engine.means.spans.number is None:
        unit.keep()  # what user code now does with parameters is to hold for the shards


class GradientReductionHandle:
    """Launched reductions whose gradients are not set yet."""

    def __init__(self, engine: Engine | None = None, completion: object | None = None) -> None:
        self._engine, self._completion = engine, completion

    def wait(self) -> None:
        """Wait for the reductions and set the gradients; a second call does nothing.

        Raises: StateError if ``reset_iter_state`` has dropped them.
        """
        if self._engine is not None and self._completion is not None:
            complete(self._engine, self._completion)
        self._engine = self._completion = None

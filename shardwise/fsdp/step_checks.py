"""The events of a root that checks of user programs listen to; the checks themselves are in ``shardwise.checks``."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.user_writes import Written


class StepChecks:
    """Checks nothing: the checks of an engine before its root's first forward.

    Attributes:
        is_on: checks that cost more than a comparison of lists are made in the running pass.
    """

    is_on = False

    def begin_forward(self) -> None:
        """A forward of the root begins."""

    def see_change(self) -> None:
        """User code has changed parameters since the last pass, as the comparison of ``Snapshot`` shows."""

    def end_unit(self, groups: Sequence[ParamGroup]) -> None:
        """The forward of a unit has ended, whose full parameters are still registered; called while ``is_on``."""

    def use_again(self, name: str, groups: Sequence[ParamGroup]) -> None:
        """Unit ``name`` begins another pass with the full parameters that it has; called while ``is_on``."""

    def see_writes(self, number: int, written: Written) -> None:
        """The forward of unit ``number`` has written to parameters."""

    def end_backward(self) -> None:
        """Gradients have been set: all ranks have finished their forwards."""

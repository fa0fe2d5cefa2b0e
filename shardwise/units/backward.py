"""How far the backward of a unit has come: its stage, the gradients that are there, the passes that are open."""

from __future__ import annotations

from enum import Enum

from shardwise import torch_private
from shardwise.errors import StateError


class Stage(Enum):
    """What a unit knows of a backward."""

    IDLE = "idle"  # none runs, or it has not come to the unit, or it has left it
    ARRIVING = (
        "arriving"  # gradients come before its outputs' have: of weights that it lends, or of used parameters alone
    )
    RUNNING = "running"  # the gradient of an output has come: parameters are read


LEGAL_STEPS: frozenset[tuple[Stage, Stage]] = frozenset(
    {
        (Stage.IDLE, Stage.ARRIVING),
        (Stage.IDLE, Stage.RUNNING),
        (Stage.ARRIVING, Stage.RUNNING),
        (Stage.ARRIVING, Stage.IDLE),
        (Stage.RUNNING, Stage.IDLE),
    }
)


class UnitBackward:
    """The backward of one unit.  Whoever reads may read the attributes; the methods alone write them.

    Attributes:
        stage: one arrow of the table above is one method.
        task: the autograd task in which it has begun.
        arrived: ordinals of the parameters whose gradient has come.
        num_expected: how many parameters want one.  num_frozen: how many do not.
        open_passes: passes through the unit's modules that it has come to and not left.
        is_nested: gradients have come from a backward within it: they tell nothing of what is still to come.
        counts: the last gradient ends it.  Where checkpoints run backwards of their own, which may use the parameters
            again, that is so once a first backward has shown that they do not.
        ended_late: the last one ended without some gradient, at the end of the whole backward.
    """

    def __init__(self) -> None:
        self.stage = Stage.IDLE
        self.task = -1
        self.arrived: set[int] = set()
        self.num_expected = 0
        self.num_frozen = 0
        self.open_passes: set[object] = set()
        self.is_nested = False
        self.counts = True
        self.ended_late = False

    def _step(self, new: Stage) -> None:
        if (self.stage, new) not in LEGAL_STEPS:
            raise StateError(f"the backward of a unit is {self.stage.value} and cannot become {new.value}")
        self.stage = new

    def expect(self, num_trainable: int, num_frozen: int) -> None:
        """Wait for the gradients of ``num_trainable`` parameters."""
        self.num_expected, self.num_frozen = num_trainable, num_frozen

    def enter(self, task: int) -> None:
        """The gradient of an output has come, in autograd's ``task``."""
        if self.stage is not Stage.RUNNING:  # a second time where somebody has resharded the unit by hand
            self._step(Stage.RUNNING)
        self.task = task

    def arrive(self, ordinal: int) -> bool:
        """Take note of one gradient; return False if nothing follows from it yet."""
        self.arrived.add(ordinal)
        if self.stage is not Stage.RUNNING:
            if self.stage is Stage.IDLE:
                self._step(Stage.ARRIVING)
            return True
        if self.task != torch_private.graph_task_id():
            self.is_nested = True  # a checkpoint within the unit runs a backward of its own: others may follow
        return not self.is_nested and len(self.arrived) >= self.num_expected

    def note_nested(self) -> None:
        """What has come is of a weight that the unit lends, from a checkpoint's own backward: there may be more."""
        self.is_nested = True

    @property
    def is_complete(self) -> bool:
        """True when every parameter has its gradient: then backward reads none of them any more.

        A frozen parameter may still be read after the last gradient has come; its unit ends at its inputs.
        """
        is_there = len(self.arrived) >= self.num_expected > 0
        return is_there and self.counts and not self.num_frozen and not self.is_nested

    def leave(self, ended_late: bool = False) -> None:
        """The unit's part of the backward is over, and its gradients are taken."""
        if self.arrived:
            self.counts = not self.is_nested
        self.ended_late = self.ended_late or ended_late
        self.forget()

    def forget(self) -> None:
        """Be without a backward, as after one that has failed."""
        self.arrived.clear()
        self.open_passes.clear()
        self.is_nested = False
        if self.stage is not Stage.IDLE:
            self._step(Stage.IDLE)

    def distrust_counts(self) -> None:
        """Do not let the last gradient end it until one has shown which gradients are the last."""
        self.counts = False

"""How far the backward of a unit has come: its stage, the gradients that are there, the passes that are open."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum

import torch

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.units.early_buckets import EarlyBuckets
from shardwise.units.param import UnitParam


class Stage(Enum):
    """What a unit knows of a backward."""

    IDLE = "idle"  # none runs, or it has not come to the unit, or it has left it
    ARRIVING = (
        "arriving"  # gradients come before its outputs' have: of weights that it lends, or of used parameters alone
    )
    RUNNING = "running"  # the gradient of an output has come: parameters are read

    __hash__ = object.__hash__  # Enum's own is Python, and stages are looked up at every step


LEGAL_STEPS: frozenset[tuple[Stage, Stage]] = frozenset(
    {
        (Stage.IDLE, Stage.ARRIVING),
        (Stage.IDLE, Stage.RUNNING),
        (Stage.ARRIVING, Stage.RUNNING),
        (Stage.ARRIVING, Stage.IDLE),
        (Stage.RUNNING, Stage.IDLE),
    }
)


def _nobody() -> None:
    return None


class UnitBackward:
    """The backward of one unit.  Whoever reads may read the attributes; the methods alone write them.

    Attributes:
        on_gradients: what is called when one has come from which something may follow.
        stage: one arrow of the table above is one method.
        task: the autograd task in which it began; with nested backwards, the last one.
        arrived: ordinals of the parameters whose gradient has come.
        counted: how many parameters want one, and how many there are.  has_frozen: some want none.
        open_passes: passes through the unit's modules that it has come to and not left.
        is_nested: gradients have come from a backward within it: they tell nothing of what is still to come.
        comes_again: this backward used the unit again after its end in a nested one, or produced a gradient twice.
        came_again: ``comes_again`` of the last backward that produced gradients.
        ended_in: the outermost autograd task of the backward in which the unit ended with a nested one.
        counts: the last gradient ends it.  Where checkpoints run backwards of their own, which may use the parameters
            again, that is so once a first backward has shown that they do not.
        ended_late: the last one ended without some gradient, at the end of the whole backward.
        early: what may be sent before it ends; None: nothing.
        owes_weights: one came without any: those of the weights may be computed apart, as stages of pipelines do.
        keeps_for_graph: one ran with ``create_graph=True``: the graph of that backward reads the parameters, so they stay full
            until a backward without it has ended.
        is_unseen: the last forward has returned no tensor whose gradient would tell that backward comes to the unit, so that
            its parameters stay full.
        first: the parameter whose gradient came before anybody knew that backward has begun.
        has_lost_weights: one of these began before the parameters were full, so that nobody can know which they are.
    """

    def __init__(self) -> None:
        self.on_gradients: Callable[[], None] = _nobody
        self.stage = Stage.IDLE
        self.task = -1
        self.arrived: set[int] = set()
        self.counted = (0, 0)
        self.has_frozen = False
        self.open_passes: set[object] = set()
        self.is_nested = self.comes_again = self.came_again = False
        self.ended_in = -1
        self.counts = True
        self.ended_late = False
        self.owes_weights = self.has_lost_weights = False
        self.keeps_for_graph = False
        self.is_unseen = False
        self.first: int | None = None
        self.early: EarlyBuckets | None = None
        self._began_full = True

    @property
    def expects_any(self) -> bool:
        """True if parameters want gradients."""
        return self.counted[0] > 0

    def _step(self, new: Stage) -> None:
        if (self.stage, new) not in LEGAL_STEPS:
            raise StateError(f"the backward of a unit is {self.stage.value} and cannot become {new.value}")
        self.stage = new

    def expect(self, num_trainable: int, num_params: int) -> None:
        """Wait for the gradients of ``num_trainable`` of ``num_params`` parameters."""
        self.counted = (num_trainable, num_params)
        self.has_frozen = num_trainable < num_params

    def enter(self, task: int, is_full: bool = True, whole: int = -1) -> None:
        """The gradient of an output has come, in autograd's ``task``; ``is_full``: its parameters are there.

        ``whole``: the outermost task, which may have used the unit before, in another nested backward.
        """
        if self.stage is not Stage.RUNNING:  # a second time where somebody has resharded the unit by hand
            self._step(Stage.RUNNING)
            self._began_full = is_full
            self.comes_again = self.comes_again or self.ended_in == whole != -1
        self.task = task

    def hook(self, param: UnitParam) -> Callable[[torch.Tensor], None]:
        """Return what the full form of ``param`` runs when its gradient has been accumulated."""
        # Through a weak reference: the full parameter owns the hook, and the unit owns the full parameter.
        this, ordinal, running, task_id = weakref.ref(self), param.ordinal, Stage.RUNNING, torch_private.graph_task_id

        def on_accumulated(_: torch.Tensor) -> None:
            backward = this()
            if backward is None:
                return
            arrived, early = backward.arrived, backward.early
            if ordinal in arrived:
                backward.comes_again = True
            arrived.add(ordinal)
            if backward.stage is running:
                if backward.task != task_id():
                    backward.is_nested = True  # a checkpoint within the unit runs its own: others may follow
                is_bucket = early is not None and early.come(ordinal)
                if backward.is_nested or (len(arrived) < backward.counted[0] and not is_bucket):
                    return  # the engine knows of this backward, and nothing is complete
            elif backward.stage is Stage.IDLE:
                backward.first = ordinal
                backward._step(Stage.ARRIVING)
            backward.on_gradients()

        return on_accumulated

    def send_early(self, early: EarlyBuckets | None) -> None:
        """Let ``early`` be sent before it ends, as far as they have come; None: nothing."""
        self.early = early
        if early is not None:
            early.begin()

    def note_nested(self) -> None:
        """What has come is of a weight that the unit lends, from a checkpoint's own backward: there may be more."""
        self.is_nested = True

    @property
    def is_complete(self) -> bool:
        """True when every parameter has its gradient: then backward reads none of them any more.

        A frozen parameter may still be read after the last gradient has come; its unit ends at its inputs.
        """
        is_there = len(self.arrived) >= self.counted[0] > 0
        return is_there and self.counts and not self.has_frozen and not self.is_nested

    def ends_with(self, task: int, is_one_module: bool) -> bool:
        """Return True if it ends with the nested backward ``task``; if it has several modules, some may be recomputed later."""
        if self.stage is not Stage.RUNNING or self.task != task or self.comes_again or self.came_again:
            return False
        return is_one_module or len(self.arrived) >= self.counted[0] > 0

    def leave(self, ended_late: bool = False, is_kept: bool = False) -> None:
        """The unit's part of the backward is over, and its gradients are taken; ``is_kept``: its parameters stay full."""
        if self.arrived:
            self.came_again = self.comes_again
            self.counts = not (self.is_nested or self.comes_again)
        self.ended_late = self.ended_late or ended_late
        if self.stage is Stage.RUNNING:
            brought_none = self.expects_any and not self.arrived
            self.owes_weights = self.owes_weights or brought_none
            if brought_none and is_kept and not self._began_full:
                self.has_lost_weights = True
        self.forget()

    def forget(self) -> None:
        """Be without a backward, as after one that has failed."""
        self.arrived.clear()
        self.open_passes.clear()
        self.is_nested = self.comes_again = False
        self.early = self.first = None
        if self.stage is not Stage.IDLE:
            self._step(Stage.IDLE)

    def distrust_counts(self) -> None:
        """Do not let the last gradient end it until one has shown which gradients are the last."""
        self.counts = False

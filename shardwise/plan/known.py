"""The plans of the last steps: a step whose order is known needs no new plan, and may tell which order comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.plan.schedule import ExecutionOrder, OrderEntry, PrefetchBudget, StepPlan, UnitPolicy

_MOST = 16
MadeFrom = tuple[PrefetchBudget, tuple[UnitPolicy, ...]]


@dataclass(slots=True, eq=False)
class KnownPlan:
    """A plan; ``made_from``: what it depends on besides the order; ``then``: that of the step that came next last time."""

    plan: StepPlan
    made_from: MadeFrom
    then: KnownPlan | None = None


class KnownPlans:
    """At most 16 plans, so that a model of many orders (stochastic depth) keeps few of them."""

    def __init__(self) -> None:
        self._known: list[KnownPlan] = []  # the newest last
        self._last: KnownPlan | None = None  # that of the last step

    def find(self, order: ExecutionOrder, made_from: MadeFrom, likely: StepPlan | None) -> KnownPlan | None:
        """Return the plan of ``order``; ``likely`` is compared first, which is fast where the order has its entries."""
        if likely is not None and likely.order != order:
            likely = None
        found = (each for each in self._known if each.made_from == made_from)
        return next((each for each in found if each.plan is likely or (not likely and each.plan.order == order)), None)

    def find_branch(self, begun: Sequence[OrderEntry], made_from: MadeFrom) -> KnownPlan | None:
        """Return the newest plan that begins with the entries ``begun``."""
        found = (each for each in reversed(self._known) if each.made_from == made_from)
        return next((each for each in found if each.plan.order.entries[: len(begun)] == tuple(begun)), None)

    def add(self, plan: StepPlan, made_from: MadeFrom) -> KnownPlan:
        """Keep a plan, in place of the oldest one if there are too many."""
        self._known = [*self._known[1 - _MOST :], KnownPlan(plan, made_from)]
        return self._known[-1]

    def end_step(self, known: KnownPlan) -> KnownPlan:
        """Return the plan of the next step after one of the plan ``known``: what came next last time, or the same."""
        if self._last is not None:
            self._last.then = known
        self._last, then = known, known.then
        return then if then is not None and then.made_from == known.made_from else known

    def forget_last(self) -> None:
        """Forget which step was the last: it has failed, and other ranks may have ended it."""
        self._last = None

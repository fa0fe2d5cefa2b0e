"""The execution order of a step, compared with the plan of an earlier one and with the other ranks.

FSDP2 prefetches in the order of the last forward's units.  That is not enough here: prefetches may reach further than one unit,
a model may take several orders in turn, and ranks whose orders differ would pair collectives of different units, which hangs or
silently mixes tensors.  So a step is recorded, a pure function makes a plan of the record, and ranks compare the plans once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from shardwise.consistency.agreement import MismatchCheck
from shardwise.consistency.failure_report import concerns_others
from shardwise.fsdp.gradients import planned_scatter_bytes
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.unit import Unit
from shardwise.observe import Op, begin, end, listeners, next_track, now, remember, thread, unit_in_words
from shardwise.plan.schedule import (
    KnownPlans,
    MadeFrom,
    OrderEntry,
    PrefetchBudget,
    StepEvent,
    StepPlan,
    UnitFacts,
    forward_of,
    in_module_order,
    plan_step,
)

_MOST_AGREED = 1024  # sets of parameters whose reduction ranks have compared
_MOST_SHOWN = 4  # of the last events, in errors


class ExecOrderTracker:
    """The execution order of the running step, and the plan that was made from an earlier step.

    Attributes:
        plan: the prediction of the step; None until a step has shown its order.  known: it, and those of earlier steps.
        budget: the limit on prefetched units.
        track: the events of units, in order.
        mismatch_check: compares plans between ranks, and exchanges positions when a collective fails; None on a single rank.
        agreed: sets of parameters whose gradients may be reduced together; the ranks have agreed on each set.
        gathers: forward takes collectives.  If not, a rank may run a forward, or a backward without sync, alone, so ranks
            compare their order only when gradients are reduced.
        uncompared: how this rank has deviated from the plan, if it was not compared with the other ranks yet; else "".
        units: the units, by number.
        is_aside: a forward runs that takes no collective, so it is part of no step.
        diverges: ranks may take different ways, so they do not compare theirs.
    """

    def __init__(self) -> None:
        self.plan: StepPlan | None = None
        self.budget = PrefetchBudget()
        self.track = next_track("engine")
        self.mismatch_check: MismatchCheck | None = None
        self.agreed: set[frozenset[ShardedParam]] = set()
        self.units: Sequence[Unit] = ()
        self.gathers = True
        self.diverges = self.is_aside = self._follows_plan = False
        self.uncompared = self._left_order = ""
        self._prefetches: list[list[Unit]] = []  # for each entry of the plan, the units to prefetch
        # ``record`` alone appends, on the thread whose forward or backward reaches the event: one pass runs at a time.
        self._entries: list[OrderEntry] = []
        self.known = KnownPlans()
        self._num_left = 0  # how often the running step has left its plan

    def adopt(self, units: Sequence[Unit]) -> None:
        """Track ``units`` from now on; ``units[i]`` is number i."""
        self.units = units
        for number, unit in enumerate(units):
            unit.number, unit.track = number, self.track
        self.gathers = any(unit.memory.is_collective for unit in units)
        self.plan, self.known, self.agreed = None, KnownPlans(), set()

    # ---- events ----

    def explain(self, error: RuntimeError, where: str) -> NoReturn:
        """Raise ``error`` with the position of every rank that can be reached; as it is, if it is of this rank alone."""
        if self.mismatch_check is None or not concerns_others(error):
            raise error
        events = self.track.recent(_MOST_SHOWN)
        recent = [f"{event} of {unit_in_words(unit)}" for event, unit in events] or ["no event yet"]
        before = f", after {', '.join(recent[:-1])}" if len(recent) > 1 else ""
        position = f"event {self.track.count}: {recent[-1]}{before} (waiting for {where})"
        raise self.mismatch_check.explain(error, position) from error

    # ---- order ----

    def begin(self, aside: bool = False) -> None:
        """Start a step; ``aside``: an evaluation, possibly on this rank only, within a step that continues after it."""
        self.is_aside = aside
        if not aside:
            self._entries = []
            self._follows_plan = self.diverges or self.plan is not None
            self.uncompared, self._num_left = "", 0

    def forget(self) -> None:
        """Drop the order of a failed step."""
        self.begin()
        self._follows_plan = False
        self.known.forget_last()

    def record(self, unit: Unit, event: StepEvent) -> Sequence[Unit]:
        """Record that ``unit`` reaches ``event``, before the engine acts on it.

        Returns: the units to prefetch right after.
        Raises: DesyncError if this deviates from the plan and other ranks do not deviate in the same way.
        """
        number, track = unit.number, self.track
        track.count += 1
        remember((now(), thread(), track.name, track.count, event, unit.name))
        if listeners:
            verb, _, what = event.value.partition(" ")
            (begin if verb == "enter" else end)(track.name, what.removeprefix("in "), unit.name)
        if self.is_aside:  # other ranks may run no such forward: it is no part of what they compare
            return ()
        position = len(self._entries)
        if not self._follows_plan or self.plan is None:
            self._entries.append(OrderEntry(number, event))
            return ()
        expected = self.plan.order
        if position < len(expected):
            planned = expected[position]
            if planned.unit == number and planned.event is event:
                self._entries.append(planned)  # the plan's own entry: making one per event would cost time
                return self._prefetches[position]
        if self.diverges:
            # Follow the plan from where this entry comes next; if it does not, from where this rank was.
            entry = OrderEntry(number, event)
            if entry not in expected[position:]:
                return ()
            position = expected.index(entry, position)
            self._entries = list(expected[: position + 1])
            return self._prefetches[position]
        self._entries.append(OrderEntry(number, event))
        name = self.units[expected[position].unit].name if position < len(expected) else "end of step"
        self._left_order = f"expected {unit_in_words(name)}, found {unit_in_words(unit.name)}"
        self._num_left += 1
        if self._num_left == 1 or not self.gathers:
            self.uncompared = f"{self._left_order} to {event.value}"
        # Before the collective that follows: ranks which deviate in different ways would hang in it.  If this step goes on by
        # another plan and leaves that, too, its end compares all of it.
        if self.gathers and self.uncompared:
            self.compare_deviation()
        branch = self.known.find_branch(self._entries, self._made_from())
        self._follows_plan = branch is not None
        if branch is None:
            return ()
        self._take(branch.plan)
        return self._prefetches[position]

    def compare_deviation(self) -> None:
        """Compare this rank's deviation from the plan with the other ranks.  Raises: DesyncError if they differ."""
        uncompared, self.uncompared = self.uncompared, ""
        if self.mismatch_check is not None:
            self.mismatch_check.check_deviation(uncompared)

    def agree_on_gradients(self, unit: Unit, params: frozenset[ShardedParam]) -> None:
        """Compare the parameters of a reduction between ranks, unless the transport compares them in every message.

        The first call compares the trainable parameters of all units, so that most runs compare only once.

        Raises: DesyncError on every rank if ranks differ.
        """
        if len(self.agreed) > _MOST_AGREED:  # gradients of ever other parameters; all ranks have added the same
            self.agreed.clear()
        if self.mismatch_check is not None and not unit.compares_reductions:
            if not self.agreed:
                self.compare_parameters()
                for each in self.units:
                    self.agreed.add(frozenset([param for param in each.params if param.sharded.requires_grad]))
            if params not in self.agreed:
                what = f"gradients of {unit_in_words(unit.name)}"
                facts = [_fact_of(param) for param in unit.params if param in params]
                self.mismatch_check.check_facts(what, facts)
        self.agreed.add(params)

    def compare_parameters(self) -> None:
        """Compare the parameters of all units between ranks.  Raises: DesyncError on every rank if ranks differ."""
        if self.mismatch_check is not None:
            facts = [_fact_of(param) for each in self.units for param in each.params]
            self.mismatch_check.check_facts("parameters", facts)

    def has_planned_forward(self) -> bool:
        """Return True if the entries so far are the forward part of the plan."""
        return self.plan is not None and forward_of(self.plan.order) == tuple(self._entries)

    def replan(self) -> None:
        """Plan the next step like the one that has followed this order last time, or else like this one.

        Raises: DesyncError if ranks would plan different collectives.
        """
        order = tuple(self._entries)
        known = self.known.find(order, self._made_from(), self.plan)
        if known is None:
            known = self.known.add(plan_step(order, self.facts(), self.budget))
            self._agree_on(known.plan)
        elif self._num_left > 1 and self.gathers:
            self._agree_on(known.plan)
        # Orders in turn (two heads): what followed this order last time is the better guess than this order again.
        self._left_order, following = "", self.known.end_step(known)
        if following.plan is not self.plan:
            self._take(following.plan)

    def _agree_on(self, plan: StepPlan) -> None:
        if self.mismatch_check is not None:
            apart = {u.name for u in self.units if u.settings.axes.num_replicas > 1 and not u.policy.syncs_replicas}
            calls = [call for call in plan.calls if call.op in (Op.UNSHARD, Op.REDUCE)]
            alone = [" without its replicas" if c.op is Op.REDUCE and c.unit in apart else "" for c in calls]
            shown = [f"{c.op.value} of {unit_in_words(c.unit)}{each}" for c, each in zip(calls, alone, strict=True)]
            self.mismatch_check.check_plan(shown, self._left_order, again=self._num_left > 1 and self.gathers)

    def _made_from(self) -> MadeFrom:
        return self.budget, tuple([unit.policy for unit in self.units])

    def _take(self, plan: StepPlan) -> StepPlan:
        self.plan = plan
        self._prefetches = [[self.units[number] for number in numbers] for numbers in plan.prefetches]
        return plan

    def allow_divergence(self, is_allowed: bool) -> None:
        """Set whether ranks may take different ways; forget the plan, and on what this rank has agreed in its own way."""
        self.diverges, self.plan, self.uncompared, self.known = is_allowed, None, "", KnownPlans()
        self.agreed.clear()

    def plan_in_order(self) -> StepPlan:
        """Return the plan of ranks that may take different ways: units as their modules lie in the root, all with sync."""
        policies = tuple([replace(unit.policy, sync=True, syncs_replicas=True) for unit in self.units])
        if self.plan is not None and self.plan.made_from == (self.budget, policies):
            return self.plan
        facts = [replace(each, policy=policy) for each, policy in zip(self.facts(), policies, strict=True)]
        return self._take(plan_step(in_module_order(len(facts)), facts, self.budget))

    def facts(self) -> tuple[UnitFacts, ...]:
        """Return the inputs of planning, one per unit."""
        return tuple([self._facts_of(unit) for unit in self.units])

    def _facts_of(self, unit: Unit) -> UnitFacts:
        num_bytes, in_place = unit.gather_staging
        sizes, asked = (num_bytes, in_place, unit.full_bytes, planned_scatter_bytes(unit)), unit.settings
        tied, beside = (tuple([other.number for other in each]) for each in (unit.tied_units, unit.beside))
        explicit = map(self._numbers_of, (asked.forward_prefetch, asked.backward_prefetch))
        return UnitFacts(unit.name, unit.policy, *sizes, tied, beside, *explicit)

    def _numbers_of(self, refs: list[weakref.ref[Unit]] | None) -> tuple[int, ...] | None:
        return None if refs is None else tuple([unit.number for ref in refs if (unit := ref()) in self.units and unit])


def _fact_of(param: ShardedParam) -> str:
    """Return the properties of a parameter that must be the same on all ranks, for the reduction of its gradient."""
    kind = "" if param.sharded.requires_grad else ", frozen"
    return f"{param.fqn} of shape {tuple(param.sharded.shape)}, {param.dtype}{kind}"

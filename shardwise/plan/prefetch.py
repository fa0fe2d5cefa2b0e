"""Predict a step: every call in order, and what to unshard ahead.  Pure; no function takes a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwise.events import Call, Op
from shardwise.plan.buckets import Sharing, UnitBucket, form_buckets
from shardwise.plan.memory import peak_bytes
from shardwise.plan.policy import UnitPolicy
from shardwise.plan.visits import Edge, ExecutionOrder

_TRIES = 4  # until a plan stays within its bytes; each time with less, by what the last one was above


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What planning needs to know of a unit.

    Attributes:
        name: path of its module in the root.
        policy: its behaviour.
        gather_bytes: what its launched all-gather holds.  in_place: its full parameters are among these.
        full_bytes: its full parameters.  reduce_bytes: staging of its reduction.
        route: how its parameters travel, for readers of the plan.
        borrows: units whose parameters its modules use too (weights tied across units).
        forward_prefetch, backward_prefetch: units that the user wants unsharded when this one starts; None: the plan's.
        sharing: by what its gradients share a bucket with those of others; None: they do not.
    """

    name: str
    policy: UnitPolicy = field(default_factory=UnitPolicy)
    gather_bytes: int = 0
    in_place: bool = False
    full_bytes: int = 0
    reduce_bytes: int = 0
    route: str = ""
    borrows: tuple[int, ...] = ()
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    sharing: Sharing | None = None


@dataclass(frozen=True, slots=True)
class PrefetchBudget:
    """How far ahead of their use units may be unsharded.

    Attributes:
        depth: so many units in any case.
        num_bytes: more, as long as full parameters and staging stay within so much; at least what ``depth`` holds at its
            highest point.  None: no more.
        max_reductions: inputs of reductions that may live at once.
    """

    depth: int = 1
    num_bytes: int | None = None
    max_reductions: int = 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A predicted step.

    Attributes:
        order: the visits it was made for.
        calls: what the engine will do, in order.
        ahead: for each visit, the units to unshard right after it.
        routes: how the parameters of each unit travel: (unit, "shared memory" | "send/recv" | "collectives").
        starts: for each visit, how many calls come before those that it makes; last, how many come before the commits.
        ahead_bytes: what full parameters and staging stay within, if units are unsharded ahead by bytes; else None.
        buckets: units whose gradients are all-reduced together, in the order in which that happens.
    """

    order: ExecutionOrder
    calls: tuple[Call, ...]
    ahead: tuple[tuple[int, ...], ...]
    routes: tuple[tuple[str, str], ...] = ()
    starts: tuple[int, ...] = ()
    ahead_bytes: int | None = None
    buckets: tuple[UnitBucket, ...] = ()


class _Simulation:
    """Units as the engine would have them, one visit after another."""

    def __init__(self, order: ExecutionOrder, units: Sequence[UnitFacts], room: PrefetchBudget) -> None:
        self.order = order
        self.units = units
        self.room = room
        self.most_staged = room.max_reductions * max((facts.reduce_bytes for facts in units), default=0)
        self.calls: list[Call] = []
        self.ahead: list[tuple[int, ...]] = []
        self.starts: list[int] = []
        self.is_gathering: set[int] = set()
        self.is_full: set[int] = set()
        self.holders = [0] * len(units)
        self.in_backward: set[int] = set()
        self.reduced: list[int] = []

    def call(self, op: Op, unit: int, num_bytes: int = 0, in_place: bool = False) -> None:
        self.calls.append(Call(op, self.units[unit].name, num_bytes, in_place))

    def unshard(self, unit: int) -> None:
        if unit not in self.is_full and unit not in self.is_gathering:
            self.is_gathering.add(unit)
            facts = self.units[unit]
            self.call(Op.UNSHARD, unit, facts.gather_bytes, facts.in_place)

    def need(self, unit: int) -> None:
        self.unshard(unit)
        if unit in self.is_gathering:
            self.is_gathering.discard(unit)
            self.is_full.add(unit)
            self.call(Op.WAIT, unit, self.units[unit].full_bytes)

    def reshard(self, unit: int) -> None:
        if unit in self.is_full:
            self.is_full.discard(unit)
            self.call(Op.RESHARD, unit, self.units[unit].full_bytes)

    def upcoming(self, position: int, edge: Edge) -> list[int]:
        """Return the next units that pass ``edge`` and are not full, as many as there is room for."""
        found: list[int] = []
        for visit in self.order.visits[position + 1 :]:
            is_enough = len(found) >= self.room.depth and self.room.num_bytes is None
            if is_enough or (edge is Edge.ENTER_FORWARD and visit.edge is Edge.ENTER_BACKWARD):
                break
            if visit.edge is not edge or visit.unit in self.is_full or visit.unit in found:
                continue
            if edge is Edge.ENTER_FORWARD or self.units[visit.unit].policy.unshard_in_backward:
                if len(found) >= self.room.depth and not self.has_room([*found, visit.unit], edge):
                    break
                found.append(visit.unit)
        return found

    def has_room(self, ahead: Sequence[int], edge: Edge) -> bool:
        """Return True if nothing exceeds the room once ``ahead`` are full beside what is full now."""
        held = sum(self.units[unit].full_bytes for unit in self.is_full)
        for unit in self.is_gathering.union(ahead):
            facts = self.units[unit]
            held += facts.gather_bytes + (0 if facts.in_place else facts.full_bytes)
        return held + self.most_staged * (edge is Edge.ENTER_BACKWARD) <= (self.room.num_bytes or 0)

    def run_ahead(self, position: int, explicit: tuple[int, ...] | None, edge: Edge) -> None:
        chosen: list[int] = []
        if explicit is not None:
            chosen = [unit for unit in explicit if unit not in self.is_full and unit not in self.is_gathering]
        else:
            for unit in self.upcoming(position, edge):
                if unit not in self.is_gathering:
                    chosen.append(unit)
        for unit in chosen:
            self.unshard(unit)
        self.ahead[position] = tuple(chosen)

    def run(self) -> None:
        self.ahead = [()] * len(self.order.visits)
        for position, visit in enumerate(self.order.visits):
            self.starts.append(len(self.calls))
            self.visit(position, visit.unit, visit.edge)
        self.starts.append(len(self.calls))
        for unit in self.reduced:
            self.call(Op.COMMIT, unit)

    def visit(self, position: int, unit: int, edge: Edge) -> None:
        facts = self.units[unit]
        family = (unit, *facts.borrows)
        if edge is Edge.ENTER_FORWARD:
            for member in family:
                self.holders[member] += 1
                self.need(member)
            self.run_ahead(position, facts.forward_prefetch, edge)
        elif edge is Edge.EXIT_FORWARD:
            for member in family:
                self.holders[member] -= 1
                if not self.holders[member] and self.units[member].policy.reshard_after_forward is not False:
                    self.reshard(member)
        elif edge is Edge.ENTER_BACKWARD:
            self.in_backward.add(unit)
            if facts.policy.unshard_in_backward:
                for member in family:
                    self.need(member)
            self.run_ahead(position, facts.backward_prefetch, edge)
        elif edge is Edge.EXIT_BACKWARD:
            self.exit_backward(unit, has_gradients=True)
        elif edge is Edge.RELEASE_BACKWARD:
            self.exit_backward(unit, has_gradients=False)
        elif edge is Edge.ENTER_RECOMPUTE:
            for member in family:
                self.need(member)
        elif facts.policy.reshard_after_forward is not False and not self.is_read_in_backward(unit):
            self.reshard(unit)

    def is_read_in_backward(self, unit: int) -> bool:
        return any(unit == reader or unit in self.units[reader].borrows for reader in self.in_backward)

    def exit_backward(self, unit: int, has_gradients: bool) -> None:
        facts = self.units[unit]
        self.in_backward.discard(unit)
        if facts.policy.reshard_after_backward:
            self.reshard(unit)
        if not has_gradients:
            return
        if facts.policy.sync:
            self.call(Op.REDUCE, unit, facts.reduce_bytes)
            self.reduced.append(unit)
        else:
            self.call(Op.HOLD, unit)


def plan_step(order: ExecutionOrder, units: Sequence[UnitFacts], room: PrefetchBudget = PrefetchBudget()) -> StepPlan:
    """Predict the step that visits ``units`` in ``order``.

    Args:
        order: the visits, as recorded in an earlier step.
        units: facts of every unit, by number.
        room: how far ahead of their use they may be unsharded.
    """
    plan = _simulated(order, units, replace(room, num_bytes=None))
    if room.num_bytes is None:
        return plan
    bound = limit = max(room.num_bytes, peak_bytes(plan.calls, room.max_reductions))
    for _ in range(_TRIES):
        found = _simulated(order, units, replace(room, num_bytes=limit))
        peak = peak_bytes(found.calls, room.max_reductions)
        if peak <= bound:
            return replace(found, ahead_bytes=bound)
        limit -= peak - bound
    return replace(plan, ahead_bytes=bound)


def _simulated(order: ExecutionOrder, units: Sequence[UnitFacts], room: PrefetchBudget) -> StepPlan:
    simulation = _Simulation(order, units, room)
    simulation.run()
    routes = tuple((facts.name, facts.route) for facts in units if facts.route)
    buckets = form_buckets(order, [facts.sharing for facts in units])
    return StepPlan(
        order, tuple(simulation.calls), tuple(simulation.ahead), routes, tuple(simulation.starts), buckets=buckets
    )

"""The step of a profile as the engine would take it with some units: visits, and the calls that follow from each mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.events import Call
from shardwise.plan.prefetch import PrefetchBudget, StepPlan, plan_step
from shardwise.plan.visits import Edge, ExecutionOrder, Visit
from shardwise.planner.profile import Profile, StepMark, Stretch
from shardwise.planner.rank_units import RankUnit


@dataclass(frozen=True, slots=True)
class Passage:
    """A mark of the profile and what the engine does there.

    Attributes:
        stretch: what is computed after it.
        calls: of the engine, at the mark.
        unit: number of the unit of the mark.
        ends: the backward of the unit ends here: its last gradient has come.
    """

    stretch: Stretch
    calls: tuple[Call, ...]
    unit: int
    ends: bool

    @property
    def mark(self) -> StepMark:
        """Where it is."""
        return self.stretch.mark


@dataclass(frozen=True, slots=True)
class Steps:
    """A step of some units: its passages, and what comes after the last: units without gradients are released, then commits."""

    plan: StepPlan
    passages: tuple[Passage, ...]
    releases: tuple[Call, ...]
    commits: tuple[Call, ...]


def steps_of(profile: Profile, units: Sequence[RankUnit], depth: int) -> Steps:
    """Return the step that visits ``units`` as the blocks of ``profile`` were visited."""
    unit_of = {block: number for number, unit in enumerate(units) for block in unit.blocks}
    unit_of_param = {param: number for number, unit in enumerate(units) for param in unit.params}
    awaited = [0] * len(units)
    for stretch in profile.stretches:
        if stretch.mark.edge is None:
            awaited[unit_of_param[stretch.mark.param]] += 1
    visits: list[Visit] = []
    at: list[tuple[int, int | None, bool]] = []
    places = _Places(units)
    for stretch in profile.stretches:
        mark = stretch.mark
        unit = unit_of_param[mark.param] if mark.edge is None else unit_of[mark.block]
        visit: Visit | None = None
        ends = False
        if mark.edge is None:
            awaited[unit] -= 1
            ends = awaited[unit] == 0
            visit = Visit(unit, Edge.EXIT_BACKWARD) if ends else None
        elif places.passes(unit, mark.edge, mark.block):
            visit = Visit(unit, mark.edge)
        at.append((unit, len(visits) if visit is not None else None, ends))
        if visit is not None:
            visits.append(visit)
    num_passed = len(visits)
    gradients = {unit_of_param[stretch.mark.param] for stretch in profile.stretches if stretch.mark.edge is None}
    visits += [Visit(unit, Edge.RELEASE_BACKWARD) for unit in sorted(places.in_backward - gradients)]
    plan = plan_step(ExecutionOrder(tuple(visits)), [unit.facts for unit in units], PrefetchBudget(depth))
    passages: list[Passage] = []
    for stretch, (unit, number, ends) in zip(profile.stretches, at, strict=True):
        calls = () if number is None else plan.calls[plan.starts[number] : plan.starts[number + 1]]
        passages.append(Passage(stretch, calls, unit, ends))
    releases = plan.calls[plan.starts[num_passed] : plan.starts[-1]]
    return Steps(plan, tuple(passages), releases, plan.calls[plan.starts[-1] :])


class _Places:
    """Which edges of blocks are edges of their units: the first block's entry, the last one's exit.

    Attributes:
        in_backward: units whose backward has begun.
    """

    def __init__(self, units: Sequence[RankUnit]) -> None:
        self._units = units
        self._left = [set[int]() for _ in units]
        self.in_backward: set[int] = set()

    def passes(self, unit: int, edge: Edge, block: int) -> bool:
        """Return True if ``unit`` passes ``edge`` as ``block``, one of its blocks, does."""
        left = self._left[unit]
        if edge is Edge.ENTER_FORWARD:
            if left:
                return False
            left.update(self._units[unit].blocks)
            return True
        if edge is Edge.EXIT_FORWARD:
            left.discard(block)
            return not left
        is_first = unit not in self.in_backward
        self.in_backward.add(unit)
        return is_first

"""Plans of earlier steps: found by their order, bounded in number, and they tell which order comes next."""

from __future__ import annotations

from shardwise.plan.schedule import (
    ExecutionOrder,
    KnownPlans,
    OrderEntry,
    PrefetchBudget,
    StepEvent,
    StepPlan,
    UnitFacts,
    UnitPolicy,
    plan_step,
)

POLICIES = (UnitPolicy(),) * 3
MADE_FROM = (PrefetchBudget(), POLICIES)


def order_of(*units: int) -> ExecutionOrder:
    inward = [OrderEntry(unit, event) for unit in units for event in (StepEvent.PRE_FORWARD, StepEvent.POST_FORWARD)]
    backward = (StepEvent.PRE_BACKWARD, StepEvent.POST_BACKWARD)
    return (*inward, *[OrderEntry(unit, event) for unit in reversed(units) for event in backward])


def plan_of(*units: int) -> StepPlan:
    facts = tuple(UnitFacts(str(unit), policy, 4, False, 4, 4) for unit, policy in enumerate(POLICIES))
    return plan_step(order_of(*units), facts, PrefetchBudget())


def test_orders_in_turn_tell_the_next_one_and_one_that_comes_again_tells_itself() -> None:
    known = KnownPlans()
    first, second = (known.add(plan_of(0, head)) for head in (1, 2))
    assert known.end_step(first) is first
    assert known.end_step(second) is second
    for _ in range(3):
        assert known.end_step(first) is second
        assert known.end_step(second) is first
    known.end_step(second)
    assert known.end_step(second) is second
    known.forget_last()
    assert known.end_step(first) is second


def test_an_order_is_found_again_with_the_same_policies_alone() -> None:
    known = KnownPlans()
    plan = known.add(plan_of(0, 1))
    assert known.find(order_of(0, 1), MADE_FROM, None) is plan
    assert known.find(order_of(0, 1), MADE_FROM, plan.plan) is plan
    assert known.find(order_of(0, 2), MADE_FROM, plan.plan) is None
    assert known.find(order_of(0, 1), (PrefetchBudget(), POLICIES[:2]), None) is None
    assert known.find_branch(order_of(0, 1)[:3], MADE_FROM) is plan
    assert known.find_branch(order_of(1)[:1], MADE_FROM) is None


def test_of_many_orders_the_newest_are_kept() -> None:
    known = KnownPlans()
    orders = [tuple(number >> place & 1 for place in range(6)) for number in range(40)]
    for units in orders:
        known.add(plan_of(*units))
    found = [known.find(order_of(*units), MADE_FROM, None) is not None for units in orders]
    assert found == [False] * 24 + [True] * 16

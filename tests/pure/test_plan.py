"""Plans: what a step will do, from nothing but its order and the units' policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shardwise.observe import Call, Op
from shardwise.plan.schedule import (
    ExecutionOrder,
    OrderEntry,
    PrefetchBudget,
    StepEvent,
    UnitFacts,
    UnitPolicy,
    peak_bytes,
    plan_step,
)


def nested_order(num_blocks: int, with_backward: bool = True) -> ExecutionOrder:
    """A root (number 0) around blocks 1..n, forward and backward."""
    entries = [OrderEntry(0, StepEvent.PRE_FORWARD)]
    for block in range(1, num_blocks + 1):
        entries += [OrderEntry(block, StepEvent.PRE_FORWARD), OrderEntry(block, StepEvent.POST_FORWARD)]
    entries.append(OrderEntry(0, StepEvent.POST_FORWARD))
    if with_backward:
        entries.append(OrderEntry(0, StepEvent.PRE_BACKWARD))
        for block in range(num_blocks, 0, -1):
            entries += [OrderEntry(block, StepEvent.PRE_BACKWARD), OrderEntry(block, StepEvent.POST_BACKWARD)]
        entries.append(OrderEntry(0, StepEvent.POST_BACKWARD))
    return tuple(entries)


def facts(num_blocks: int, size: int = 10, **policy: object) -> list[UnitFacts]:
    sizes = {"gather_bytes": size, "full_bytes": size, "reduce_bytes": size}
    root = UnitFacts("", UnitPolicy(reshard_after_forward=False), **sizes)
    return [root, *(UnitFacts(f"blocks.{i}", UnitPolicy(**policy), **sizes) for i in range(num_blocks))]


@given(st.integers(1, 10), st.integers(0, 3), st.booleans(), st.booleans())
def test_every_wait_follows_its_unshard_and_nothing_is_left(
    num_blocks: int, depth: int, reshard: bool, sync: bool
) -> None:
    plan = plan_step(
        nested_order(num_blocks), facts(num_blocks, reshard_after_forward=reshard, sync=sync), PrefetchBudget(depth)
    )
    state: dict[str, str] = {}
    for call in plan.calls:
        now = state.get(call.unit, "sharded")
        if call.op is Op.UNSHARD:
            assert now == "sharded"
            state[call.unit] = "gathering"
        elif call.op is Op.WAIT:
            assert now == "gathering"
            state[call.unit] = "full"
        elif call.op is Op.RESHARD:
            assert now == "full"
            state[call.unit] = "sharded"
    assert set(state.values()) == {"sharded"}


SIZES = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=2, max_size=10)


def _uneven(sizes: list[tuple[int, bool]], reshard: bool) -> list[UnitFacts]:
    """A root without parameters and blocks of these sizes; True: the full parameters are part of what a gather holds."""
    blocks = [
        UnitFacts(f"blocks.{i}", UnitPolicy(reshard_after_forward=reshard), size, in_place, size, 2 * size)
        for i, (size, in_place) in enumerate(sizes)
    ]
    return [UnitFacts("", UnitPolicy(reshard_after_forward=False)), *blocks]


@given(SIZES, st.integers(0, 200), st.integers(1, 2), st.booleans())
def test_gathers_ahead_by_bytes_stay_within_them_and_go_at_least_one_unit_ahead(
    sizes: list[tuple[int, bool]], num_bytes: int, max_reductions: int, reshard: bool
) -> None:
    units, order = _uneven(sizes, reshard), nested_order(len(sizes))
    today = plan_step(order, units, PrefetchBudget(max_reductions=max_reductions))
    plan = plan_step(order, units, PrefetchBudget(num_bytes=num_bytes, max_reductions=max_reductions))
    least = peak_bytes(today.calls, max_reductions)
    assert peak_bytes(plan.calls, max_reductions) <= max(num_bytes, least)
    assert sorted(plan.calls, key=repr) == sorted(today.calls, key=repr)  # the same calls, sooner

    def place(calls: Sequence[Call], unit: str, op: Op, which: int) -> int:
        return [i for i, call in enumerate(calls) if (call.op, call.unit) == (op, unit)][which]

    for facts in units:
        for which in range(sum(call.op is Op.UNSHARD and call.unit == facts.name for call in today.calls)):
            waits = [place(each.calls, facts.name, Op.WAIT, which) for each in (today, plan)]
            begun = [place(each.calls, facts.name, Op.UNSHARD, which) for each in (today, plan)]
            assert waits[1] - begun[1] >= min(waits[0] - begun[0], 1)


def test_room_for_more_gathers_all_and_room_for_nothing_gathers_as_ever() -> None:
    units = facts(6)
    today = plan_step(nested_order(6), units)
    assert plan_step(nested_order(6), units, PrefetchBudget(num_bytes=10**9)).prefetches[0] == (1, 2, 3, 4, 5, 6)
    assert today.prefetches[0] == (1,)
    small = [replace(each, gather_bytes=1, full_bytes=1, reduce_bytes=1) for each in units[2:4]]
    uneven = [*units[:2], *small, *units[4:]]
    plan = plan_step(nested_order(6), uneven, PrefetchBudget(num_bytes=0))
    assert plan.prefetches[0] == (1, 2, 3)  # two small ones take less than the next large one will


def test_explicit_lists_replace_what_was_learned() -> None:
    units = facts(4)
    units[1] = replace(units[1], forward_prefetch=(3, 4), backward_prefetch=())
    plan = plan_step(nested_order(4), units, PrefetchBudget(1))
    position = plan.order.index(OrderEntry(1, StepEvent.PRE_FORWARD))
    assert plan.prefetches[position] == (3, 4)
    position = plan.order.index(OrderEntry(1, StepEvent.PRE_BACKWARD))
    assert plan.prefetches[position] == ()


def test_a_unit_that_backward_does_not_read_is_not_gathered_again() -> None:
    calls = plan_step(nested_order(2), facts(2, unshard_in_backward=False)).calls
    assert sum(call.op is Op.UNSHARD for call in calls) == 3


def test_borrowed_units_stay_while_anyone_uses_them() -> None:
    units = facts(2)
    units[0] = replace(units[0], tied_units=(1,))
    forward = plan_step(nested_order(2, with_backward=False), units).calls
    ops = [(call.op, call.unit) for call in forward if call.unit == "blocks.0"]
    assert ops == [(Op.UNSHARD, "blocks.0"), (Op.WAIT, "blocks.0"), (Op.RESHARD, "blocks.0")]
    assert forward[-1].unit == "blocks.0"

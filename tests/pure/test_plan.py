"""Plans: what a step will do, from nothing but its order and the units' policies."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import StateError
from shardwise.events import Op
from shardwise.plan.memory import peak_bytes, unsharded_bytes
from shardwise.plan.policy import UnitPolicy
from shardwise.plan.prefetch import UnitFacts, plan_step
from shardwise.plan.visits import Edge, Order, Visit
from shardwise.units.state import LEGAL_MOVES, Gathering, Sharded, Source, Subsharded, Unsharded, check_move


def nested_order(num_blocks: int, with_backward: bool = True) -> Order:
    """A root (number 0) around blocks 1..n, forward and backward."""
    visits = [Visit(0, Edge.ENTER_FORWARD)]
    for block in range(1, num_blocks + 1):
        visits += [Visit(block, Edge.ENTER_FORWARD), Visit(block, Edge.EXIT_FORWARD)]
    visits.append(Visit(0, Edge.EXIT_FORWARD))
    if with_backward:
        visits.append(Visit(0, Edge.ENTER_BACKWARD))
        for block in range(num_blocks, 0, -1):
            visits += [Visit(block, Edge.ENTER_BACKWARD), Visit(block, Edge.EXIT_BACKWARD)]
        visits.append(Visit(0, Edge.EXIT_BACKWARD))
    return Order(tuple(visits))


def facts(num_blocks: int, size: int = 10, **policy: object) -> list[UnitFacts]:
    sizes = {"gather_bytes": size, "full_bytes": size, "reduce_bytes": size}
    root = UnitFacts("", UnitPolicy(reshard_after_forward=False), **sizes)
    return [root, *(UnitFacts(f"blocks.{i}", UnitPolicy(**policy), **sizes) for i in range(num_blocks))]


@given(st.integers(1, 12), st.integers(0, 4))
def test_counts_of_a_step(num_blocks: int, depth: int) -> None:
    calls = plan_step(nested_order(num_blocks), facts(num_blocks), depth).calls
    counts = {op: sum(call.op is op for call in calls) for op in Op}
    assert counts[Op.UNSHARD] == (num_blocks + 1) + num_blocks  # the root is kept
    assert counts[Op.REDUCE] == counts[Op.COMMIT] == num_blocks + 1
    assert counts[Op.WAIT] == counts[Op.RESHARD] == counts[Op.UNSHARD]


@given(st.integers(1, 10), st.integers(0, 3), st.booleans(), st.booleans())
def test_every_wait_follows_its_unshard_and_nothing_is_left(
    num_blocks: int, depth: int, reshard: bool, sync: bool
) -> None:
    plan = plan_step(nested_order(num_blocks), facts(num_blocks, reshard_after_forward=reshard, sync=sync), depth)
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
    assert list(unsharded_bytes(plan.calls))[-1] == 0


@given(st.integers(3, 10))
def test_forward_peak_is_the_root_and_two_units(num_blocks: int) -> None:
    calls = plan_step(nested_order(num_blocks, with_backward=False), facts(num_blocks), 1).calls
    assert peak_bytes(calls) == 10 + 2 * 10


@given(st.integers(2, 8), st.integers(1, 8))
def test_prefetch_depth_counts_units(num_blocks: int, depth: int) -> None:
    plan = plan_step(nested_order(num_blocks), facts(num_blocks), depth)
    assert len(plan.ahead[0]) == min(depth, num_blocks)
    assert plan.ahead[0] == tuple(range(1, min(depth, num_blocks) + 1))


def test_explicit_lists_replace_what_was_learned() -> None:
    units = facts(4)
    units[1] = replace(units[1], forward_prefetch=(3, 4), backward_prefetch=())
    plan = plan_step(nested_order(4), units, 1)
    position = plan.order.visits.index(Visit(1, Edge.ENTER_FORWARD))
    assert plan.ahead[position] == (3, 4)
    position = plan.order.visits.index(Visit(1, Edge.ENTER_BACKWARD))
    assert plan.ahead[position] == ()


def test_a_unit_that_backward_does_not_read_is_not_gathered_again() -> None:
    calls = plan_step(nested_order(2), facts(2, unshard_in_backward=False)).calls
    assert sum(call.op is Op.UNSHARD for call in calls) == 3


def test_held_gradients_are_not_reduced() -> None:
    calls = plan_step(nested_order(2), facts(2, sync=False)).calls
    assert [call.unit for call in calls if call.op is Op.HOLD] == ["blocks.1", "blocks.0"]
    assert [call.unit for call in calls if call.op is Op.REDUCE] == [""]


def test_borrowed_units_stay_while_anyone_uses_them() -> None:
    units = facts(2)
    units[0] = replace(units[0], borrows=(1,))
    forward = plan_step(nested_order(2, with_backward=False), units).calls
    ops = [(call.op, call.unit) for call in forward if call.unit == "blocks.0"]
    assert ops == [(Op.UNSHARD, "blocks.0"), (Op.WAIT, "blocks.0"), (Op.RESHARD, "blocks.0")]
    assert forward[-1].unit == "blocks.0"


def test_the_same_facts_give_the_same_calls() -> None:
    plans = [plan_step(nested_order(3), facts(3), depth) for depth in (1, 1, 2)]
    assert plans[0].calls == plans[1].calls != plans[2].calls


@pytest.mark.parametrize(("old", "new"), list(itertools.product((Sharded, Gathering, Unsharded, Subsharded), repeat=2)))
def test_only_the_moves_in_the_table_are_legal(old: type, new: type) -> None:
    source = Source(0, None)
    make = {Sharded: (), Gathering: (source, ()), Unsharded: (source,), Subsharded: (source,)}
    states = [kind(*make[kind]) for kind in (old, new)]
    if (old, new) in LEGAL_MOVES:
        check_move("blocks.0", *states)
    else:
        with pytest.raises(StateError, match="unit 'blocks.0' is"):
            check_move("blocks.0", *states)

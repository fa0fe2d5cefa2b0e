"""Which units share an all-reduce: a pure function of a step's order and of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.schedule import (
    LEAST_BYTES,
    ExecutionOrder,
    OrderEntry,
    Sharing,
    StepEvent,
    UnitBucket,
    bucket_bytes,
    form_buckets,
    split_unit,
)

LIMIT = 100
UNITS = st.integers(1, 12)
SHARING = st.none() | st.builds(Sharing, st.sampled_from("ab"), st.integers(1, 2 * LIMIT), st.just(LIMIT))


@st.composite
def steps(draw: st.DrawFn) -> tuple[ExecutionOrder, list[Sharing | None]]:
    """A step that uses some units, some of them twice, and whose backward ends some of these in any order."""
    num = draw(UNITS)
    used = draw(st.lists(st.integers(0, num - 1), max_size=2 * num))
    ended = draw(st.permutations([unit for unit in dict.fromkeys(used) if draw(st.booleans())]))
    entries = [OrderEntry(unit, StepEvent.PRE_FORWARD) for unit in used] + [
        OrderEntry(unit, StepEvent.POST_BACKWARD) for unit in ended
    ]
    return ExecutionOrder(tuple(entries)), draw(st.lists(SHARING, min_size=num, max_size=num))


def units_of(buckets: Sequence[UnitBucket]) -> list[int]:
    return [unit for bucket in buckets for unit in bucket.units]


def entered(order: ExecutionOrder) -> list[int]:
    return list(dict.fromkeys(entry.unit for entry in order.entries if entry.event is StepEvent.PRE_FORWARD))


@given(steps())
def test_every_unit_that_forward_uses_and_that_may_share_is_in_one_bucket(
    step: tuple[ExecutionOrder, list[Sharing | None]],
) -> None:
    order, sharing = step
    expected = [unit for unit in entered(order) if sharing[unit] is not None]
    assert sorted(units_of(form_buckets(order, sharing))) == sorted(expected)


@given(steps())
def test_units_of_a_bucket_have_one_key_and_come_in_the_opposite_order_of_their_first_use(
    step: tuple[ExecutionOrder, list[Sharing | None]],
) -> None:
    order, sharing = step
    place = {unit: at for at, unit in enumerate(entered(order))}
    for bucket in form_buckets(order, sharing):
        keys = {found.key for unit in bucket.units if (found := sharing[unit]) is not None}
        assert len(keys) == 1
        assert sorted(bucket.units, key=lambda unit: -place[unit]) == list(bucket.units)


@given(steps())
def test_a_bucket_is_full_with_its_last_unit_and_not_before_and_one_of_a_key_is_not_full(
    step: tuple[ExecutionOrder, list[Sharing | None]],
) -> None:
    order, sharing = step
    not_full: list[object] = []
    for bucket in form_buckets(order, sharing):
        sizes = [found.num_bytes for unit in bucket.units if (found := sharing[unit]) is not None]
        assert sum(sizes[:-1]) < LIMIT
        terms = sharing[bucket.units[0]]
        if sum(sizes) < LIMIT and terms is not None:
            not_full.append(terms.key)
    assert len(not_full) == len(set(not_full))


@given(steps())
def test_who_shares_with_whom_follows_from_the_forward_alone(step: tuple[ExecutionOrder, list[Sharing | None]]) -> None:
    order, sharing = step
    found, first = (form_buckets(each, sharing) for each in (order, ExecutionOrder(order.forward)))
    assert {bucket.units for bucket in found} == {bucket.units for bucket in first}
    assert all(bucket.awaited == bucket.units for bucket in first)


@given(steps())
def test_buckets_are_sent_as_backward_has_ended_them_and_wait_for_nothing_else(
    step: tuple[ExecutionOrder, list[Sharing | None]],
) -> None:
    order, sharing = step
    ends = [entry.unit for entry in order.entries if entry.event is StepEvent.POST_BACKWARD]
    buckets = form_buckets(order, sharing)
    if ends:
        assert all(bucket.awaited == tuple(unit for unit in bucket.units if unit in ends) for bucket in buckets)
        last = [max((ends.index(unit) for unit in bucket.awaited), default=len(ends)) for bucket in buckets]
        assert last == sorted(last)


def test_a_full_bucket_takes_ten_times_the_latency_and_never_less_than_a_mebibyte() -> None:
    assert bucket_bytes(latency_s=20e-6, bytes_per_s=1e11) == 20_000_000
    assert bucket_bytes(latency_s=1e-4, bytes_per_s=1.25e8) == LEAST_BYTES == 1 << 20


@given(st.lists(st.integers(0, 3 * LIMIT), max_size=300))
def test_a_unit_that_is_alone_is_split_from_its_last_parameter_on_into_full_buckets(sizes: list[int]) -> None:
    buckets = [bucket.units for bucket in split_unit(sizes, LIMIT)]
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))[::-1]
    assert len(buckets) <= 33
    for bucket in buckets[:-1]:
        filled = sum(sizes[index] for index in bucket)
        assert filled >= LIMIT
        assert filled - sizes[bucket[-1]] < max(LIMIT, sum(sizes) / 32 + 1)

"""Which gradients of a unit share an all-reduce: a pure function of bytes."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.plan.schedule import LEAST_BYTES, Buckets, bucket_bytes, split_unit

LIMIT = 100


def test_a_full_bucket_takes_ten_times_the_latency_and_never_less_than_a_mebibyte() -> None:
    assert bucket_bytes(latency_s=20e-6, bytes_per_s=1e11) == 20_000_000
    assert bucket_bytes(latency_s=1e-4, bytes_per_s=1.25e8) == LEAST_BYTES == 1 << 20


@given(st.lists(st.none() | st.integers(0, 3 * LIMIT), max_size=300))
@example([LIMIT] * 300)
def test_a_unit_that_is_alone_is_split_from_its_last_parameter_on_into_full_buckets(sizes: list[int | None]) -> None:
    buckets = split_unit(sizes, LIMIT)
    trainable = [index for index, size in enumerate(sizes) if size is not None]
    assert [index for bucket in buckets for index in bucket] == trainable[::-1]
    assert len(buckets) <= 33
    total = sum(size or 0 for size in sizes)
    for bucket in buckets[:-1]:
        filled = sum(sizes[index] or 0 for index in bucket)
        assert filled >= LIMIT
        assert filled - (sizes[bucket[-1]] or 0) < max(LIMIT, total / 32 + 1)


@given(st.permutations(range(12)))
def test_buckets_are_launched_in_one_order_whatever_arrives_first(order: list[int]) -> None:
    buckets = split_unit([40] * 12, LIMIT)
    arrived = set[int]()
    progress, launched = Buckets(buckets, arrived), list[tuple[int, ...]]()
    for ordinal in order:
        arrived.add(ordinal)
        launched += progress.take()
        assert all(arrived.issuperset(bucket) for bucket in launched)
    assert launched == list(buckets)

"""Samples by seed, step and microbatch: epochs lose and double none, and mixtures are exact to the sample."""

from __future__ import annotations

import math
import time
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import ConfigError, Microbatches, Mixture, UsageError
from shardwise.data.order import own_microbatches, permuted, shares


@given(st.integers(1, 3000), st.text(max_size=5))
def test_a_permutation_has_every_number_once(length: int, name: str) -> None:
    whole = permuted(np.arange(length), length, name)
    assert sorted(whole.tolist()) == list(range(length))
    last = np.array([length - 1])  # few positions are computed without tables
    assert permuted(last, length, name) == whole[last]


def test_permutations_of_other_names_differ_and_are_as_frequent() -> None:
    found = Counter(tuple(permuted(np.arange(4), 4, str(name)).tolist()) for name in range(4800))
    assert len(found) == math.factorial(4)
    assert all(150 < number < 250 for number in found.values())


def test_a_trillion_samples_take_no_memory_and_no_time() -> None:
    begin = time.process_time()
    found = permuted(np.arange(10**12 - 100, 10**12), 10**12, "")
    assert time.process_time() - begin < 5
    assert len(set(found.tolist())) == 100
    assert 0 <= found.min() < found.max() < 10**12


WEIGHTS = st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any)


@given(WEIGHTS, st.integers(0, 10**15))
def test_shares_are_exact_and_grow_by_one_sample_at_a_time(weights: list[int], total: int) -> None:
    here, there = shares(weights, total), shares(weights, total + 1)
    assert sum(here) == total
    assert sorted(b - a for a, b in zip(here, there, strict=True)) == [0] * (len(weights) - 1) + [1]
    whole, halvings = sum(weights), math.ceil(math.log2(len(weights)))
    for number, weight in zip(here, weights, strict=True):
        assert abs(number * whole - total * weight) * 2 <= whole * halvings
        assert weight or not number


def samples_of(data: Microbatches, steps: range, num_ranks: int = 1) -> list[list[int]]:
    """Return the samples of every microbatch, in the order of steps and microbatches."""
    ranks = [iter(data.batch_sampler(steps, rank, num_ranks)) for rank in range(num_ranks)]
    per_rank = data.num_microbatches // num_ranks
    return [each for _ in steps for rank in ranks for each in islice(rank, per_rank)]


@given(
    st.integers(1, 60), st.integers(0, 3), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 3), st.integers(0, 50)
)
def test_every_epoch_has_every_sample_once_at_any_number_of_ranks(
    length: int, seed: int, num_ranks: int, size: int, begin: int
) -> None:
    data = Microbatches(range(length), num_microbatches=12, microbatch_size=size, seed=seed)
    num_steps = -(-3 * length // data.num_microbatches // size) + 1
    found = samples_of(data, range(num_steps), num_ranks)
    assert found == samples_of(data, range(num_steps))
    flat = [*chain(*found)]
    for epoch in range(3):
        assert sorted(flat[epoch * length : (epoch + 1) * length]) == list(range(length))
    later = samples_of(data, range(begin, begin + num_steps), num_ranks)
    assert later[: 12 * max(0, num_steps - begin)] == found[12 * begin :]


def test_steps_far_away_are_those_that_a_run_from_the_beginning_has() -> None:
    data = Microbatches(range(1013), num_microbatches=4, microbatch_size=3, seed=1)
    assert samples_of(data, range(4000))[4 * 3997 :] == samples_of(data, range(3997, 4000))


def test_epochs_and_seeds_have_other_orders() -> None:
    orders = [
        samples_of(Microbatches(range(50), num_microbatches=1, microbatch_size=50, seed=s), range(2)) for s in (0, 1)
    ]
    assert len({tuple(each) for each in chain(*orders)}) == 4


def test_drop_last_leaves_out_other_samples_in_each_epoch() -> None:
    data = Microbatches(range(29), num_microbatches=3, microbatch_size=3, seed=0, drop_last=True)
    found = [*chain(*samples_of(data, range(6)))]
    assert [len({*found[27 * epoch : 27 * (epoch + 1)]}) for epoch in range(2)] == [27, 27]
    with pytest.raises(ConfigError, match="fills no step of 9 samples; found 1 sources of 8 samples"):
        Microbatches(range(8), num_microbatches=3, microbatch_size=3, drop_last=True)


def test_a_mixture_has_each_source_by_count_and_each_in_epochs_of_its_own() -> None:
    lengths = {"web": 50, "code": 7, "books": 20}
    mixture = Mixture({"web": (range(50), 0.7), "code": (range(7), 0.1), "books": (range(20), 0.2)})
    data = Microbatches(mixture, num_microbatches=5, microbatch_size=4, seed=0)
    data.set_weights(50, {"web": 0, "code": 3, "books": 1})
    found = [*chain(*samples_of(data, range(100)))]
    assert found == [*chain(*samples_of(data, range(100), 5))]
    begins = {"web": 0, "code": 50, "books": 57}
    by_source = {
        name: [n - first for n in found if first <= n < first + lengths[name]] for name, first in begins.items()
    }
    assert {name: len(each) for name, each in by_source.items()} == {"web": 700, "code": 100 + 750, "books": 200 + 250}
    for name, samples in by_source.items():
        for epoch in range(len(samples) // lengths[name]):
            assert sorted(samples[epoch * lengths[name] :][: lengths[name]]) == list(range(lengths[name]))
    for total in range(1, 1000):  # within a sample of its weight at any time
        assert abs(sum(n < 50 for n in found[:total]) - 0.7 * total) <= 1


def test_weights_of_many_digits_are_exact_over_many_samples() -> None:
    thirds = Microbatches(
        Mixture({"a": (range(9), 1 / 3), "b": (range(9), 2 / 3)}), num_microbatches=1, microbatch_size=3
    )
    assert all(sum(n < 9 for n in each) == 1 for each in samples_of(thirds, range(10**9, 10**9 + 5)))


@pytest.mark.parametrize(
    "weights",
    [{"a": -1, "b": 2}, {"a": 0, "b": 0}, {"a": math.nan, "b": 1}, {"a": "1", "b": 1}, {"a": True, "b": 1}],
)
def test_weights_that_are_no_weights_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="weights are .*, expected a number from 0 on for each of a, b, not all 0"):
        Mixture({name: (range(3), weight) for name, weight in weights.items()})
    assert Mixture({"a": (range(3), np.float32(0.5)), "b": (range(3), 1)}).weights == [1, 2]


def test_weights_change_for_steps_to_come_and_for_a_mixture_alone() -> None:
    data = Microbatches(Mixture({"a": (range(3), 1), "b": (range(3), 1)}), num_microbatches=1, microbatch_size=3)
    for number in range(2):
        assert len([*data.of_step(number)]) == 1
    with pytest.raises(ConfigError, match="step 1 of 2 sources, expected a mixture, and step 2 or a later one"):
        data.set_weights(1, {"a": 1, "b": 0})
    with pytest.raises(ConfigError, match=r"weights are \{'a': 1\}"):
        data.set_weights(2, {"a": 1})
    data.set_weights(2, {"a": 1, "b": 0})
    assert max(next(data.of_step(2)).tolist()) < 3
    sampler = data.batch_sampler(range(3, 6))
    data.set_weights(4, {"a": 0, "b": 1})
    assert [max(each) >= 3 for each in sampler] == [False, True, True]
    with pytest.raises(UsageError, match="step 5 is of a batch_sampler whose samples are chosen"):
        data.set_weights(5, {"a": 1, "b": 0})
    data.set_weights(6, {"a": 1, "b": 0})
    with pytest.raises(ConfigError, match="step 9 of 1 sources"):
        Microbatches(range(3), num_microbatches=1, microbatch_size=1).set_weights(9, {"": 1})


def test_ranks_that_cannot_share_microbatches_equally_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"num_microbatches is 12, which 5 data-parallel ranks cannot share equally; .* \[1, 2"
    ):
        own_microbatches(12, 0, 5)
    data = Microbatches(range(9), num_microbatches=2, microbatch_size=2)
    for rank, num_ranks in ((1, 1), (2, 2), (-1, 2)):
        with pytest.raises(ConfigError, match=f"rank is {rank}, expected one of range.{num_ranks}.: num_ranks is"):
            data.batch_sampler(range(1), rank, num_ranks)


def test_a_sampler_serves_once() -> None:
    sampler = Microbatches(range(9), num_microbatches=2, microbatch_size=2).batch_sampler(range(3, 5))
    assert len(sampler) == len([*sampler]) == 4
    with pytest.raises(UsageError, match="the sampler of steps 3 to 5 is used a second time"):
        next(iter(sampler))


def test_steps_of_a_sampler_follow_each_other() -> None:
    with pytest.raises(ConfigError, match=r"steps are range\(0, 9, 2\)"):
        Microbatches(range(9), num_microbatches=2, microbatch_size=2).batch_sampler(range(0, 9, 2))

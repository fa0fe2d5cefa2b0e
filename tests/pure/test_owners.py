"""Partitions tile every tensor once, are balanced, and do not move when tensors are added."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwise.collectives.owned import (
    add_loads,
    assign_owners,
    even_slices,
    whole_slices,
)

NUMELS = st.lists(st.integers(0, 500), min_size=1, max_size=12)
RANKS = st.integers(1, 9)


def _tiles_once(chunks, numels) -> None:
    for index, numel in enumerate(numels):
        mine = sorted((p.start, p.stop) for p in chunks if p.tensor == index)
        assert mine
        assert mine[0][0] == 0
        assert mine[-1][1] == numel
        assert all(left[1] == right[0] for left, right in pairwise(mine))


def _greedy_slowly(numels, num_ranks):
    loads, owners = [0] * num_ranks, [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda i: numels[i], reverse=True):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += numels[index]
    return tuple(owners)


@given(NUMELS, RANKS)
def test_owners_are_sorted_greedy(numels, num_ranks) -> None:
    assert assign_owners(numels, num_ranks) == _greedy_slowly(numels, num_ranks)


def test_the_seed_example_is_balanced() -> None:
    sizes = [9, 7, 5, 3] * 4
    assert add_loads([0] * 4, whole_slices(sizes, 4)) == (24, 24, 24, 24)


@given(NUMELS, NUMELS, RANKS, st.integers(1, 64))
def test_even_stays_within_one_block_over_groups(first, second, num_ranks, block) -> None:
    loads = (0,) * num_ranks
    for numels in (first, second):
        chunks = even_slices(numels, num_ranks, loads, block)
        _tiles_once(chunks, numels)
        loads = add_loads(loads, chunks)
    assert max(loads) - min(loads) <= block
    assert sum(loads) == sum(first) + sum(second)


def test_sixteen_thousand_ranks_take_no_time() -> None:
    chunks = even_slices([50257 * 768, 1024 * 768, *[768 * 3072] * 24], 16384)
    loads = add_loads([0] * 16384, chunks)
    assert max(loads) - min(loads) <= 64

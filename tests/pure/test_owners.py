"""Partitions tile every tensor once, are balanced, and do not move when tensors are added."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwise.collectives.owned import (
    RUN_NUMEL,
    add_loads,
    assign_owners,
    boxes,
    even_ranges,
    even_slices,
    runs_of,
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


@given(st.lists(st.integers(0, 3 * RUN_NUMEL), min_size=1, max_size=30), st.sampled_from([1, 2, 64]))
def test_runs_are_neighbours_of_about_one_size(numels, num_ranks) -> None:
    runs = runs_of(numels, num_ranks)
    assert [index for run in runs for index in run] == list(range(len(numels)))
    least = max(RUN_NUMEL, num_ranks << 17)
    for number, run in enumerate(runs):
        totals = list(accumulate(numels[index] for index in run))
        needed = next((count for count, total in enumerate(totals, 1) if total >= least), len(run))
        is_last = number == len(runs) - 1
        assert is_last or totals[-1] >= least
        assert totals[-1] - totals[needed - 1] <= least // 2 * is_last  # a rest belongs to the last one


@given(st.integers(0, 5000), RANKS, st.integers(1, 64))
def test_even_ranges_tile_and_align(numel, num_ranks, block) -> None:
    ranges = even_ranges(numel, num_ranks, block)
    assert sorted(x for r in ranges for x in r) == list(range(numel))
    assert all(r.start % block == 0 for r in ranges)


@given(NUMELS, RANKS)
def test_whole_pieces_tile(numels, num_ranks) -> None:
    _tiles_once(whole_slices(numels, num_ranks), numels)


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_boxes_tile_a_range_in_order(shape, data) -> None:
    from itertools import product
    from math import prod

    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = boxes(shape, start, stop)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    cells: list[int] = []
    for offsets, sizes in found:
        ranges = [range(o, o + n) for o, n in zip(offsets, sizes, strict=True)]
        cells += [sum(i * s for i, s in zip(cell, strides, strict=True)) for cell in product(*ranges)]
    assert cells == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_sixteen_thousand_ranks_take_no_time() -> None:
    chunks = even_slices([50257 * 768, 1024 * 768, *[768 * 3072] * 24], 16384)
    loads = add_loads([0] * 16384, chunks)
    assert max(loads) - min(loads) <= 64

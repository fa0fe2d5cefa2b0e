"""Shards tile their tensor like torch.chunk, and buckets put every element in exactly one place."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise import LayoutError
from shardwise.layout import ChunkShard, build_bucket

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)


@st.composite
def chunk_shards(draw: st.DrawFn, num_shards: int | None = None) -> ChunkShard:
    shape = draw(shapes | st.just(()))
    dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
    return ChunkShard(shape, dim, num_shards or draw(st.integers(1, 12)))


@given(chunk_shards())
def test_shards_tile_the_tensor_once(shard: ChunkShard) -> None:
    if shard.is_whole:
        assert all(list(shard.rows(rank)) == [0] for rank in range(shard.num_shards))
        return
    rows = [row for rank in range(shard.num_shards) for row in shard.rows(rank)]
    assert rows == list(range(shard.shape[shard.dim]))


@given(chunk_shards())
def test_shards_are_cut_like_torch_chunk(shard: ChunkShard) -> None:
    if shard.is_whole or not shard.shape[shard.dim]:
        return
    chunks = torch.empty(shard.shape).chunk(shard.num_shards, dim=shard.dim)
    for rank in range(shard.num_shards):
        expected = tuple(chunks[rank].shape) if rank < len(chunks) else None
        assert shard.shard_shape(rank) == expected or (expected is None and shard.shard_numel(rank) == 0)


@given(st.data())
def test_moves_carry_every_element_there_and_back(data: st.DataObject) -> None:
    num_shards = data.draw(st.integers(1, 6))
    shards = data.draw(st.lists(chunk_shards(num_shards), min_size=1, max_size=4))
    bucket = build_bucket(shards, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)))
    packed = torch.full((num_shards * bucket.section_numel,), -1.0)
    for index, shard in enumerate(shards):
        full = torch.arange(shard.numel, dtype=torch.float32).view(shard.shape) + 100 * index
        for move in bucket.moves(index, into_full=False):
            target = packed.as_strided(move.shape, move.packed_stride, move.packed_offset)
            target.copy_(full.as_strided(move.shape, move.full_stride, move.full_offset))
        for rank in range(num_shards):
            rows = shard.rows(rank)
            expected = full if shard.is_whole else full.narrow(shard.dim, rows.start, len(rows))
            start = rank * bucket.section_numel + bucket.offsets[index]
            found = packed[start : start + expected.numel()]
            assert torch.equal(found, expected.reshape(-1))
        back = torch.full((max(shard.numel, 1),), -2.0)
        for move in bucket.moves(index, into_full=True):
            source = packed.as_strided(move.shape, move.packed_stride, move.packed_offset)
            back.as_strided(move.shape, move.full_stride, move.full_offset).copy_(source)
        assert torch.equal(back[: shard.numel], full.reshape(-1))
    used = sum(shard.numel * (num_shards if shard.is_whole else 1) for shard in shards)
    assert int((packed != -1.0).sum()) <= used
    assert bucket.has_padding or packed.numel() == used


@example(2, [(4, 1), (8, 3)], 1)
@example(16, [(4, 2), (4, 3)], 1)
@example(4, [(4, 1), (2, 1)], 1)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 2),
)
def test_even_sections_are_columns_of_all_tensors_and_the_others_padding(
    num_shards: int, shapes: list[tuple[int, int]], alignment: int
) -> None:
    bucket = build_bucket([ChunkShard(shape, 0, num_shards) for shape in shapes], alignment)
    num_even = bucket.num_even
    if not num_even:
        chunks = {shard.size / max(shard.chunk, 1) for shard in bucket.shards}
        assert alignment > 1 or not bucket.section_numel or len(chunks) > 1 or chunks.pop() % 1
        return
    packed = torch.zeros(num_shards, bucket.section_numel)
    for index, shard in enumerate(bucket.shards):
        for move in bucket.moves(index, into_full=False):
            packed.as_strided(move.shape, move.packed_stride, move.packed_offset).fill_(index + 1)
        columns = packed[:num_even, bucket.offsets[index] :][:, : shard.section_numel]
        assert columns.numel() == shard.numel
        assert bool((columns == index + 1).all())
    assert not packed[num_even:].any()


@given(chunk_shards(), st.integers(1, 3))
def test_a_packed_buffer_that_is_one_tensor_has_its_elements_in_order(shard: ChunkShard, alignment: int) -> None:
    bucket = build_bucket([shard], alignment, alignment)
    packed = torch.full((shard.num_shards * bucket.section_numel,), -1.0)
    full = torch.arange(shard.numel, dtype=torch.float32)
    for move in bucket.moves(0, into_full=False):
        target = packed.as_strided(move.shape, move.packed_stride, move.packed_offset)
        target.copy_(full.as_strided(move.shape, move.full_stride, move.full_offset))
    if bucket.is_one_tensor:
        assert torch.equal(packed[: shard.numel], full)
        assert packed.numel() == bucket.full_numel < shard.numel + bucket.section_numel
    else:
        is_in_order = torch.equal(packed[: shard.numel], full)
        is_trivial = shard.num_shards == 1 or shard.is_whole or not shard.shard_numel(shard.num_shards - 1)
        assert not is_in_order or is_trivial or bucket.section_numel > shard.section_numel


def test_several_tensors_are_not_in_one_order() -> None:
    assert not build_bucket([ChunkShard((4, 8), 0, 2), ChunkShard((8,), 0, 2)]).is_one_tensor


@given(chunk_shards())
def test_at_most_two_moves_for_any_number_of_ranks(shard: ChunkShard) -> None:
    assert len(shard.moves(0, shard.section_numel, into_full=True)) <= 2


def test_sixteen_thousand_ranks_are_closed_form() -> None:
    bucket = build_bucket([ChunkShard((4096, 8), 0, 16_384), ChunkShard((50_257, 8), 0, 16_384)])
    assert list(bucket.shards[0].rows(4095)) == [4095]
    assert len(bucket.shards[0].rows(16_383)) == 0
    assert bucket.section_numel == 8 * (1 + 4)


def test_bad_arguments_say_what_was_expected() -> None:
    with pytest.raises(LayoutError, match="rank 4 is outside 0..3"):
        ChunkShard((8,), 0, 4).rows(4)
    with pytest.raises(LayoutError, match="dim 2 is outside a tensor of shape"):
        ChunkShard((8, 8), 2, 4)
    with pytest.raises(LayoutError, match="at least 1"):
        ChunkShard((8,), 0, 0)

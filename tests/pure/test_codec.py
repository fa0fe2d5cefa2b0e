"""Codes of blocks and messages of sections: bounds, and what must come out as it went in."""

from __future__ import annotations

import pytest
import torch

from shardwise import CompressionPolicy, ConfigError
from shardwise.collectives import compressed as block_codes
from shardwise.collectives.compressed import BlockCode, CodedSection, Coding, takes
from shardwise.layout import ChunkShard, build_bucket


def there_and_back(code: BlockCode, rows: torch.Tensor) -> torch.Tensor:
    coded = torch.empty(rows.shape[0], code.num_bytes(rows.shape[1]), dtype=torch.uint8)
    code.encode(rows, coded)
    return code.decode(coded, rows.shape[1])


def drawn(seed: int, num_rows: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, numel, generator=generator)
    return rows * 10.0 ** torch.randint(-44, 38, (num_rows, numel), generator=generator)


def test_int8_is_off_by_half_the_scale_of_its_block_at_most() -> None:
    for seed in range(60):
        block = (8, 32, 100)[seed % 3]
        rows = drawn(seed, 1 + seed % 3, 4 * block).clamp(-1e38, 1e38)
        if seed % 4 == 0:
            rows = rows[:, :1].expand_as(rows).contiguous()
        off = (there_and_back(BlockCode("int8", block), rows).double() - rows.double()).abs()
        scale = rows.double().view(len(rows), -1, block).abs().amax(-1, keepdim=True) / 127
        assert torch.all(off.view_as(scale.expand(-1, -1, block)) <= scale / 2 * (1 + 1e-4) + 1.5e-36), seed


def test_bf16_is_off_by_one_part_in_256_at_most() -> None:
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert torch.all((there_and_back(BlockCode("bf16", 8), rows) - rows).abs() <= rows.abs() / 256)


@pytest.mark.parametrize("coding", ["int8", "bf16"])
def test_what_is_lost_is_what_does_not_come_back(coding: Coding) -> None:
    for seed in range(12):
        rows = drawn(seed, 1 + seed % 3, 6 * 8)
        rows[0, 13] = (1.0, float("inf"), float("nan"))[seed % 3]
        code = BlockCode(coding, 8)
        coded = torch.empty(rows.shape[0], code.num_bytes(rows.shape[1]), dtype=torch.uint8)
        lost = torch.empty_like(rows)
        code.encode(rows, coded, lost)
        assert torch.equal(lost.nan_to_num(), (rows - code.decode(coded, rows.shape[1])).nan_to_num())


def test_rows_longer_than_what_is_coded_at_once_have_the_codes_of_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows = BlockCode("int8", 8), drawn(3, 2, 11 * 8)
    whole, cut = (torch.zeros(2, code.num_bytes(88), dtype=torch.uint8) for _ in range(2))
    lost, lost_cut = torch.empty_like(rows), torch.empty_like(rows)
    code.encode(rows, whole, lost)
    back = code.decode(whole, 88)
    monkeypatch.setattr(block_codes, "_AT_ONCE", 40)  # three blocks of each row
    code.encode(rows, cut, lost_cut)
    assert torch.equal(cut, whole)
    assert torch.equal(lost_cut, lost)
    assert torch.equal(code.decode(whole, 88), back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("coding", ["int8", "bf16"])
def test_a_run_decodes_to_what_the_whole_has_there(
    coding: Coding, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_codes, "_AT_ONCE", 40)
    code, rows = BlockCode(coding, 8), torch.randn(2, 80, generator=torch.Generator().manual_seed(0))
    coded = torch.empty(2, code.num_bytes(80), dtype=torch.uint8)
    code.encode(rows, coded)
    for first, numel in ((0, 80), (8, 1), (16, 0), (0, 33), (40, 40), (24, 51)):
        around = torch.full((2, numel + 4), 7.0, dtype=dtype)
        code.decode_run(coded, 80, first, around.narrow(1, 2, numel))
        expected = code.decode(coded, 80)[:, first : first + numel].to(dtype)
        assert torch.equal(around[:, 2 : 2 + numel], expected)
        assert torch.all(around[:, :2] == 7)
        assert torch.all(around[:, 2 + numel :] == 7)


def test_zeros_and_the_largest_of_a_block_come_back_as_they_are() -> None:
    rows = torch.zeros(1, 16)
    rows[0, 8:] = torch.tensor([127.0, -127.0, 3.0, 0.0, -0.0, 126.0, 1.0, -64.0])
    assert torch.equal(there_and_back(BlockCode("int8", 8), rows), rows)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_is_not_finite_stays_so_and_its_neighbours_do_not_hear_of_it(bad: float) -> None:
    rows = torch.ones(1, 24)
    rows[0, 11] = bad
    back = there_and_back(BlockCode("int8", 8), rows)
    assert torch.all(torch.isnan(back[0, 8:16]))
    assert torch.equal(back[0, :8], rows[0, :8])
    assert torch.equal(back[0, 16:], rows[0, 16:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_coded_comes_out_of_a_message_to_the_bit(dtype: torch.dtype) -> None:
    shapes = [(5, 7), (3,), (9, 4), (2, 2)]
    for num_shards in (1, 2, 4):
        layout = build_bucket([ChunkShard(shape, 0, num_shards) for shape in shapes], 4)
        section = CodedSection.of(layout, [True, False, True, False], dtype, BlockCode("int8", 8))
        rows = torch.randn(3, layout.section_numel, generator=torch.Generator().manual_seed(1)).to(dtype)
        messages = torch.zeros(3, section.message_bytes, dtype=torch.uint8)
        section.put_rest(rows, messages)
        section.code.encode(section.take_coded(rows), section.codes_in(messages))
        back = torch.empty_like(rows)
        section.decode(messages, back)
        for start, numel in section.rest:
            assert torch.equal(back[:, start : start + numel], rows[:, start : start + numel])
        torch.testing.assert_close(back, rows, rtol=0, atol=0.03)
        total = torch.zeros_like(section.sum_of(messages))
        for row in back:
            total += row.float()
        torch.testing.assert_close(section.sum_of(messages), total, rtol=0, atol=0.03)


def test_norms_biases_small_and_named_tensors_stay_exact() -> None:
    policy = CompressionPolicy(gather="int8", exact=("*embed*",))
    assert takes(policy, "up.weight", (64, 64), 4)
    assert not takes(policy, "up.weight", (64, 63), 4)
    assert not takes(policy, "norm.weight", (1 << 20,), 4)
    assert not takes(policy, "embedding.weight", (1024, 64), 4)
    assert not takes(policy, "up.weight", (64, 64), 8)


def test_names_that_stay_exact_are_those_of_the_unit_and_those_of_the_root() -> None:
    """A parameter is called ``down.weight`` before the first forward, and ``blocks.0.down.weight`` from then on."""
    for pattern in ("down*", "down.weight", "*down*", "*.weight"):
        policy = CompressionPolicy(gather="int8", exact=(pattern,))
        assert not takes(policy, "down.weight", (64, 64), 4)
        assert not takes(policy, "blocks.0.down.weight", (64, 64), 4)
    policy = CompressionPolicy(gather="int8", exact=("gate*", "own"))
    assert takes(policy, "blocks.1.down.weight", (64, 64), 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gather": "int4"},
        {"reduce": "fp8"},
        {"block": 4},
        {"block": 64.0},
        {"min_bytes": -1},
        {"exact": "embed"},
        {"warn_above": 0.0},
    ],
)
def test_a_bad_policy_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CompressionPolicy(**wrong)

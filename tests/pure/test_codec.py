"""Codes of blocks and messages of sections: bounds, and what must come out as it went in."""

from __future__ import annotations

import pytest
import torch

from shardwise import CompressionPolicy, ConfigError
from shardwise.collectives import compressed
from shardwise.collectives.compressed import BlockCode, takes


def drawn(seed: int, num_rows: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, numel, generator=generator)
    return rows * 10.0 ** torch.randint(-44, 38, (num_rows, numel), generator=generator)


def there_and_back(code: BlockCode, rows: torch.Tensor) -> torch.Tensor:
    coded = torch.empty(rows.shape[0], code.num_bytes(rows.shape[1]), dtype=torch.uint8)
    code.encode(rows, coded)
    return code.decode(coded, rows.shape[1])


def test_int8_is_off_by_half_the_scale_of_its_block_at_most() -> None:
    for seed in range(60):
        block = (8, 32, 100)[seed % 3]
        rows = drawn(seed, 1 + seed % 3, 4 * block).clamp(-1e38, 1e38)
        if seed % 4 == 0:
            rows = rows[:, :1].expand_as(rows).contiguous()
        off = (there_and_back(BlockCode("int8", block), rows).double() - rows.double()).abs()
        scale = rows.double().view(len(rows), -1, block).abs().amax(-1, keepdim=True) / 127
        assert torch.all(off.view_as(scale.expand(-1, -1, block)) <= scale / 2 * (1 + 1e-4) + 1.5e-36), seed


def test_rows_longer_than_what_is_coded_at_once_have_the_codes_of_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows = BlockCode("int8", 8), drawn(3, 2, 11 * 8)
    whole, cut = (torch.zeros(2, code.num_bytes(88), dtype=torch.uint8) for _ in range(2))
    lost, lost_cut = torch.empty_like(rows), torch.empty_like(rows)
    code.encode(rows, whole, lost)
    back = code.decode(whole, 88)
    monkeypatch.setattr(compressed, "_AT_ONCE", 40)  # three blocks of each row
    code.encode(rows, cut, lost_cut)
    assert torch.equal(cut, whole)
    assert torch.equal(lost_cut, lost)
    assert torch.equal(code.decode(whole, 88), back)


def test_bf16_is_off_by_one_part_in_256_at_most() -> None:
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert torch.all((there_and_back(BlockCode("bf16", 8), rows) - rows).abs() <= rows.abs() / 256)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_is_not_finite_stays_so_and_its_neighbours_do_not_hear_of_it(bad: float) -> None:
    rows = torch.ones(1, 24)
    rows[0, 11] = bad
    back = there_and_back(BlockCode("int8", 8), rows)
    assert torch.all(torch.isnan(back[0, 8:16]))
    assert torch.equal(back[0, :8], rows[0, :8])
    assert torch.equal(back[0, 16:], rows[0, 16:])


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

"""The least memory of a training step, by which sizes that cannot fit are refused."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise import ConfigError
from shardwise.recipes.config import NUM_BYTES, ModelShape, TrainConfig
from shardwise.recipes.gpt import build_gpt
from shardwise.recipes.sharding import check_memory, count_gpt_parameters

SHAPE = ModelShape(layers=2, width=32, heads=2, context=16)


@pytest.mark.parametrize("shape", [SHAPE, dataclasses.replace(SHAPE, experts=3, top_k=2)])
def test_parameters_are_counted_as_the_model_has_them(shape: ModelShape) -> None:
    assert count_gpt_parameters(shape, NUM_BYTES) == sum(p.numel() for p in build_gpt(shape, 0).parameters())


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_what_takes_one_byte_more_than_there_is_is_refused(num_ranks: int) -> None:
    config = TrainConfig(model=SHAPE, batch=8)
    state = 16 * count_gpt_parameters(SHAPE, NUM_BYTES) // num_ranks
    logits = 8 // num_ranks * 16 * (16 + 8 * NUM_BYTES)
    check_memory(config, num_ranks, state + logits, "there is little", NUM_BYTES)
    with pytest.raises(ConfigError, match=r"8 sequence|2 sequence.*and there is little"):
        check_memory(config, num_ranks, state + logits - 1, "there is little", NUM_BYTES)


def test_of_a_model_of_the_user_only_the_logits_are_known() -> None:
    config = TrainConfig(model=SHAPE, batch=1, model_from="a:b")
    check_memory(config, 1, 16 * (16 + 8 * 50_000), "", 50_000)
    with pytest.raises(ConfigError, match="0 parameters"):
        check_memory(config, 1, 16 * (16 + 8 * 50_000) - 1, "", 50_000)

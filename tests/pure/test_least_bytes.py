"""The least memory of a step is never more than what is taken, and what its refusals advise is accepted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shardwise import ConfigError
from shardwise.recipes.config import NUM_BYTES, SHARDS, ModelShape, TrainConfig
from shardwise.recipes.gpt import build_gpt, next_byte_loss
from shardwise.recipes.memory import LeastBytes, MemoryLimit, check_memory, count_gpt_parameters, least_bytes

SHAPE = ModelShape(layers=3, width=32, heads=4, context=16)
CPU = MemoryLimit(1_000_000, None, "a rank has 1 MB")


@pytest.mark.parametrize("shape", [SHAPE, ModelShape(1, 8, 1, 5), ModelShape(2, 8, 1, 5, experts=3)])
def test_parameters_are_counted_from_the_shape(shape: ModelShape) -> None:
    assert count_gpt_parameters(shape, NUM_BYTES) == sum(p.numel() for p in build_gpt(shape, 0).parameters())


def _kept_bytes(recompute: bool, batch: int) -> int:
    """Return the bytes of distinct storages that autograd keeps of a forward, without parameters."""
    model = build_gpt(SHAPE, 0, recompute=recompute)
    known = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.zeros(batch, SHAPE.context, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        next_byte_loss(model, tokens, tokens)
    return sum(storage.nbytes() for storage in kept.values())


def test_the_least_is_close_to_and_not_more_than_what_autograd_keeps_and_the_logits() -> None:
    batch = 8
    config = TrainConfig(model=SHAPE, batch=batch, shard="none")
    logits = batch * SHAPE.context * NUM_BYTES * 4  # held by the loss beside what it keeps of them
    taken = _kept_bytes(recompute=False, batch=batch) + logits
    assert 0.75 * taken < batch * least_bytes(config, 1).per_sequence <= taken


def test_recomputation_keeps_less() -> None:
    config = TrainConfig(model=dataclasses.replace(SHAPE, layers=12))
    recomputing = dataclasses.replace(config, recompute=True)
    assert least_bytes(recomputing, 1).per_sequence < 0.6 * least_bytes(config, 1).per_sequence
    assert _kept_bytes(recompute=True, batch=8) < _kept_bytes(recompute=False, batch=8)


def test_state_is_that_of_the_api() -> None:
    each = 4 * count_gpt_parameters(SHAPE, NUM_BYTES)
    found = {shard: least_bytes(TrainConfig(model=SHAPE, shard=shard), 4).state for shard in SHARDS}
    assert found == {
        "zero3": each, "hsdp": 2 * each, "ddp": 4 * each, "none": 4 * each,
        "zero1": 2 * each + each // 2, "zero2": each,
    }  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "shard"), [(1, "none"), (2, "zero3"), (4, "hsdp"), (3, "zero2")])
def test_a_microbatch_that_just_fits_is_taken_and_one_sequence_more_is_not(num_ranks: int, shard: str) -> None:
    limit = dataclasses.replace(CPU, num_bytes=2_000_000)
    config = TrainConfig(model=SHAPE, shard=shard, batch=1200)
    with pytest.raises(ConfigError, match="Use a smaller --batch or --context, a larger --accumulate, or --recompute"):
        check_memory(config, num_ranks, limit)
    least = least_bytes(config, num_ranks)
    most = (limit.num_bytes - least.state + least.gradients) // least.per_sequence
    parts = config.batch // least.num_sequences
    check_memory(dataclasses.replace(config, batch=most * parts), num_ranks, limit)
    with pytest.raises(ConfigError):
        check_memory(dataclasses.replace(config, batch=(most + 1) * parts), num_ranks, limit)


def test_shards_that_are_offloaded_are_held_by_the_host() -> None:
    config = TrainConfig(model=SHAPE, batch=1, offload=True)
    state = least_bytes(config, 1).state
    least = least_bytes(config, 1).per_sequence
    check_memory(config, 1, MemoryLimit(least, state, "a GPU"))
    with pytest.raises(ConfigError, match="parameters with their gradients"):
        check_memory(config, 1, MemoryLimit(10 * state, state - 1, "a GPU"))
    with pytest.raises(ConfigError, match="a microbatch of 1 sequence"):
        check_memory(config, 1, MemoryLimit(least - 1, state, "a GPU"))


def test_a_model_over_more_tokens_needs_more() -> None:
    few, many = (least_bytes(TrainConfig(model=SHAPE), 1, vocabulary) for vocabulary in (NUM_BYTES, 50_000))
    assert isinstance(few, LeastBytes)
    assert many.state > few.state
    assert many.per_sequence - few.per_sequence == SHAPE.context * 8 * (50_000 - NUM_BYTES)

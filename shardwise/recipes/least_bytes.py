"""The least memory that a training step can take, from sizes alone, so that what cannot fit is refused before ranks start.

A lower bound that counts what is certain: parameters, gradients and AdamW's state in fp32, what autograd keeps of a
microbatch, and the logits.  What fits by it may still not fit; what does not fit by it never will.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.recipes.config import ENGINE_SHARDS, NUM_BYTES, ModelShape, TrainConfig, data_ranks
from shardwise.recipes.held_bytes import format_bytes

_FP32, _INT64 = 4, 8
_TRIES = 10_000
_KINDS_OF_STATE = 4  # a parameter, its gradient, and AdamW's two averages


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory that one rank may take.

    Attributes:
        num_bytes: for the computation: of its GPU, or of the host divided by the ranks there.
        host_bytes: of the host divided by the ranks there, where --offload keeps shards and state of a GPU; None for CPU ranks,
            which have all in one place.
        place: what it is, in words.
    """

    num_bytes: int
    host_bytes: int | None
    place: str


@dataclass(frozen=True, slots=True)
class LeastBytes:
    """What a rank takes at least.

    Attributes:
        state: parameters, gradients and optimizer state.
        gradients: the part of ``state`` that is not there yet while activations are.
        per_sequence: what one sequence of a microbatch keeps until its backward.
        num_sequences: of a microbatch.
    """

    state: int
    gradients: int
    per_sequence: int
    num_sequences: int


def count_gpt_parameters(shape: ModelShape, vocabulary: int) -> int:
    """Return how many parameters the GPT of ``shape`` has over ``vocabulary`` tokens."""
    width = shape.width
    block = 12 * width**2 + 13 * width
    return shape.layers * block + width * (2 * vocabulary + shape.context + 2)


def least_bytes(config: TrainConfig, num_ranks: int, vocabulary: int = NUM_BYTES) -> LeastBytes:
    """Return what each of ``num_ranks`` ranks takes at least; of a model of the user's own the logits alone are known."""
    num_sequences = config.batch // (data_ranks(config, num_ranks) * config.accumulate)
    around = config.model.context * (2 * _INT64 + 2 * _FP32 * vocabulary)  # tokens, targets, logits, their log-softmax
    if config.model_from is not None:
        return LeastBytes(0, 0, around, num_sequences)
    state_shards, gradient_shards = _shards(config, num_ranks)
    each = _FP32 * count_gpt_parameters(config.model, vocabulary)
    parameters = each // state_shards if config.shard in ENGINE_SHARDS else each
    gradients = each // gradient_shards
    averages = (_KINDS_OF_STATE - 2) * each // state_shards
    sequence = around + config.model.context * _kept_of_token(config)
    return LeastBytes(parameters + gradients + averages, gradients, sequence, num_sequences)


def _shards(config: TrainConfig, num_ranks: int) -> tuple[int, int]:
    """Return over how many ranks optimizer state (and an engine's parameters) and gradients are divided, at most."""
    if config.shard in ("full", "hybrid"):
        shards = num_ranks // (config.replicas if config.shard == "hybrid" else 1)
        return shards, shards
    if config.shard == "replicate":
        return config.tp, config.tp
    return (1 if config.shard == "none" else num_ranks), (num_ranks if config.shard == "gradients" else 1)


def _kept_of_token(config: TrainConfig) -> int:
    """Return the bytes that autograd keeps of a token in all blocks.

    Of a block: inputs of both norms, of qkv and of the MLP's first layer (four times the width, whole on every rank); query,
    key, value, the result of attention and the MLP between its layers, before and after GELU (twelve times, divided by --tp).
    """
    width, layers = config.model.width, config.model.layers
    block = 4 * width + 12 * width // config.tp
    kept = (layers - 1) * width + block if config.recompute else layers * block
    return (2 if config.dtype == "bf16" else _FP32) * (kept + 2 * width)


def check_room(config: TrainConfig, num_ranks: int, room: MemoryLimit, vocabulary: int = NUM_BYTES) -> None:
    """Refuse sizes that cannot fit into the memory of a rank.  Raises: ConfigError that names the option to change."""
    least = least_bytes(config, num_ranks, vocabulary)
    host_bytes = room.host_bytes if config.offload else None
    if least.state > (room.num_bytes if host_bytes is None else host_bytes):
        raise ConfigError(
            f"{_sizes(config.model)}: {count_gpt_parameters(config.model, vocabulary):,} parameters with their gradients and "
            f"AdamW's state take at least {format_bytes(least.state)} on each of {num_ranks} rank(s) with --shard "
            f"{config.shard}, and {room.place}. Use a smaller one of these, more ranks with --shard full, or more memory."
        )
    state = least.state - least.gradients if host_bytes is None else 0
    needed = state + least.num_sequences * least.per_sequence
    if needed <= room.num_bytes:
        return
    found = (
        f"--batch {config.batch}: a microbatch of {least.num_sequences:,} sequence(s) on each of {num_ranks} rank(s) takes at "
        f"least {format_bytes(needed)}, and {room.place}."
    )
    most = max(0, room.num_bytes - state) // least.per_sequence
    if not most:
        less = "a smaller --context or --width" + ("" if config.recompute else ", or --recompute")
        raise ConfigError(f"{found} Not even one fits. Use {less}.")
    parts = data_ranks(config, num_ranks)
    fitting = most * parts * config.accumulate
    accumulate = _fitting_accumulate(config.batch // parts, most)
    raise ConfigError(f"{found} Use --batch {fitting} or less, or {accumulate}.")


def _fitting_accumulate(num_sequences: int, most: int) -> str:
    """Return the smallest --accumulate that cuts a rank's part of the batch into equal microbatches of ``most`` or fewer."""
    least = math.ceil(num_sequences / most)
    found = next((number for number in range(least, least + _TRIES) if num_sequences % number == 0), None)
    return f"a larger --accumulate, {least} at least" if found is None else f"--accumulate {found}"


def _sizes(shape: ModelShape) -> str:
    return f"--layers {shape.layers} --width {shape.width} --context {shape.context}"

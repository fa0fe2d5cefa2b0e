"""The memory of a rank, and what an unsharded run would need."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import Trace, trace
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.recipes.config import ENGINE_SHARDS, NUM_BYTES, ModelShape, TrainConfig, data_ranks

# ---- Traces of some steps of a run.

StepWatch = Callable[[int], AbstractContextManager[None]]


def traced_steps(model: nn.Module | None, steps: int, write: Callable[[Trace], None]) -> StepWatch:
    """Return a callback that traces steps 1 to ``steps`` (0-based; the first one warms up) and then calls ``write``."""
    stack = ExitStack()
    traces: list[Trace] = []

    @contextmanager
    def watch(number: int) -> Generator[None, None, None]:
        if number == 1:
            traces.append(stack.enter_context(trace(model)))
        try:
            yield
        except BaseException:
            stack.close()
            raise
        if number == steps and traces:
            stack.close()
            write(traces.pop())

    return watch


# ---- What a rank holds between passes.


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """The memory of one rank.  ``peak_bytes`` is the peak resident set on CPU, the allocator's peak on a GPU."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def fold_held(fold: Callable[[Iterable[int]], int], held: Sequence[HeldBytes]) -> HeldBytes:
    """Reduce each figure over ranks: ``fold_held(max, held)`` is the largest of each."""
    return HeldBytes(*map(fold, zip(*map(astuple, held), strict=True)))


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the local parts; a shared tensor counts once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in distinct.values()]
    return sum(part.numel() * part.element_size() for part in parts)


def measure_held(model: nn.Module, optimizer: Optimizer) -> HeldBytes:
    """Measure this rank's current memory; gradients exist only between backward and zero_grad.

    ``optimizer``: the one with this rank's state.
    """
    states = (value for state in optimizer.state.values() for value in state.values())
    return HeldBytes(
        parameter_bytes=local_bytes(model.parameters()),
        gradient_bytes=local_bytes(p.grad for p in model.parameters() if p.grad is not None),
        optimizer_bytes=local_bytes(value for value in states if isinstance(value, Tensor)),
    )


def unsharded_of(model: nn.Module) -> HeldBytes:
    """Return one rank's memory of ``model`` without sharding: AdamW's two averages are in the dtypes of the parameters."""
    params = {id(param): param for param in model.parameters()}.values()
    trained = local_bytes(param for param in params if param.requires_grad)
    return HeldBytes(local_bytes(params), trained, 2 * trained)


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak: of the CUDA allocator, or of resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# ---- The least memory of a training step, from sizes only, to refuse before ranks start what cannot fit.
# A lower bound that counts what is certain: parameters, gradients and AdamW's state in fp32, what autograd saves of a
# microbatch, and the logits. What fits by this bound may still not fit; what does not fit by it never will.

_FP32, _INT64 = 4, 8
_KINDS_OF_STATE = 4  # a parameter, its gradient, and AdamW's two averages


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory available to one rank.

    Attributes:
        num_bytes: for the computation: of its GPU, or of the host divided by the ranks there.
        host_bytes: of the host divided by the ranks there, for shards and state with --offload; None for CPU ranks,
            whose memory is all in one place.
        place: a description of it.
    """

    num_bytes: int
    host_bytes: int | None
    place: str


@dataclass(frozen=True, slots=True)
class LeastBytes:
    """The least memory of a rank.

    Attributes:
        state: parameters, gradients and optimizer state.
        gradients: the part of ``state`` that does not exist yet while activations do.
        per_sequence: what one sequence of a microbatch saves until its backward.
        num_sequences: of a microbatch.
    """

    state: int
    gradients: int
    per_sequence: int
    num_sequences: int


def count_gpt_parameters(shape: ModelShape, vocabulary: int) -> int:
    """Return how many parameters the GPT of ``shape`` has over ``vocabulary`` tokens."""
    width = shape.width
    mlp, router = 8 * width**2 + 5 * width, shape.experts * width
    block = 4 * width**2 + 8 * width + max(shape.experts, 1) * mlp + router
    return shape.layers * block + width * (2 * vocabulary + shape.context + 2)


def least_bytes(config: TrainConfig, num_ranks: int, vocabulary: int = NUM_BYTES) -> LeastBytes:
    """Return the least memory of each of ``num_ranks`` ranks; for a model of the user, only the logits are known."""
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
    if config.shard in ("zero3", "hsdp", "zero2"):
        shards = num_ranks // (config.replicas if config.shard == "hsdp" else 1)
        return shards, shards
    if config.shard == "ddp":
        return config.tp, config.tp
    return (1 if config.shard == "none" else num_ranks), 1


def _kept_of_token(config: TrainConfig) -> int:
    """Return the bytes that autograd saves of a token in all blocks.

    Of a block: inputs of both norms, of qkv and of the MLP's first layer (four times the width, on every rank); query,
    key, value, the result of attention and the MLP between its layers, before and after GELU (twelve times, divided by
    --tp).
    """
    width, layers = config.model.width, config.model.layers
    block = 4 * width + 12 * width // config.tp
    kept = (layers - 1) * width + block if config.recompute else layers * block
    return (2 if config.dtype == "bf16" else _FP32) * (kept + 2 * width)


def check_memory(config: TrainConfig, num_ranks: int, limit: MemoryLimit, vocabulary: int = NUM_BYTES) -> None:
    """Refuse sizes that cannot fit into the memory of a rank.  Raises: ConfigError with the option to change."""
    least = least_bytes(config, num_ranks, vocabulary)
    host_bytes = limit.host_bytes if config.offload else None
    if least.state > (limit.num_bytes if host_bytes is None else host_bytes):
        raise ConfigError(
            f"{_sizes(config.model)}: {count_gpt_parameters(config.model, vocabulary):,} parameters with their gradients and "
            f"AdamW's state take at least {format_bytes(least.state)} on each of {num_ranks} rank(s) with --shard "
            f"{config.shard}, and {limit.place}. Use a smaller one of these, more ranks with --shard zero3, or more memory."
        )
    state = least.state - least.gradients if host_bytes is None else 0
    needed = state + least.num_sequences * least.per_sequence
    if needed > limit.num_bytes:
        raise ConfigError(
            f"--batch {config.batch}: a microbatch of {least.num_sequences:,} sequence(s) on each of {num_ranks} rank(s) takes "
            f"at least {format_bytes(needed)}, and {limit.place}. Use a smaller --batch or --context, a larger "
            "--accumulate, or --recompute."
        )


def _sizes(shape: ModelShape) -> str:
    return f"--layers {shape.layers} --width {shape.width} --context {shape.context}"

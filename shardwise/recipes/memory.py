"""The memory of a rank, and what an unsharded run would need."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.recipes.config import ModelShape, TrainConfig, data_ranks

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


def count_gpt_parameters(shape: ModelShape, vocabulary: int) -> int:
    """Return how many parameters the GPT of ``shape`` has over ``vocabulary`` tokens."""
    width = shape.width
    mlp, router = 8 * width**2 + 5 * width, shape.experts * width
    block = 4 * width**2 + 8 * width + max(shape.experts, 1) * mlp + router
    return shape.layers * block + width * (2 * vocabulary + shape.context + 2)


_STATE_BYTES, _TOKEN_BYTES = (
    4 * 4,
    2 * 8,
)  # fp32: a parameter, its gradient, AdamW's averages; int64: a token, its target


def check_memory(config: TrainConfig, num_ranks: int, limit_bytes: int, place: str, vocabulary: int) -> None:
    """Refuse sizes that take more than ``limit_bytes`` of a rank by what is certain: state, sharded fully, and logits.

    ``place``: the limit in words.  Raises: ConfigError with the options to change.
    """
    num_sequences = config.batch // (data_ranks(config, num_ranks) * config.accumulate)
    parameters = 0 if config.model_from is not None else count_gpt_parameters(config.model, vocabulary)
    least = _STATE_BYTES * parameters // num_ranks
    least += num_sequences * config.model.context * (_TOKEN_BYTES + 2 * 4 * vocabulary)  # logits, their log-softmax
    if least > limit_bytes:
        raise ConfigError(
            f"{parameters:,} parameters with their gradients and AdamW's state, and the logits of {num_sequences:,} "
            f"sequence(s), take at least {format_bytes(least)} on each of {num_ranks} rank(s), and {place}. Use a smaller "
            "model, --batch or --context, a larger --accumulate, or more memory; --plan says what a run takes."
        )

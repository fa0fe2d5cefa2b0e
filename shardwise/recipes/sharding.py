"""The values of ``--shard``: for each, how to wrap the model, build its optimizer, reduce and sync.

A new one is a branch of :func:`wrap` and a line in the help of ``recipes/config.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from shardwise import (
    CPUOffloadPolicy,
    FSDPModule,
    MemoryLimit,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimizerOffload,
    ShardedOptimizer,
    ZeroRedundancyOptimizer,
    fully_shard,
    policy,
    replicate,
    shard_model,
)
from shardwise.checkpoint import CheckpointError, load
from shardwise.collectives.routes import check_transport
from shardwise.consistency.failure_report import naming_lost_peers
from shardwise.consistency.process_groups import gather_rows
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.fsdp.api import blocks_of as repeated_blocks_of
from shardwise.one_host import peak_resident_bytes
from shardwise.recipes.config import ModelShape, TrainConfig, data_ranks, microbatches_per_rank
from shardwise.recipes.data import first_line
from shardwise.recipes.gpt import GPT, Experts, GPTBlock, logits_of

# ---- The exchanges between ranks that a training loop needs in addition to its gradients.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunRanks:
    """The position of this process: its rank, the number of ranks, and its device, in the default process group.

    ``tp`` neighbours at a time form a tensor-parallel group: they share a part of the batch, ``data_rank`` of
    ``num_data_ranks``.
    """

    rank: int
    num_ranks: int
    device: torch.device
    tp: int = 1

    @property
    def data_rank(self) -> int:
        return self.rank // self.tp

    @property
    def num_data_ranks(self) -> int:
        return self.num_ranks // self.tp

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, values: Sequence[torch.Tensor]) -> list[float]:
        """Return each value's mean over ranks, summed in rank order so that it does not depend on the transport."""
        return [total / self.num_ranks for total in self.total(values)]

    def total(self, values: Sequence[torch.Tensor]) -> list[float]:
        """Return each value's sum over ranks, added in rank order in fp64.  Shape: every value is ()."""
        rows = self._rows(torch.stack([value.detach().double().cpu() for value in values]))
        return torch.tensor(rows, dtype=torch.float64).cumsum(0)[-1].tolist()

    def highest(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each value over ranks."""
        return [max(map(int, column)) for column in zip(*self._rows(torch.tensor(values)), strict=True)]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank.  Values are JSON: nothing that a rank sends is executed."""
        mine = json.dumps(value).encode()
        sizes = [int(size) for (size,) in self._rows(torch.tensor([len(mine)]))]
        row = torch.zeros(max(sizes), dtype=torch.uint8)
        row[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return [json.loads(bytes(map(int, part[:size]))) for part, size in zip(self._rows(row), sizes, strict=True)]

    def from_first(self, value: T | None) -> T:
        """Return rank 0's value on every rank; the others pass None.  Values are JSON."""
        found = self.gather(value)[0]
        assert found is not None
        return found

    def _rows(self, mine: torch.Tensor) -> list[list[float]]:
        what = "ranks cannot tell each other where they are"
        return naming_lost_peers(lambda: gather_rows(mine), what, range(self.num_ranks), self.rank)


# ---- ``--model-from module:function``: a model of the user, built equally on every rank; ``--init``: initial weights.


def check_module(source: str, option: str = "--model-from") -> None:
    """Refuse a module that Python does not find; nothing is executed but its parent packages.  Raises: ConfigError."""
    name = source.partition(":")[0]
    here = os.getcwd()  # which an installed command does not search
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"{option} {source}: there is no module {name!r} in this folder, nor installed. Start from the folder "
            f"that has {name.replace('.', '/')}.py."
        )


def named(source: str, option: str = "--model-from") -> Any:
    """Return what MODULE:NAME names.  Raises: ConfigError if there is none; what the module raises when it is imported."""
    check_module(source, option)
    module, _, name = source.partition(":")
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise ConfigError(f"{option} {source}: the module has no such name.")
    return getattr(found, name)


def build_own(model_from: str, seed: int, vocabulary: int, context: int) -> nn.Module:
    """Return the model that the user's function builds, with torch's generator seeded.

    The function gets ``vocabulary`` and ``context`` if it has parameters of these names.
    Raises: ConfigError if it does not exist, cannot be called like this, or returns no module; its own exceptions.
    """
    function = named(model_from)
    if not callable(function):
        raise ConfigError(
            f"--model-from {model_from}: the module has a {type(function).__name__} there, expected a function that returns a "
            "torch.nn.Module."
        )
    parameters = inspect.signature(function).parameters
    given = {key: value for key, value in (("vocabulary", vocabulary), ("context", context)) if key in parameters}
    missing = [
        each.name
        for each in parameters.values()
        if each.default is each.empty
        and each.name not in given
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if missing:
        raise ConfigError(
            f"--model-from {model_from}: the function needs {', '.join(missing)}, but gets only vocabulary and context. "
            "Give the others defaults, or name a function that fills them in."
        )
    torch.manual_seed(seed)
    model = function(**given)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model-from {model_from} returned a {type(model).__name__}, expected a torch.nn.Module.")
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(f"--model-from {model_from} returned a model without parameters that require gradients.")
    return model


def try_own(model: nn.Module, model_from: str, vocabulary: int, window: Tensor) -> None:
    """Refuse a model that does not map tokens to logits over all of ``vocabulary``, before it is sharded.

    Shape: ``window`` (1, context) int64, on the model's device; one forward, without gradients.
    Raises: ConfigError.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output = model(window.fill_(vocabulary - 1))
    except Exception as error:
        raise ConfigError(
            f"--model-from {model_from}: the model failed on int64 tokens of shape {tuple(window.shape)}, all "
            f"{vocabulary - 1}, the highest of this text ({type(error).__name__}: {first_line(error)}). "
            f"Build it for vocabulary={vocabulary}."
        ) from error
    finally:
        model.train(was_training)
    size = logits_of(output, window).shape[2]
    if size < vocabulary:
        raise ConfigError(
            f"--model-from {model_from}: the model has logits for {size} tokens, the text has {vocabulary}."
        )


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the blocks of a model that are sharded and compiled separately; none if it has no repeated ones."""
    return list(model.blocks) if isinstance(model, GPT) else list(repeated_blocks_of(model).values())


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the experts of the GPT, each of which becomes a unit."""
    return [expert for module in model.modules() if isinstance(module, Experts) for expert in module.experts]


def load_init(path: str, plain: nn.Module) -> None:
    """Load safetensors weights, a file or a folder with ``model.safetensors`` or its index.  Collective.

    Raises: ConfigError on every rank, before any change, with the names or shapes that differ from the model's.
    """
    try:
        load(Path(path), {"model": plain})
    except CheckpointError as error:
        raise ConfigError(f"--init {path} does not fit the model: {' '.join(str(error).split())}") from error


# ---- Changes of the GPT before it is sharded: heads split over ranks (--tp), blocks compiled (--compile).


def build_meshes(config: TrainConfig, ranks: RunRanks) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the meshes of data and of tensor parallelism for the options, which ``check_ranks`` has checked.  Collective."""
    num_data = ranks.num_ranks // config.tp
    if config.shard == "hsdp":
        names, sizes = ("replicate", "shard"), (config.replicas, num_data // config.replicas)
    else:
        names, sizes = ("dp",), (num_data,)
    if config.tp == 1:
        return init_device_mesh(ranks.device.type, sizes, mesh_dim_names=names), None
    mesh = init_device_mesh(ranks.device.type, (*sizes, config.tp), mesh_dim_names=(*names, "tp"))
    return mesh[names if len(names) > 1 else names[0]], mesh["tp"]


HEADS: Mapping[str, ParallelStyle] = MappingProxyType(
    {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
)
LLAMA_HEADS: Mapping[str, ParallelStyle] = MappingProxyType(
    {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    | {"attention.out": RowwiseParallel()}
    | {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
)


def split_heads(model: GPT, mesh: DeviceMesh) -> None:
    """Give each rank of ``mesh`` its heads of every attention and its columns of every MLP (tensor parallelism).

    Source: Megatron-LM, arXiv 1909.08053: one all-reduce after attention and one after the MLP, in forward and backward.
    """
    for block in model.blocks:
        parallelize_module(block, mesh, dict(HEADS))


def compile_blocks(model: nn.Module, backend: str) -> None:
    """Compile the attention and the MLP of every block, inside its unit, so that gathers are outside the graphs.

    In a model of the user, compile the parts of its repeated blocks.
    """
    for block in blocks_of(model):
        for part in (block.attention, block.mlp) if isinstance(block, GPTBlock) else block.children():
            part.compile(backend=backend)


_UNDER_DDP = ("zero1", "none")  # the values of --shard that are under torch's DDP


def param_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Return groups with weight decay on matrices only, one per mesh: a fused update takes tensors of one mesh."""
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for param in model.parameters():
        if not param.requires_grad:
            continue
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        groups.setdefault((param.dim() >= 2, mesh), []).append(param)
    return [
        {"params": params, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in groups.items()
    ]


def build_optimizer(model: nn.Module, config: TrainConfig, offload: OptimizerOffload | None = None) -> Optimizer:
    """Return AdamW for what :func:`wrap` returned: one fused update per group, or per unit with ``offload``.

    With --reproducible its bits do not depend on how parameters are cut.  Under ZeRO-1 every rank stores and updates the same
    number of elements of its state.
    """
    fixed = bool(config.reproducible)
    options: dict[str, Any] = {"lr": config.lr, "betas": (0.9, 0.95), "fused": not fixed, "foreach": fixed}
    groups = param_groups(model, config)
    if config.shard == "zero1":
        return ZeroRedundancyOptimizer(groups, AdamW, partition="even", **options)
    if offload is None:
        return AdamW(groups, **options)
    return ShardedOptimizer(dict(model.named_parameters()), AdamW, groups=groups, offload=offload, **options)


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with this rank's state."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def wrap(model: nn.Module, config: TrainConfig, mesh: DeviceMesh, memory: MemoryLimit | None = None) -> nn.Module:
    """Return the model as --shard trains it.

    Args:
        model: on its device, with heads split and parts compiled.  mesh: the data-parallel one.
        memory: what --memory allows.
    """
    if config.shard in _UNDER_DDP:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)  # otherwise gradients would exist twice
    precision = MixedPrecisionPolicy()
    if config.dtype == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if config.offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    if config.shard == "ddp":
        for module in (*experts_of(model), *blocks_of(model), model):
            replicate(module, **options)
        wrapped = cast(FSDPModule, model)
    else:
        options["strategy"] = "zero2" if config.shard == "zero2" else None
        for expert in experts_of(model):
            fully_shard(expert, **options)
        wrapped = shard_model(model, min_unit_bytes=config.min_unit_bytes, memory=memory, **options)
    wrapped.set_transport(check_transport(config.transport))
    if config.model.experts:
        wrapped.set_allow_rank_divergence(True)
    return wrapped


def plain_of(model: nn.Module) -> nn.Module:
    """Return the module itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def syncing(model: nn.Module, on: bool) -> AbstractContextManager[None]:
    """Return a context whose backward reduces gradients if ``on``."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if on else model.no_sync()
    return policy(model, sync=on)


def precision_of(config: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return a context around forward; our engine casts by itself."""
    is_cast = config.shard in _UNDER_DDP and config.dtype == "bf16"
    return torch.autocast(device.type, torch.bfloat16) if is_cast else nullcontext()


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


def measure_held(model: nn.Module, optimizer: Optimizer, on_disk: bool = False) -> HeldBytes:
    """Measure this rank's current memory; gradients exist only between backward and zero_grad.

    ``optimizer``: the one with this rank's state; ``on_disk``: which a look at it would bring into memory.
    """
    states = [] if on_disk else [value for state in optimizer.state.values() for value in state.values()]
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
    return peak_resident_bytes()


# ---- The least memory of a training step, from sizes only, to refuse before ranks start what cannot fit.


def count_gpt_parameters(shape: ModelShape, vocabulary: int) -> int:
    """Return how many parameters the GPT of ``shape`` has over ``vocabulary`` tokens."""
    width = shape.width
    mlp, router = 8 * width**2 + 5 * width, shape.experts * width
    block = 4 * width**2 + 8 * width + max(shape.experts, 1) * mlp + router
    return shape.layers * block + width * (2 * vocabulary + shape.context + 2)


# fp32: a parameter, its gradient, AdamW's averages; int64: a token, its target
_STATE_BYTES, _TOKEN_BYTES = 4 * 4, 2 * 8


def check_memory(config: TrainConfig, num_ranks: int, limit_bytes: int, place: str, vocabulary: int) -> None:
    """Refuse sizes that take more than ``limit_bytes`` of a rank by what is certain: state, sharded fully, and logits.

    ``place``: the limit in words.  Raises: ConfigError with the options to change.
    """
    num_parts = data_ranks(config, num_ranks)
    num_sequences = config.batch // (num_parts * microbatches_per_rank(config, num_parts))
    parameters = 0 if config.model_from is not None else count_gpt_parameters(config.model, vocabulary)
    least = _STATE_BYTES * parameters // num_ranks
    least += num_sequences * config.model.context * (_TOKEN_BYTES + 2 * 4 * vocabulary)  # logits, their log-softmax
    if least > limit_bytes:
        raise ConfigError(
            f"{parameters:,} parameters with their gradients and AdamW's state, and the logits of {num_sequences:,} "
            f"sequence(s), take at least {format_bytes(least)} on each of {num_ranks} rank(s), and {place}. Use a smaller "
            "model, --batch or --context, a larger --accumulate, or more memory; --plan says what a run takes."
        )

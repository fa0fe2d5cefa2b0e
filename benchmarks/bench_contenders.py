"""The contenders of a benchmark: what they share, how each wraps the model, and which optimizer steps it."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from shardwise import (
    FSDPModule,
    MixedPrecisionPolicy,
    ShardedOptimizer,
    ZeroRedundancyOptimizer,
    fully_shard,
    reference,
    replicate,
    shard_model,
)
from shardwise.errors import ConfigError
from shardwise.recipes.config import ModelShape
from shardwise.recipes.gpt import GPT, NUM_BYTES, build_gpt

# ---- The configuration of a benchmark, checked before any process starts.

BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True, slots=True)
class BenchShape:
    """A GPT, and how many neighbouring blocks torch's FSDP2 shards as one when it is tuned by hand."""

    model: ModelShape
    grouped_blocks: int


SHAPES: Mapping[str, BenchShape] = MappingProxyType(
    {
        "small": BenchShape(ModelShape(layers=4, width=128, heads=4, context=64), grouped_blocks=2),
        "wide": BenchShape(ModelShape(layers=8, width=512, heads=8, context=256), grouped_blocks=1),
        "deep": BenchShape(ModelShape(layers=64, width=64, heads=4, context=256), grouped_blocks=8),
    }
)


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One benchmark: ``names`` of contenders step a GPT of ``shape`` (a name of SHAPES) on ``ranks`` ranks of one host.

    ``batch`` counts sequences per rank and step; ``backend`` is "gloo" (CPU) or "nccl" (CUDA, one GPU per rank).
    ``alone``: each contender is timed in processes of its own, not in turns with the others.
    """

    shape: str
    ranks: int
    batch: int
    rounds: int
    backend: str
    seed: int
    names: tuple[str, ...]
    alone: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one step."""
        return self.batch * SHAPES[self.shape].model.context * self.ranks

    @property
    def label(self) -> str:
        """The stem of the files that hold the results."""
        return f"bench_{self.shape}_w{self.ranks}_{self.backend}"


def settle_ranks(backend: str, ranks: int | None, num_gpus: int, num_cores: int) -> tuple[str, int]:
    """Return the backend and the number of ranks: as requested, else every GPU over NCCL, else up to 2 cores over gloo.

    Raises: ConfigError if NCCL is requested, or chosen because there are GPUs, and there is not a GPU for every rank.
    """
    chosen = backend if backend != "auto" else ("nccl" if num_gpus else "gloo")
    if chosen == "gloo":
        return chosen, ranks or min(2, num_cores)
    if num_gpus == 0:
        raise ConfigError("--backend nccl: torch finds no GPU on this host. Use --backend gloo, which runs on the CPU.")
    if ranks is not None and ranks > num_gpus:
        raise ConfigError(
            f"--ranks {ranks}: this host has {num_gpus} GPU(s), and NCCL refuses ranks that share one. "
            f"Use --ranks {num_gpus}, or --backend gloo, which runs on the CPU."
        )
    return chosen, ranks or num_gpus


LR = 1e-3


@dataclass(frozen=True, slots=True)
class Setup:
    """What all contenders of one rank share: shape, device, the 1-D mesh of all ranks, and this rank's batch.

    Shape: ``tokens`` (batch, context + 1) int64; the last context of them are the targets of the first.
    """

    shape: BenchShape
    seed: int
    device: torch.device
    mesh: DeviceMesh
    tokens: Tensor

    def build_model(self) -> GPT:
        """Return a new model on the device, the same on every rank."""
        return build_gpt(self.shape.model, self.seed).to(self.device)

    def hybrid_mesh(self) -> DeviceMesh:
        """Return the mesh of two replicas, each sharded over half of the ranks.  Collective."""
        sizes = (2, self.mesh.size() // 2)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", "shard"))


def make_setup(config: BenchConfig) -> Setup:
    """Choose this rank's device and draw its batch.  Collective."""
    rank = dist.get_rank()
    device = torch.device("cpu")
    if config.backend == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    shape = SHAPES[config.shape]
    generator = torch.Generator().manual_seed(1000 * config.seed + rank)
    tokens = torch.randint(0, NUM_BYTES, (config.batch, shape.model.context + 1), generator=generator)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    return Setup(shape, config.seed, device, mesh, tokens.to(device))


def count_parameters(shape: ModelShape) -> int:
    """Return how many elements the parameters of a GPT have, without allocating them."""
    with torch.device("meta"):
        return sum(param.numel() for param in GPT(shape).parameters())


def adamw(model: nn.Module, fused: bool | None = None) -> Optimizer:
    """Return AdamW, by default in torch's default implementation."""
    return AdamW(model.parameters(), lr=LR, fused=fused)


# ---- torch's own sharding, imported only here and only to be measured.


def _fsdp2_blocks(model: GPT, setup: Setup, dtype: torch.dtype | None = None) -> nn.Module:
    """FSDP2 as its documentation shows it: every block, then the rest; computed and communicated in ``dtype``."""
    from torch.distributed import fsdp

    for module in (*model.blocks, model):
        fsdp.fully_shard(module, mesh=setup.mesh, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=dtype))
    return model


def _fsdp2_tuned(model: GPT, setup: Setup) -> nn.Module:
    """FSDP2 tuned by hand: small neighbouring blocks as one unit, each prefetching the next."""
    from torch.distributed import fsdp

    blocks = cast("Sequence[nn.Module]", model.blocks)
    size = setup.shape.grouped_blocks
    groups = [list(blocks[start : start + size]) for start in range(0, len(blocks), size)]
    for group in groups:
        fsdp.fully_shard(group if len(group) > 1 else group[0], mesh=setup.mesh)
    fsdp.fully_shard(model, mesh=setup.mesh)
    heads = [cast(fsdp.FSDPModule, group[0]) for group in groups]
    cast(fsdp.FSDPModule, model).set_modules_to_forward_prefetch(heads[:1])
    for this, following in pairwise(heads):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])
    return model


def _torch_zero_adamw(model: nn.Module, is_view: bool = False) -> Optimizer:
    """Return torch's ZeroRedundancyOptimizer over AdamW; with ``is_view`` parameters lie in its flat buffers."""
    from torch.distributed import optim

    return optim.ZeroRedundancyOptimizer(model.parameters(), AdamW, parameters_as_bucket_view=is_view, lr=LR)


def load_torchs_own() -> None:
    """Import what the functions above import, so that it does not count as memory of the contender that needs it."""
    for name in ("torch.distributed.fsdp", "torch.distributed.optim"):
        importlib.import_module(name)


# ---- The table of contenders: how each wraps the model, which optimizer steps it, and its transport.

Family = Literal["local", "DDP", "ZeRO", "FSDP2", "shardwise"]
Transport = Literal["auto", "gloo"]
Sharded = Literal["nothing", "state", "everything"]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train the GPT.

    ``wrap`` gets the model on its device; ``refusal(ranks, backend)`` returns why this cannot run there, or None.
    ``sharded``: what is sharded over ranks.  ``dtype`` is that of the computation, and decides how closely losses must
    agree.
    """

    name: str
    family: Family
    sharded: Sharded
    wrap: Callable[[GPT, Setup], nn.Module]
    build_optimizer: Callable[[nn.Module], Optimizer]
    dtype: Literal["fp32", "bf16"] = "fp32"
    transport: Transport = "auto"
    refusal: Callable[[int, str], str | None] = lambda ranks, backend: None


@dataclass(frozen=True, slots=True)
class Trained:
    """A contender that is ready to step."""

    contender: Contender
    model: nn.Module
    optimizer: Optimizer


def build_trained(contender: Contender, model: GPT, setup: Setup) -> Trained:
    """Wrap ``model`` and build its optimizer.  Collective."""
    wrapped = contender.wrap(model, setup)
    if isinstance(wrapped, FSDPModule):  # "auto": shared memory within a host; "gloo": every byte through the network
        wrapped.set_transport(contender.transport)
    return Trained(contender, wrapped, contender.build_optimizer(wrapped))


def _shard_blocks(model: GPT, setup: Setup) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=setup.mesh)
    return fully_shard(model, mesh=setup.mesh)


def _shard_by_reference(model: GPT, setup: Setup) -> nn.Module:
    for block in model.blocks:
        reference.fully_shard(block, setup.mesh)
    return reference.fully_shard(model, setup.mesh)


def _shard_hybrid(model: GPT, setup: Setup) -> nn.Module:
    return _shard_blocks(model, replace(setup, mesh=setup.hybrid_mesh()))


def _shard_recommended(model: GPT, setup: Setup, dtype: torch.dtype | None = None) -> nn.Module:
    return shard_model(model, mesh=setup.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))


def _zero2(model: GPT, setup: Setup) -> nn.Module:
    return shard_model(model, strategy="zero2", mesh=setup.mesh)


def _replicate(model: GPT, setup: Setup) -> nn.Module:
    return replicate(model, mesh=setup.mesh)


def _replicate_whole(model: GPT, setup: Setup) -> nn.Module:
    replicate(model, process_group=setup.mesh.get_group())  # called like DDP: parameters stay plain tensors
    return model


def _recommended_adamw(model: nn.Module) -> Optimizer:
    return ShardedOptimizer(dict(model.named_parameters()), AdamW, lr=LR, fused=True)


def _zero_adamw(model: nn.Module, **options: Any) -> Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, partition="even", lr=LR, **options)


def _plain(model: GPT, setup: Setup) -> nn.Module:
    return model


def _plain_bf16(model: GPT, setup: Setup) -> nn.Module:
    return model.to(torch.bfloat16)


def _ddp(model: GPT, setup: Setup, has_views: bool = False) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=has_views)


def _needs_two_groups(ranks: int, backend: str) -> str | None:
    return None if ranks >= 4 and ranks % 2 == 0 else "two copies of two or more shards need an even number from 4"


def _needs_gloo(ranks: int, backend: str) -> str | None:
    return None if backend == "gloo" else f"{backend} leaves no choice of transport"


def _over_gloo(contender: Contender) -> Contender:
    return replace(contender, name=f"{contender.name} (gloo)", transport="gloo", refusal=_needs_gloo)


_fused_adamw, _fused_zero_adamw = partial(adamw, fused=True), partial(_zero_adamw, fused=True)
_shard_recommended_bf16 = partial(_shard_recommended, dtype=torch.bfloat16)
_ddp_views = partial(_ddp, has_views=True)
_FULL = Contender("shardwise full", "shardwise", "everything", _shard_blocks, adamw)
_RECOMMENDED = Contender("shardwise recommended", "shardwise", "everything", _shard_recommended, _recommended_adamw)
_ZERO_1 = Contender("shardwise ZeRO-1", "shardwise", "state", _ddp_views, _zero_adamw)
_ZERO_2 = Contender("shardwise ZeRO-2", "shardwise", "state", _zero2, adamw)

_ALL = (
    Contender("local", "local", "nothing", _plain, adamw),
    Contender("local + fused", "local", "nothing", _plain, _fused_adamw),
    Contender("local bf16", "local", "nothing", _plain_bf16, adamw, dtype="bf16"),
    Contender("DDP", "DDP", "nothing", _ddp, adamw),
    Contender("DDP + bucket view", "DDP", "nothing", _ddp_views, adamw),
    Contender("DDP + bucket view + fused", "DDP", "nothing", _ddp_views, _fused_adamw),
    Contender("torch ZeRO", "ZeRO", "state", _ddp, _torch_zero_adamw),
    Contender("torch ZeRO + bucket view", "ZeRO", "state", _ddp, partial(_torch_zero_adamw, is_view=True)),
    Contender("FSDP2", "FSDP2", "everything", _fsdp2_blocks, adamw),
    Contender("FSDP2 + fused", "FSDP2", "everything", _fsdp2_blocks, _fused_adamw),
    Contender("FSDP2 tuned", "FSDP2", "everything", _fsdp2_tuned, _fused_adamw),
    Contender("FSDP2 bf16", "FSDP2", "everything", partial(_fsdp2_blocks, dtype=torch.bfloat16), adamw, dtype="bf16"),
    Contender("shardwise reference", "shardwise", "everything", _shard_by_reference, adamw),
    _FULL,
    _over_gloo(_FULL),
    Contender("shardwise full + fused", "shardwise", "everything", _shard_blocks, _fused_adamw),
    Contender("shardwise hybrid", "shardwise", "everything", _shard_hybrid, adamw, refusal=_needs_two_groups),
    _RECOMMENDED,
    _over_gloo(_RECOMMENDED),
    replace(_RECOMMENDED, name="shardwise recommended bf16", wrap=_shard_recommended_bf16, dtype="bf16"),
    Contender("shardwise replicate", "shardwise", "nothing", _replicate, adamw),
    Contender("shardwise replicate + fused", "shardwise", "nothing", _replicate, _fused_adamw),
    Contender("shardwise replicate whole", "shardwise", "nothing", _replicate_whole, adamw),
    _ZERO_1,
    replace(_ZERO_1, name="shardwise ZeRO-1 + fused", build_optimizer=_fused_zero_adamw),
    _ZERO_2,
    replace(_ZERO_2, name="shardwise ZeRO-2 + fused", build_optimizer=_fused_adamw),
)
CONTENDERS: Mapping[str, Contender] = MappingProxyType({contender.name: contender for contender in _ALL})


def choose_names(patterns: Sequence[str] | None, ranks: int, backend: str) -> tuple[str, ...]:
    """Return the contenders that match any of ``patterns`` (``*`` and ``?`` allowed), in the table's order.

    None means all that can run on ``ranks`` ranks over ``backend``.  "local" is always among them: ratios are to it.
    Raises: ConfigError for a pattern that matches nothing, or nothing that can run here.
    """
    refusals = {name: contender.refusal(ranks, backend) for name, contender in CONTENDERS.items()}
    wanted = {"local"}
    for pattern in ("*",) if patterns is None else patterns:
        found = [name for name in CONTENDERS if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(f"--only {pattern!r} is not a contender. Known: {', '.join(map(repr, CONTENDERS))}.")
        able = [name for name in found if refusals[name] is None]
        if not able:
            reason = refusals[found[0]]
            raise ConfigError(f"--only {pattern!r} cannot run on {ranks} rank(s) over {backend}: {reason}.")
        wanted.update(able)
    return tuple(name for name in CONTENDERS if name in wanted)


# ---- A check that all contenders together fit into memory: they live in one process per rank while they are timed.

_STATE_BYTES, _OTHER_BYTES = 8, 8  # per element, fp32: the two averages of AdamW; the parameter and its gradient


def held_bytes(contender: Contender, num_parameters: int, ranks: int) -> float:
    """Return roughly one rank's memory of ``contender``: parameters, gradients and the state of AdamW, in fp32."""
    state = _STATE_BYTES / (1 if contender.sharded == "nothing" else ranks)
    rest = _OTHER_BYTES / (ranks if contender.sharded == "everything" else 1)
    return num_parameters * (state + rest)


def check_fit(config: BenchConfig, num_parameters: int, available_bytes: int) -> None:
    """Refuse a benchmark whose ranks would run out of memory, or swap.

    ``available_bytes``: for all ranks together.  Raises: ConfigError.
    """
    fold = max if config.alone else sum
    per_rank = fold(held_bytes(CONTENDERS[name], num_parameters, config.ranks) for name in config.names)
    needed = config.ranks * per_rank
    if needed > available_bytes:
        raise ConfigError(
            f"{1 if config.alone else len(config.names)} contenders at once on {config.ranks} rank(s) hold about "
            f"{needed / 1e9:.1f} GB, and {available_bytes / 1e9:.1f} GB are available. Choose some of them with --only, time "
            "each --alone, or use fewer --ranks."
        )

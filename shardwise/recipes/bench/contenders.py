"""The table of contenders: how each wraps the model, which optimizer steps it, and over which transport it talks."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from shardwise import (
    FSDPModule,
    MixedPrecisionPolicy,
    ShardedOptimizer,
    ZeroRedundancyOptimizer,
    fully_shard,
    replicate,
    shard_model,
)
from shardwise.errors import ConfigError
from shardwise.recipes.bench import torchs_own as peers
from shardwise.recipes.bench.setup import LR, BenchConfig, Setup, adamw, fused_adamw
from shardwise.recipes.gpt import GPT

Family = Literal["local", "DDP", "ZeRO", "FSDP2", "shardwise"]
Transport = Literal["auto", "gloo"]
Sharded = Literal["nothing", "state", "everything"]

_FP32, _BF16 = MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train the GPT.

    ``wrap`` gets the model on its device; ``reduce`` is called between backward and step; ``refusal(ranks, backend)``
    returns why this cannot run there, or None.  ``sharded``: what is sharded over ranks.  ``dtype`` is that of the
    computation, and decides how closely losses must agree.
    """

    name: str
    family: Family
    sharded: Sharded
    wrap: Callable[[GPT, Setup], nn.Module]
    build_optimizer: Callable[[nn.Module], Optimizer]
    reduce: Callable[[Optimizer], None] = lambda optimizer: None
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


def _shard_blocks(model: GPT, setup: Setup, precision: MixedPrecisionPolicy = _FP32) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=setup.mesh, mp_policy=precision)
    return fully_shard(model, mesh=setup.mesh, mp_policy=precision)


def _shard_hybrid(model: GPT, setup: Setup) -> nn.Module:
    return _shard_blocks(model, replace(setup, mesh=setup.hybrid_mesh()))


def _shard_recommended(model: GPT, setup: Setup, precision: MixedPrecisionPolicy = _FP32) -> nn.Module:
    return shard_model(model, mesh=setup.mesh, mp_policy=precision)


def _shard_recommended_bf16(model: GPT, setup: Setup) -> nn.Module:
    return _shard_recommended(model, setup, _BF16)


def _replicate_blocks(model: GPT, setup: Setup) -> nn.Module:
    for block in model.blocks:
        replicate(block, mesh=setup.mesh)
    replicate(model, mesh=setup.mesh)
    return model


def _replicate_whole(model: GPT, setup: Setup) -> nn.Module:
    replicate(model, process_group=setup.mesh.get_group())  # called like DDP: parameters stay plain tensors
    return model


def _recommended_adamw(model: nn.Module) -> Optimizer:
    return ShardedOptimizer(dict(model.named_parameters()), AdamW, lr=LR, fused=True)


def _zero_adamw(model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, partition="even", lr=LR)


def _zero_fused_adamw(model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, partition="even", lr=LR, fused=True)


def _reduce_to_owners(optimizer: Optimizer) -> None:
    cast(ZeroRedundancyOptimizer, optimizer).reduce_gradients()


def _plain(model: GPT, setup: Setup) -> nn.Module:
    return model


def _plain_bf16(model: GPT, setup: Setup) -> nn.Module:
    return model.to(torch.bfloat16)


def _ddp(model: GPT, setup: Setup) -> nn.Module:
    return DistributedDataParallel(model)


def _ddp_views(model: GPT, setup: Setup) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _needs_two_groups(ranks: int, backend: str) -> str | None:
    return None if ranks >= 4 and ranks % 2 == 0 else "two copies of two or more shards need an even number from 4"


def _needs_gloo(ranks: int, backend: str) -> str | None:
    return None if backend == "gloo" else f"{backend} leaves no choice of transport"


def _over_gloo(contender: Contender) -> Contender:
    return replace(contender, name=f"{contender.name} (gloo)", transport="gloo", refusal=_needs_gloo)


_FULL = Contender("shardwise full", "shardwise", "everything", _shard_blocks, adamw)
_RECOMMENDED = Contender("shardwise recommended", "shardwise", "everything", _shard_recommended, _recommended_adamw)
_ZERO_1 = Contender("shardwise ZeRO-1", "shardwise", "state", _ddp_views, _zero_adamw)
_ZERO_2 = Contender("shardwise ZeRO-2", "shardwise", "state", _plain, _zero_adamw, reduce=_reduce_to_owners)

_ALL = (
    Contender("local", "local", "nothing", _plain, adamw),
    Contender("local + fused", "local", "nothing", _plain, fused_adamw),
    Contender("local bf16", "local", "nothing", _plain_bf16, adamw, dtype="bf16"),
    Contender("DDP", "DDP", "nothing", _ddp, adamw),
    Contender("DDP + bucket view", "DDP", "nothing", _ddp_views, adamw),
    Contender("DDP + bucket view + fused", "DDP", "nothing", _ddp_views, fused_adamw),
    Contender("torch ZeRO", "ZeRO", "state", _ddp, peers.zero_adamw),
    Contender("torch ZeRO + bucket view", "ZeRO", "state", _ddp, peers.zero_adamw_bucket_view),
    Contender("FSDP2", "FSDP2", "everything", peers.shard_blocks, adamw),
    Contender("FSDP2 + fused", "FSDP2", "everything", peers.shard_blocks, fused_adamw),
    Contender("FSDP2 tuned", "FSDP2", "everything", peers.shard_tuned, fused_adamw),
    Contender("FSDP2 bf16", "FSDP2", "everything", peers.shard_blocks_bf16, adamw, dtype="bf16"),
    _FULL,
    _over_gloo(_FULL),
    Contender("shardwise full + fused", "shardwise", "everything", _shard_blocks, fused_adamw),
    Contender("shardwise hybrid", "shardwise", "everything", _shard_hybrid, adamw, refusal=_needs_two_groups),
    _RECOMMENDED,
    _over_gloo(_RECOMMENDED),
    replace(_RECOMMENDED, name="shardwise recommended bf16", wrap=_shard_recommended_bf16, dtype="bf16"),
    Contender("shardwise replicate", "shardwise", "nothing", _replicate_blocks, adamw),
    Contender("shardwise replicate + fused", "shardwise", "nothing", _replicate_blocks, fused_adamw),
    Contender("shardwise replicate whole", "shardwise", "nothing", _replicate_whole, adamw),
    _ZERO_1,
    replace(_ZERO_1, name="shardwise ZeRO-1 + fused", build_optimizer=_zero_fused_adamw),
    _ZERO_2,
    replace(_ZERO_2, name="shardwise ZeRO-2 + fused", build_optimizer=_zero_fused_adamw),
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

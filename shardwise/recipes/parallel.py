"""What is done to the GPT before a door shards it: heads split over ranks (--tp), blocks compiled (--compile)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shardwise.recipes.config import TrainConfig
from shardwise.recipes.gpt import GPT, GPTBlock
from shardwise.recipes.own_model import blocks_of
from shardwise.recipes.ranks import RunRanks


@dataclass(frozen=True, slots=True)
class Meshes:
    """The axes of all ranks.

    ``data``: ("dp",), or ("replicate", "shard") for --shard hybrid.  ``tensor``: ("tp",), the innermost axis; None
    without tensor parallelism.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None


def build_meshes(config: TrainConfig, ranks: RunRanks) -> Meshes:
    """Lay the ranks out as the options ask; ``check_ranks`` has made sure that they fit.  Collective."""
    num_data = ranks.num_ranks // config.tp
    if config.shard == "hybrid":
        names, sizes = ("replicate", "shard"), (config.replicas, num_data // config.replicas)
    else:
        names, sizes = ("dp",), (num_data,)
    if config.tp == 1:
        return Meshes(init_device_mesh(ranks.device.type, sizes, mesh_dim_names=names), None)
    mesh = init_device_mesh(ranks.device.type, (*sizes, config.tp), mesh_dim_names=(*names, "tp"))
    return Meshes(mesh[names if len(names) > 1 else names[0]], mesh["tp"])


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
    """Compile the attention and the MLP of every block: inside its unit, so that gathering stays outside the graphs.

    Of a model of the user's own, the parts of its repeated blocks.
    """
    for block in blocks_of(model):
        for part in (block.attention, block.mlp) if isinstance(block, GPTBlock) else block.children():
            part.compile(backend=backend)


def why_not_compiled(backend: str, ranks: RunRanks) -> str | None:
    """Return None if every rank can compile with ``backend``, else on every rank a sentence that says which cannot.

    Tries a small function, since a missing compiler shows only when code is generated.  Collective.
    """
    reason: str | None = None
    try:
        compiled = cast("Callable[[Tensor], Tensor]", torch.compile(_probe, backend=backend))
        compiled(torch.ones(4, device=ranks.device))
    except Exception as error:  # backends raise whatever their compilers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    for rank, found in enumerate(ranks.gather(reason or "")):
        if found:
            return f"--compile: rank {rank} cannot compile with {backend!r} ({found}); blocks run uncompiled"
    return None


def _probe(x: Tensor) -> Tensor:
    return nn.functional.gelu(x * 2) + 1

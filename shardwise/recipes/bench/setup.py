"""Where a contender is built, and the AdamW that all of them use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer

from shardwise.recipes.bench.request import SHAPES, BenchConfig, BenchShape
from shardwise.recipes.config import ModelShape
from shardwise.recipes.gpt import GPT, NUM_BYTES, build_gpt

LR = 1e-3


@dataclass(frozen=True, slots=True)
class Setup:
    """What every contender of one rank shares: shape, device, the 1-D mesh of all ranks, and this rank's batch.

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
        """Return the mesh of two copies, each cut over half of the ranks.  Collective."""
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


def adamw(model: nn.Module) -> Optimizer:
    """Return AdamW as torch chooses to run it."""
    return AdamW(model.parameters(), lr=LR)


def fused_adamw(model: nn.Module) -> Optimizer:
    """Return AdamW with its fused kernel."""
    return AdamW(model.parameters(), lr=LR, fused=True)

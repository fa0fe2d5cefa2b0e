"""The setup of a contender, and the AdamW that all of them use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer

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


def adamw(model: nn.Module) -> Optimizer:
    """Return AdamW in torch's default implementation."""
    return AdamW(model.parameters(), lr=LR)


def fused_adamw(model: nn.Module) -> Optimizer:
    """Return AdamW with its fused kernel."""
    return AdamW(model.parameters(), lr=LR, fused=True)

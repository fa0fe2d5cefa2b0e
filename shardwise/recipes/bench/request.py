"""What a benchmark measures, settled and checked before any process is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.errors import ConfigError
from shardwise.recipes.config import ModelShape

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
    """

    shape: str
    ranks: int
    batch: int
    rounds: int
    backend: str
    seed: int
    names: tuple[str, ...]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one step."""
        return self.batch * SHAPES[self.shape].model.context * self.ranks

    @property
    def label(self) -> str:
        """The stem of the files that hold the results."""
        return f"bench_{self.shape}_w{self.ranks}_{self.backend}"


def settle_ranks(backend: str, ranks: int | None, num_gpus: int, num_cores: int) -> tuple[str, int]:
    """Return the backend and the number of ranks: as asked, else every GPU over NCCL, else up to 2 cores over gloo.

    Raises: ConfigError if NCCL is asked for, or chosen because there are GPUs, and there is not a GPU for every rank.
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

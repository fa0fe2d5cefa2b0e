"""One way to train a model: the door, the mesh, the sizes of units, and what a step is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.codec.compression_policy import CompressionPolicy
from shardwise.errors import ConfigError
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES

DOORS = ("full", "hybrid", "replicate", "gradients", "optimizer", "none")  # as ``shardwise train --shard`` calls them
UNIT_DOORS = frozenset(
    {"full", "hybrid", "replicate"}
)  # units move; the others keep parameters whole, under DDP or alone
SHARED, SEND_RECV, TIERS = "shared memory", "send/recv", "shared memory, send/recv between hosts"
ROUTES = ("collective", SHARED, SEND_RECV, TIERS)
ONE_UNIT = 1 << 62  # a unit size that no block has: all parameters are one unit

# Bytes of state per parameter of element-wise optimizers, in fp32.
OPTIMIZERS: Mapping[str, int] = MappingProxyType(
    {"adamw": 8, "adam": 8, "adagrad": 4, "momentum": 4, "sgd": 0, "muon": 8}  # Muon's: AdamW for what is no matrix
)
MATRIX_STATE_BYTES = 4  # of Muon's momentum


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train.

    Attributes:
        door: one of ``DOORS``.
        ranks: data-parallel ranks.  tensor: ranks that split every block among them, and are one data-parallel rank together;
            of the doors, those with units.  replicas: groups of them that hold whole copies, with "hybrid".
        min_unit_bytes: smaller blocks are merged; ``ONE_UNIT``: all parameters are one unit.
        precision: "fp32" or "bf16" (computed in bf16, gradients reduced and kept in fp32).
        recompute: repeated blocks are computed again in backward.
        offload: shards, gradients and optimizer state are in the host's memory.
        accumulate: microbatches of a step.
        state_bytes: of the optimizer, per element that it updates.
        depth: units unsharded ahead.
        transport: of CPU ranks, one of ``ROUTES``: "collective" is the backend's, the others are those that units take.
        hosts: that the ranks of one parameter's shards are on, with ``TIERS``.
        near_replicas: CPU ranks that hold the same are on one host, and sum gradients in shared memory.
        matrices: parameters of two dims are updated whole, each by an owner that gathers it, as ``ShardedOptimizer`` does for
            Muon; the rest, of ``state_bytes``, element by element.
        compression: in how many bits parameters and gradients travel, of the doors with units.
    """

    door: str = "full"
    ranks: int = 1
    replicas: int = 1
    min_unit_bytes: int = DEFAULT_MIN_UNIT_BYTES
    precision: str = "fp32"
    recompute: bool = False
    offload: bool = False
    accumulate: int = 1
    state_bytes: int = OPTIMIZERS["adamw"]
    depth: int = 1
    tensor: int = 1
    compression: CompressionPolicy | None = None
    transport: str = "collective"
    hosts: int = 1
    near_replicas: bool = False
    matrices: bool = False

    def __post_init__(self) -> None:
        if self.door not in DOORS:
            raise ConfigError(f"door is {self.door!r}, expected one of {', '.join(DOORS)}")
        if min(self.ranks, self.replicas, self.accumulate, self.tensor) < 1:
            raise ConfigError(
                f"ranks are {self.ranks}, replicas {self.replicas}, microbatches {self.accumulate}, ranks of a split "
                f"{self.tensor}; expected at least 1"
            )
        if self.tensor > 1 and self.door not in UNIT_DOORS:
            raise ConfigError(f"door {self.door!r} takes no tensors that are split; choose one of {sorted(UNIT_DOORS)}")
        if self.ranks % self.replicas:
            raise ConfigError(f"{self.ranks} ranks cannot be {self.replicas} equal replicas; choose a divisor")

    @property
    def num_shards(self) -> int:
        """Ranks that a parameter is cut over."""
        return self.ranks // self.replicas if self.door in ("full", "hybrid") else 1

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.ranks // self.num_shards

    @property
    def computes_in(self) -> str:
        """The precision of the dry run that this needs."""
        if self.precision == "fp32":
            return "fp32"
        return "bf16" if self.door in UNIT_DOORS else "autocast"

    @property
    def label(self) -> str:
        """The setting in few words."""
        words = [self.door if self.door != "hybrid" else f"hybrid {self.replicas}x{self.num_shards}"]
        if self.door in UNIT_DOORS:
            words.append(
                "one unit" if self.min_unit_bytes >= ONE_UNIT else f"units >= {self.min_unit_bytes / 2**20:g} MiB"
            )
        if self.tensor > 1:
            words.append(f"tp {self.tensor}")
        words += [word for word, is_on in (("recompute", self.recompute), ("offload", self.offload)) if is_on]
        if self.compression is not None:
            ways = (("gather", self.compression.gather), ("reduce", self.compression.reduce))
            words += [f"{way} {coding}" for way, coding in ways if coding is not None]
        if self.accumulate > 1:
            words.append(f"{self.accumulate} microbatches")
        return ", ".join(words)

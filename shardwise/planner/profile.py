"""The profile of one forward and backward of a model on one rank: values that a dry run makes and all plans read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwise.errors import ConfigError
from shardwise.fsdp.placements import STRATEGIES as ROWS
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES, Child
from shardwise.plan.schedule import StepEvent

# ---- One way to train a model: the API, the mesh, the sizes of units, and the structure of a step.

# Rows of the table of placements, as ``shard_model`` and ``shardwise train --shard`` name them; "none": torch's DDP.
STRATEGIES = (*(name for name in ROWS if name != "hfsdp"), "none")
SHARDING = frozenset(name for name in STRATEGIES[:-1] if "sharded" in ROWS[name].optimizer)  # parameters, between steps
RESHARDING = frozenset(name for name in SHARDING if "sharded" in ROWS[name].parameter)  # parameters, after forward
UNIT_STRATEGIES = SHARDING | {"ddp"}  # of our engine; the others are under torch's DDP
COLLECTIVE, SHARED = "collective", "shared memory"
ONE_UNIT = 1 << 62  # a unit size that no block has: all parameters are one unit

# Bytes of state per parameter of element-wise optimizers, in fp32.
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 8, "adam": 8, "adagrad": 4, "momentum": 4, "sgd": 0})


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train.

    Attributes:
        strategy: one of ``STRATEGIES``.
        ranks: data-parallel ranks.  tensor: ranks that split every block and form one data-parallel rank; only for APIs
            with units.  replicas: with "hsdp", the number of groups that each have a full copy.
        min_unit_bytes: smaller blocks are merged; ``ONE_UNIT``: all parameters are one unit.
        precision: "fp32" or "bf16" (computed in bf16, gradients reduced and stored in fp32).
        recompute: repeated blocks are recomputed in backward.
        offload: shards, gradients and optimizer state are in the host's memory.
        accumulate: microbatches of a step.
        state_bytes: of the optimizer, per element that it updates.
        depth: units to prefetch.
        transport: ``COLLECTIVE``: the backend's; ``SHARED``: CPU ranks of one host read each other's memory.
    """

    strategy: str = "zero3"
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
    transport: str = COLLECTIVE

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"strategy is {self.strategy!r}, expected one of {', '.join(STRATEGIES)}")
        if min(self.ranks, self.replicas, self.accumulate, self.tensor) < 1:
            raise ConfigError(
                f"ranks are {self.ranks}, replicas {self.replicas}, microbatches {self.accumulate}, ranks of a split "
                f"{self.tensor}; expected at least 1"
            )
        if self.tensor > 1 and self.strategy not in UNIT_STRATEGIES:
            raise ConfigError(
                f"strategy {self.strategy!r} takes no tensors that are split; choose one of {sorted(UNIT_STRATEGIES)}"
            )
        if self.ranks % self.replicas:
            raise ConfigError(f"{self.ranks} ranks cannot be {self.replicas} equal replicas; choose a divisor")

    @property
    def num_shards(self) -> int:
        """Ranks over which a parameter is sharded."""
        return self.ranks // self.replicas if self.strategy in SHARDING else 1

    @property
    def num_replicas(self) -> int:
        """Ranks with the same shard."""
        return self.ranks // self.num_shards

    @property
    def computes_in(self) -> str:
        """The precision of the dry run that this needs."""
        if self.precision == "fp32":
            return "fp32"
        return "bf16" if self.strategy in UNIT_STRATEGIES else "autocast"

    @property
    def label(self) -> str:
        """The setting in few words."""
        words = [self.strategy if self.strategy != "hsdp" else f"hsdp {self.replicas}x{self.num_shards}"]
        if self.strategy in UNIT_STRATEGIES:
            words.append(
                "one unit" if self.min_unit_bytes >= ONE_UNIT else f"units >= {self.min_unit_bytes / 2**20:g} MiB"
            )
        if self.tensor > 1:
            words.append(f"tp {self.tensor}")
        words += [word for word, is_on in (("recompute", self.recompute), ("offload", self.offload)) if is_on]
        if self.accumulate > 1:
            words.append(f"{self.accumulate} microbatches")
        return ", ".join(words)


ROOT = 0  # the number of the block with everything outside repeated blocks


@dataclass(frozen=True, slots=True)
class ParamFacts:
    """One parameter.

    Attributes:
        name: its path in the model.
        shape: of the full parameter, in elements.
        dtype: name of the stored dtype; ``itemsize``: bytes of an element in it.
        is_floating: mixed precision casts it.
        is_trainable: it gets a gradient.
        block: number of its block; ``ROOT``: outside repeated blocks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    is_floating: bool
    is_trainable: bool
    block: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full parameter in the stored dtype."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """The computation in a stretch of a step.

    Attributes:
        flops: floating-point operations of matrix products and attention.
        traffic_bytes: read and written by the memory-bound operations.
        num_ops: operations that the host launches.
        ring_bytes, num_rings: of collectives among ranks that split a block: an all-reduce is two rings over its bytes.
    """

    flops: float = 0.0
    traffic_bytes: float = 0.0
    num_ops: int = 0
    ring_bytes: float = 0.0
    num_rings: int = 0


@dataclass(frozen=True, slots=True)
class StepMark:
    """A moment of the step: an event of a block, or (``event`` None) the arrival of the gradient of parameter ``param``."""

    event: StepEvent | None
    block: int = ROOT
    param: int = -1


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a step, from a mark to the next one.

    Attributes:
        mark: where it begins.
        peak_bytes: maximum of activations and temporaries; parameters, inputs and arrived gradients do not count.
        left_bytes: of them at its end.
    """

    mark: StepMark
    peak_bytes: int
    left_bytes: int
    work: Work


@dataclass(frozen=True, slots=True)
class Profile:
    """A model and one forward and backward of it on one rank, as recorded by a dry run.

    Attributes:
        model: name of its class.
        params: its distinct parameters.
        buffer_bytes: its distinct buffers.  input_bytes: of a microbatch.
        blocks: paths of the root ("", number ``ROOT``) and of the repeated blocks, in module order.
        families: for each module with repeated blocks, its children, for grouping.
        stretches: the step in order.
        precision: "fp32", "bf16" (parameters are cast) or "autocast".  recomputes: blocks are recomputed in backward.
        batch: sequences, or rows, of a microbatch.
        tensor: ranks that split every block: parameters and work are those of the first of them.
    """

    model: str
    params: tuple[ParamFacts, ...]
    buffer_bytes: int
    input_bytes: int
    blocks: tuple[str, ...]
    families: tuple[tuple[Child, ...], ...]
    stretches: tuple[Stretch, ...]
    precision: str
    recomputes: bool
    batch: int
    tensor: int = 1

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(param.numel for param in self.params)

    @property
    def flops(self) -> float:
        """Floating-point operations of one forward and backward on one rank, recomputation included."""
        return sum(stretch.work.flops for stretch in self.stretches)

    def for_batch(self, batch: int) -> Profile:
        """Return the profile of another microbatch: activations and work scale with the batch, parameters do not."""
        factor = batch / self.batch
        stretches = tuple(_scaled(stretch, factor) for stretch in self.stretches)
        return replace(self, stretches=stretches, input_bytes=int(self.input_bytes * factor), batch=batch)


def _scaled(stretch: Stretch, factor: float) -> Stretch:
    done = stretch.work
    work = replace(
        done,
        flops=done.flops * factor,
        traffic_bytes=done.traffic_bytes * factor,
        ring_bytes=done.ring_bytes * factor,
    )
    return Stretch(stretch.mark, int(stretch.peak_bytes * factor), int(stretch.left_bytes * factor), work)


def params_by_block(profile: Profile) -> tuple[tuple[int, ...], ...]:
    """Return, for each block, the numbers of its parameters, in the order of the model."""
    found: list[list[int]] = [[] for _ in profile.blocks]
    for number, param in enumerate(profile.params):
        found[param.block].append(number)
    return tuple(tuple(numbers) for numbers in found)

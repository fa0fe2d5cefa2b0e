"""What plans are made from: the hardware of ranks in a small JSON file, and the profile of a model on one rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from shardwise.errors import ConfigError
from shardwise.fsdp.mesh import STRATEGIES as ROWS
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES, Child
from shardwise.plan.schedule import StepEvent


@dataclass(frozen=True, slots=True)
class Wire:
    """A link of one rank: bytes per second in each direction, and seconds until the first byte arrives."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's device and its links.

    Attributes:
        name: for readers.
        device: "cuda" or "cpu": the device's allocator keeps buffers, or shardwise's buffer pool.
        memory_bytes: of the device.  usable: the part of it that a plan may fill; the rest is for the runtime,
            communication libraries and fragmentation.
        flops_per_s: dense, by precision ("fp32", "bf16"), of the data sheet.  efficiency: the part that matrix products
            of transformers reach.
        memory_bytes_per_s: of the device.
        library_bytes: of ``memory_bytes``, for workspaces of the device's libraries.
        host_s_per_op: for launching one operation.  host_s_per_unit: for one unit, forward and backward.
        host_s_per_update: of the optimizer for one parameter of a unit, in addition to its elements.
        inside, between: links within a host and between hosts.  host_memory: to the memory of the host (offload).
        shared: between ranks of one host through shared memory: a rank copies from the others' memory itself, and
            nothing else runs meanwhile; None: they use ``inside``.
        ranks_per_host: devices of a host.
        overlaps: communication overlaps computation.
    """

    name: str
    device: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    inside: Wire
    between: Wire
    host_memory: Wire
    shared: Wire | None = None
    ranks_per_host: int = 8
    usable: float = 0.92
    efficiency: float = 0.6
    host_s_per_op: float = 8e-6
    host_s_per_unit: float = 2.5e-4
    host_s_per_update: float = 1e-5
    overlaps: bool = True
    library_bytes: int = 0

    @property
    def limit_bytes(self) -> float:
        """Bytes that a plan may fill."""
        return self.usable * self.memory_bytes

    def data_ranks_per_host(self, tensor: int) -> int:
        """Return how many data-parallel ranks a host has, if ``tensor`` ranks split every block."""
        return max(self.ranks_per_host // tensor, 1)


GB = 1e9
GIB = 2**30


# cuBLAS's workspaces, one for the thread of forward and one for that of backward.  Source: ``CUBLAS_WORKSPACE_CONFIG`` in
# torch's notes on reproducibility, and measurements on an H100.
_CUBLAS_HOPPER, _CUBLAS = 2 * 32 * 2**20, 2 * (2 * 4096 * 2**10 + 8 * 16 * 2**10)


_H100 = Hardware(
    name="H100 80 GB, NVLink 4, 8 in a host, 400 Gbit/s each between hosts",
    device="cuda",
    memory_bytes=80 * GIB,
    flops_per_s={"fp32": 67e12, "bf16": 989e12},
    memory_bytes_per_s=3350 * GB,
    inside=Wire(370 * GB, 3e-6),
    between=Wire(45 * GB, 8e-6),
    host_memory=Wire(50 * GB, 1e-5),
    efficiency=0.55,
    library_bytes=_CUBLAS_HOPPER,
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "a100": Hardware(
            name="A100 80 GB, NVLink 3, 8 in a host, 200 Gbit/s each between hosts",
            device="cuda",
            memory_bytes=80 * GIB,
            flops_per_s={"fp32": 19.5e12, "bf16": 312e12},
            memory_bytes_per_s=2039 * GB,
            inside=Wire(235 * GB, 3e-6),
            between=Wire(22 * GB, 8e-6),
            host_memory=Wire(24 * GB, 1e-5),
            library_bytes=_CUBLAS,
        ),
        "h100": _H100,
        "h200": replace(
            _H100,
            name=_H100.name.replace("H100 80 GB", "H200 141 GB"),
            memory_bytes=141 * 10**9,
            memory_bytes_per_s=4800 * GB,
        ),
        "cpu": Hardware(
            name="one core of this kind of host, ranks on cores",
            device="cpu",
            memory_bytes=8 * GIB,
            flops_per_s={"fp32": 80e9, "bf16": 40e9},
            memory_bytes_per_s=8 * GB,
            inside=Wire(1.2 * GB, 1e-4),
            between=Wire(0.12 * GB, 3e-4),
            host_memory=Wire(8 * GB, 1e-6),
            shared=Wire(4 * GB, 5e-5),
            ranks_per_host=2,
            usable=0.9,
            efficiency=0.7,
            host_s_per_op=5e-6,
            host_s_per_unit=4e-4,
            host_s_per_update=5e-5,
            overlaps=False,
        ),
    }
)
_WIRES = ("inside", "between", "host_memory", "shared")


def read_hardware(source: str | Path) -> Hardware:
    """Return the preset called ``source``, or the contents of the JSON file there.

    A file has the fields of :class:`Hardware`; with ``"like": "h100"`` only those that differ from that preset.
    Raises: ConfigError.
    """
    if str(source).lower() in HARDWARE:
        return HARDWARE[str(source).lower()]
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"hardware '{source}' is neither one of {', '.join(HARDWARE)} nor a JSON file; write one")
    try:
        given: object = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; expected a JSON object with the fields of shardwise.Hardware") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: found {type(given).__name__}, expected a JSON object with the fields of Hardware")
    values: dict[str, object] = {str(key): value for key, value in given.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    like = values.pop("like", None)
    base = asdict(HARDWARE[str(like)]) if like in HARDWARE else {}
    return _made(base | values, path)


def _made(values: dict[str, object], path: Path) -> Hardware:
    known = {each.name for each in fields(Hardware)}
    odd = sorted(set(values) - known)
    if odd:
        raise ConfigError(f"{path}: unknown {', '.join(odd)}; expected some of {', '.join(sorted(known))} and 'like'")
    try:
        for name in _WIRES:
            wire = values.get(name)
            if isinstance(wire, dict):
                values[name] = Wire(**wire)  # pyright: ignore[reportUnknownArgumentType]
        return Hardware(**values)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise ConfigError(f"{path}: {error}; name a preset with 'like' to give only what differs") from error


def matrix_rate(hardware: Hardware, precision: str) -> float:
    """Return the floating-point operations per second that matrix products reach in "fp32", or else in bf16."""
    return hardware.efficiency * hardware.flops_per_s["fp32" if precision == "fp32" else "bf16"]


def ring_s(hardware: Hardware, num_bytes: float, ranks: int, near: int, is_within: bool) -> float:
    """Return the seconds of a ring all-gather, whose result has ``num_bytes``, or of a reduce-scatter with such an input.

    ``near``: so many of the ranks are on one host; ``is_within``: all of them.
    Source: (n - 1) / n of the bytes pass every link, in n - 1 steps: Patarasuk and Yuan 2009.
    """
    if ranks < 2 or not num_bytes:
        return 0.0
    hops, hosts = ranks - 1, 1 if is_within else math.ceil(ranks / near)
    wire = hardware.inside if is_within else hardware.between
    return (
        num_bytes * hops / ranks / wire.bytes_per_s
        + (hosts - 1) * wire.latency_s
        + (hops - hosts + 1) * hardware.inside.latency_s
    )


def with_hosts(hardware: Hardware, ranks: int, hosts: int) -> Hardware:
    """Return ``hardware`` with ``ranks`` on ``hosts`` hosts.  Raises: ConfigError if they cannot be equally many."""
    if hosts < 1 or ranks % hosts:
        raise ConfigError(f"{ranks} ranks cannot be on {hosts} hosts, equally many on each; choose a divisor")
    return replace(hardware, ranks_per_host=ranks // hosts)


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

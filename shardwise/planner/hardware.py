"""What plans are made from: the hardware of ranks in a small JSON file, and the profile that a dry run makes of a model."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from timeit import timeit
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardwise import torch_private
from shardwise.collectives.owned import plain_parts
from shardwise.containers import tensors_in
from shardwise.errors import ConfigError
from shardwise.fsdp.api import families_of
from shardwise.fsdp.mesh import Strategy
from shardwise.one_host import resident_bytes
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES, Child, group_blocks
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
        library_bytes: of ``memory_bytes``, for workspaces of the device's libraries; on CPU, for the process.
        host_s_per_op: for launching one operation.  host_s_per_unit: for one unit, forward and backward.
        host_s_per_update: of the optimizer for one parameter of a unit, in addition to its elements.
        inside, between: links within a host and between hosts.  host_memory: to the memory of the host (offload).
        disk: to a local disk, of one rank while all use it (optimizer state in files).
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
    disk: Wire = Wire(1e9, 1e-4)
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
_FIRST_STEP_BYTES = 10_000_000  # of code and objects that the first step loads on a CPU: 8 to 14 MB were measured
_WIRES = ("inside", "between", "host_memory", "shared", "disk")


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
    like, known = values.pop("like", None), {each.name for each in fields(Hardware)}
    if odd := sorted(values.keys() - known):
        raise ConfigError(f"{path}: unknown {', '.join(odd)}; expected some of {', '.join(sorted(known))} and 'like'")
    values = (asdict(HARDWARE[str(like)]) if like in HARDWARE else {}) | values
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


def with_memory(hardware: Hardware, memory_bytes: int) -> Hardware:
    """Return ``hardware`` of which a plan may fill ``memory_bytes`` of a rank."""
    return replace(hardware, memory_bytes=memory_bytes, usable=1.0)


def measured(dtype: torch.dtype, own_bytes: int, folder: str | None) -> list[float]:
    """Return figures of this CPU rank, of which the least over ranks counts; ranks that call it together share cores.

    They are: the negative bytes of its process (but ``own_bytes``), after it has loaded what a step loads; floating-point
    operations per second of a matrix product in ``dtype``; bytes per second of an operation in memory; both with results in
    pages that are new; bytes per second of the disk with ``folder``.
    """
    rows, weight = (torch.ones(size, dtype=dtype, device="cpu") for size in ((1 << 11, 512), (512, 512)))
    F.gelu(rows[:64] @ weight.requires_grad_()).sum().backward()
    flops_per_s = 16 * 2 * rows.numel() * weight.shape[1] / timeit(lambda: rows @ weight.detach(), number=16)
    bytes_per_s = 8 * 2 * rows.nbytes / timeit(lambda: F.gelu(rows), number=8)
    process = resident_bytes() - own_bytes - rows.nbytes
    return [-process, flops_per_s, bytes_per_s, _measured_disk(folder)]


def this_host(device: str, ranks: int, memory_bytes: int, figures: Sequence[float]) -> Hardware:
    """Return the hardware of ``ranks`` on this host, of which a plan may fill ``memory_bytes``; on CPU with these figures."""
    if device != "cpu":
        return with_memory(HARDWARE["h100"], memory_bytes)
    process, flops, memory, disk = figures
    return replace(
        with_memory(with_hosts(HARDWARE["cpu"], ranks, 1), memory_bytes),
        flops_per_s={"fp32": flops, "bf16": flops},
        efficiency=1.0,
        memory_bytes_per_s=memory,
        disk=Wire(disk, 1e-4),
        library_bytes=int(-process) + _FIRST_STEP_BYTES,
    )


def _measured_disk(folder: str | None, num_bytes: int = 1 << 25) -> float:
    """Return bytes per second of the disk with ``folder``: one file is written and synchronized, then read."""
    if folder is None:
        return math.inf
    block, began = os.urandom(1 << 20), time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(num_bytes >> 20):
                file.write(block)
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # so that the reads are the disk's, not the page cache's
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(1 << 20):
                pass
    except OSError:
        return math.inf  # OptimizerOffload raises on all ranks, if the plan has one
    return 2 * num_bytes / (time.perf_counter() - began)


def with_hosts(hardware: Hardware, ranks: int, hosts: int) -> Hardware:
    """Return ``hardware`` with ``ranks`` on ``hosts`` hosts.  Raises: ConfigError if they cannot be equally many."""
    if hosts < 1 or ranks % hosts:
        raise ConfigError(f"{ranks} ranks cannot be on {hosts} hosts, equally many on each; choose a divisor")
    return replace(hardware, ranks_per_host=ranks // hosts)


# ---- One way to train a model: the API, the mesh, the sizes of units, and the structure of a step.

# As ``shard_model`` and ``shardwise train --shard`` name them; "none": torch's DDP.
STRATEGIES = (*(each.value for each in Strategy if each is not Strategy.HFSDP), "none")
RESHARDING = frozenset({"zero3", "hsdp"})  # parameters, after forward
SHARDING = RESHARDING | {"zero2"}  # parameters, between steps
UNIT_STRATEGIES = SHARDING | {"ddp"}  # of our engine; the others are under torch's DDP
COLLECTIVE, SHARED = "collective", "shared memory"
ONE_UNIT = 1 << 62  # a unit size that no block has: all parameters are one unit

# Bytes of state per parameter of element-wise optimizers, in fp32.
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 8, "adam": 8, "adagrad": 4, "momentum": 4, "sgd": 0})
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def state_bytes_of(optimizer: str | MakeOptimizer, dtype: torch.dtype = torch.float32) -> float:
    """Return the bytes of state per element: of one of ``OPTIMIZERS``, or measured after a step of the user's, in ``dtype``."""
    if isinstance(optimizer, str):
        return OPTIMIZERS[optimizer]
    param = nn.Parameter(torch.zeros(1 << 10, 1 << 10, dtype=dtype, device="cpu"))
    param.grad, made = torch.zeros_like(param), optimizer([param])
    with torch.random.fork_rng(devices=()), torch.compiler.set_stance("force_eager"):  # torchao rounds, and compiles
        made.step()
    values = [value for value in made.state[param].values() if isinstance(value, torch.Tensor) and value.dim()]
    return sum(part.nbytes for value in values for part in plain_parts(value)) / param.numel()


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train.

    Attributes:
        strategy: one of ``STRATEGIES``.
        ranks: data-parallel ranks.  tensor: ranks that split every block and form one data-parallel rank; only for APIs
            with units.  replicas: with "hsdp", the number of groups that each have a full copy.
        min_unit_bytes: smaller blocks are merged; ``ONE_UNIT``: all parameters are one unit.
        precision: "fp32" or "bf16" (computed in bf16, gradients reduced and stored in fp32).
        recompute: repeated blocks are recomputed in backward.  keep_blocks: but not the last so many, which are first in it.
        offload: shards, gradients and optimizer state are in the host's memory; of CPU ranks, on a disk.
        disk_share: the part of the optimizer state that is on disk between updates.
        accumulate: microbatches of a step.
        state_bytes: of the optimizer, per element that it updates; below those of fp32 only where the user's has less.
        depth: units to prefetch.
        transport: ``COLLECTIVE``: the backend's; ``SHARED``: CPU ranks of one host read each other's memory.
    """

    strategy: str = "zero3"
    ranks: int = 1
    replicas: int = 1
    min_unit_bytes: int = DEFAULT_MIN_UNIT_BYTES
    precision: str = "fp32"
    recompute: bool = False
    keep_blocks: int = 0
    offload: bool = False
    disk_share: float = 0.0
    accumulate: int = 1
    state_bytes: float = OPTIMIZERS["adamw"]
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
        recompute = f"recompute all but {self.keep_blocks} blocks" if self.keep_blocks else "recompute"
        away = "parameters, gradients and optimizer state on disk" if self.disk_share else "offload"
        words += [word for word, is_on in ((recompute, self.recompute), (away, self.offload)) if is_on]
        if self.disk_share and not self.offload:
            words.append(f"{self.disk_share:.0%} of the optimizer state on disk")
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
    scaled = {name: getattr(stretch.work, name) * factor for name in ("flops", "traffic_bytes", "ring_bytes")}
    num_bytes = int(stretch.peak_bytes * factor), int(stretch.left_bytes * factor)
    return Stretch(stretch.mark, *num_bytes, replace(stretch.work, **scaled))


def params_by_block(profile: Profile) -> tuple[tuple[int, ...], ...]:
    """Return, for each block, the numbers of its parameters, in the order of the model."""
    found: list[list[int]] = [[] for _ in profile.blocks]
    for number, param in enumerate(profile.params):
        found[param.block].append(number)
    return tuple(tuple(numbers) for numbers in found)


# ---- The dry run: one forward and backward of a model without memory and without arithmetic, recorded as a profile.
# Tensors are fake: they have shapes, dtypes and storages of a size, so autograd saves and frees what it would save and
# free, recomputation included. The live bytes at each moment are counted, not computed from a formula.

# ---- Tensor parallelism in a dry run: a copy of the model without memory, split by ``parallelize_module``.


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """The split of a model's blocks.

    Attributes:
        ranks: that share one block.
        plan: the argument of ``parallelize_module`` for a block: paths in it, and how each module there is split.
    """

    ranks: int
    plan: Mapping[str, ParallelStyle]


def empty_copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on the meta device."""
    twins: dict[int, object] = {}
    for each in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        twins[id(each)] = twin = nn.Parameter(empty, each.requires_grad) if isinstance(each, nn.Parameter) else empty
        torch_private.give_attributes(dict(torch_private.attributes_of(each)), twin)
    return copy.deepcopy(model, twins)


@contextmanager
def split_copy(model: nn.Module, blocks: Sequence[str], split: TensorSplit) -> Generator[nn.Module, None, None]:
    """Yield a copy of ``model`` on the meta device whose ``blocks`` are split, as the first of ``split.ranks`` ranks has it.

    Raises: ConfigError if the plan does not match the blocks, or if this process has a process group: torch has one world.
    """
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "tensor parallelism is planned in a process group of its own, and this process has one: plan before "
            "init_process_group(), or in another process (shardwise plan)"
        )
    twin = empty_copy(model)
    with torch_private.fake_world(split.ranks):
        mesh = init_device_mesh("cpu", (split.ranks,), mesh_dim_names=("tp",))
        for path in blocks[1:]:
            block = twin.get_submodule(path)
            parts = dict(block.named_modules())
            missing = [name for name in split.plan if "*" not in name and name not in parts]
            if missing:
                raise ConfigError(
                    f"tensor_plan names {', '.join(missing)}, which {path} ({type(block).__name__}) has not; name its modules, "
                    "such as {'mlp.up': ColwiseParallel(), 'mlp.down': RowwiseParallel()}"
                )
            parallelize_module(block, mesh, dict(split.plan), src_data_rank=None)
        yield twin


# ---- A watch of what operations of a dry run allocate, free and compute, where torch dispatches them.

# Collectives of DTensor: number of rings over the bytes of the result, or of the input if that is larger.
_RINGS = {
    "all_reduce": 2,
    "all_reduce_": 2,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class OpWatch:
    """Counts the live bytes that operations have allocated, and their work, from mark to mark.

    Attributes:
        stretches: those that have ended.
        live_bytes: now.
    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        """``given``: tensors whose memory does not count."""
        self.stretches: list[Stretch] = []
        self.live_bytes = 0
        self._mark: StepMark | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in given:
            self._follow(tensor.untyped_storage(), 0)
        self._restart()

    def mark(self, mark: StepMark) -> None:
        """End the current stretch and begin that of ``mark``."""
        self.end()
        self._mark = mark
        self._restart()

    def end(self) -> None:
        """End the current stretch."""
        if self._mark is not None:
            work = Work(self._flops, self._traffic, self._num_ops + self._rings, self._ring_bytes, self._rings)
            self.stretches.append(Stretch(self._mark, self._peak, self.live_bytes, work))
            self._mark = None

    def _restart(self) -> None:
        self._peak = self.live_bytes
        self._flops = self._traffic = self._ring_bytes = 0.0
        self._rings = self._num_ops = 0

    def after(self, func: Any, given: tuple[Any, Any], out: object) -> None:
        """Record an operation that has just run."""
        if func.namespace == "prim":
            return
        inputs = tensors_in(given)
        outputs = tensors_in(out)
        made = 0
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if id(storage) not in self._storages:
                self._follow(storage, storage.nbytes())
                made += 1
        self._peak = max(self._peak, self.live_bytes)
        if func.namespace == "_c10d_functional":
            rings = _RINGS.get(func.overloadpacket.__name__, 0)
            self._rings += rings
            self._ring_bytes += rings * max(t.numel() * t.element_size() for t in [*inputs, *outputs])
        elif made or func.overloadpacket.__name__.endswith("_"):  # or in place
            self._num_ops += 1
            flops = flops_of(func, *given, out)
            self._flops += flops
            sizes = ((t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in [*inputs, *outputs])
            self._traffic += 0 if flops else sum(map(min, sizes))

    def _follow(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = id(storage)  # a storage keeps its Python object alive as long as it lives

        def forget(_: object) -> None:
            del self._storages[key]
            self.live_bytes -= num_bytes

        self._storages[key] = weakref.ref(storage, forget)
        self.live_bytes += num_bytes


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: object) -> float:
    """Return the floating-point operations of matrix products and attention; 0 for anything else."""
    packet = func.overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    name = packet.__name__
    if name not in (_ATTENTION, f"{_ATTENTION}_backward"):
        return 0.0
    num_inputs, place, count = (3, 4, sdpa_flop_count) if name == _ATTENTION else (4, 7, sdpa_backward_flop_count)
    is_causal = bool(args[place]) if len(args) > place else bool(kwargs.get("is_causal", False))
    return (0.5 if is_causal else 1.0) * count(*(tuple(each.shape) for each in args[:num_inputs]))


Loss = Callable[..., torch.Tensor]


def default_loss(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Return next-token cross entropy in fp32 for integer inputs (batch, time), else the mean of the output."""
    output: object = model(*inputs)
    found = getattr(output, "logits", output)
    logits = tensors_in(found)[0]
    if inputs and not inputs[0].is_floating_point() and logits.shape[:-1] == inputs[0].shape:
        return F.cross_entropy(logits.float().flatten(0, -2), inputs[0].flatten().long())
    return logits.float().mean()


def dry_run(
    model: nn.Module,
    inputs: Sequence[object],
    loss: Loss = default_loss,
    *,
    precision: str = "fp32",
    recompute: bool | slice = False,
    split: TensorSplit | None = None,
) -> Profile:
    """Run ``loss(model, *inputs).backward()`` on fake tensors and return what it does.

    Args:
        model: on any device, including meta; it is unchanged when this returns.
        inputs: of one microbatch of one rank; only shape and dtype of tensors matter; dim 0 of the first is the batch.
        loss: called with ``model`` and the inputs.
        precision: "fp32": the model unchanged; "bf16": parameters are cast, as the engine does; "autocast": torch's.
        recompute: save only the inputs of blocks, as ``torch.utils.checkpoint`` does: of all, or of a slice of ``blocks``.
        split: tensor parallelism, as on the first of its ranks, with the collectives of DTensor.

    Raises: ConfigError if parameters are sharded already.  Errors of the model pass through. Cost: about 0.3 ms per
    operation of the model, independent of its sizes.
    """
    families = tuple(families_of(model, frozenset()))
    paths = {path for each in families for group in group_blocks(each, 0) for path in group}
    blocks = ("", *[path for path, _ in model.named_modules() if path in paths])
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ConfigError(
                f"{name} is a DTensor: plan the model before fully_shard, shard_model or replicate is called on it"
            )
    with ExitStack() as stack:
        # The model may store fake tensors in its attributes.
        model = empty_copy(model) if split is None else stack.enter_context(split_copy(model, blocks, split))
        families = tuple(families_of(model, frozenset()))
        stack.enter_context(torch_private.fake_mode())
        stack.enter_context(torch.enable_grad())
        fakes = {id(param): _fake_parameter(param, precision) for param in model.parameters()}
        buffers = {id(each): _fake(each) for each in model.buffers()}
        given = [_fake(each) if isinstance(each, torch.Tensor) else each for each in inputs]
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        watch = OpWatch([*map(torch_private.local_of, fakes.values()), *buffers.values(), *tensors])
        steps = _Steps(model, blocks, watch, precision)
        numbers = recompute if isinstance(recompute, slice) else slice(1 if recompute else len(blocks), None)

        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext():
                value = loss(model, *given)
            value.backward()

        with _standing_in(model, fakes, buffers):
            if split is not None:  # DTensor tries every operation once, to learn its placements: those do not count
                run()
                for fake in fakes.values():
                    fake.grad = None
            with steps.hooked(fakes, range(len(blocks))[numbers]):
                with torch_private.watching(watch.after):
                    run()
                watch.end()
        return Profile(
            model=type(model).__name__,
            params=tuple(_facts(name, param, steps.block_of[id(param)]) for name, param in model.named_parameters()),
            buffer_bytes=sum(each.numel() * each.element_size() for each in buffers.values()),
            input_bytes=sum(each.numel() * each.element_size() for each in tensors),
            blocks=blocks,
            families=families,
            stretches=tuple(watch.stretches),
            precision=precision,
            recomputes=bool(recompute),
            batch=tensors[0].shape[0] if tensors and tensors[0].ndim else 1,
            tensor=1 if split is None else split.ranks,
        )


def _facts(name: str, param: nn.Parameter, block: int) -> ParamFacts:
    dtype, shape = str(param.dtype).removeprefix("torch."), tuple(torch_private.local_of(param).shape)
    return ParamFacts(name, shape, dtype, param.element_size(), param.is_floating_point(), param.requires_grad, block)


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


def _fake_parameter(param: nn.Parameter, precision: str) -> nn.Parameter:
    dtype = torch.bfloat16 if precision == "bf16" and param.is_floating_point() else param.dtype
    if isinstance(param, DTensor):
        spec = torch_private.spec_of(param, dtype)
        local = _fake(torch_private.local_of(param), dtype)
        fake = torch_private.parameter_from_local(local, spec, param.requires_grad)
    else:
        fake = nn.Parameter(_fake(param, dtype), requires_grad=param.requires_grad)
    torch_private.give_attributes(dict(torch_private.attributes_of(param)), fake)
    return fake


@contextmanager
def _standing_in(
    model: nn.Module, fakes: dict[int, nn.Parameter], buffers: dict[int, torch.Tensor]
) -> Generator[None, None, None]:
    """Replace the parameters and buffers of modules by fakes inside the context."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        for held, stand_ins in (
            (torch_private.parameters_of(module), fakes),
            (torch_private.buffers_of(module), buffers),
        ):
            tensors = cast("dict[str, Any]", held)
            before.append((tensors, dict(tensors)))
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = stand_ins.get(id(tensor), tensor)
    try:
        yield
    finally:
        for held, tensors in before:
            held.clear()
            held.update(tensors)


class _Steps:
    """Marks the events of blocks and the arrival of gradients while a model runs.

    Attributes:
        block_of: number of the block of each parameter, by its id.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], watch: OpWatch, precision: str) -> None:
        self._watch = watch
        self._casts = precision == "bf16"
        self._modules = [model.get_submodule(path) for path in blocks]
        self.block_of = {id(param): ROOT for param in model.parameters()}
        for number in range(len(blocks) - 1, ROOT, -1):  # a tied parameter belongs to the first block
            self.block_of |= {id(param): number for param in self._modules[number].parameters()}
        self._order = {id(param): number for number, param in enumerate(model.parameters())}

    @contextmanager
    def hooked(self, fakes: dict[int, nn.Parameter], recomputed: range) -> Generator[None, None, None]:
        """Hook the modules, of which those numbered ``recomputed`` recompute in backward."""
        replaced: list[nn.Module] = []
        handles: list[Any] = []
        for number, module in enumerate(self._modules):
            if self._casts:
                handles.append(module.register_forward_pre_hook(_cast_inputs, with_kwargs=True, prepend=True))
            if number in recomputed and "forward" not in vars(module):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
                replaced.append(module)
        for number, module in enumerate(self._modules):
            enter = functools.partial(self._pass, StepEvent.PRE_FORWARD, number)
            leave = functools.partial(self._leave_forward, number)
            handles += [module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave)]
        for key, fake in fakes.items():
            if fake.requires_grad:
                mark = StepMark(None, self.block_of[key], self._order[key])
                handles.append(fake.register_post_accumulate_grad_hook(functools.partial(self._arrive, mark)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in replaced:
                del module.forward

    def _pass(self, event: StepEvent, number: int, *_: object) -> None:
        self._watch.mark(StepMark(event, number))

    def _leave_forward(self, number: int, _module: nn.Module, _args: object, output: object) -> None:
        self._pass(StepEvent.POST_FORWARD, number)
        begun: list[bool] = []

        def enter_backward(_: torch.Tensor) -> None:  # with the first gradient of the outputs
            if not begun:
                begun.append(True)
                self._pass(StepEvent.PRE_BACKWARD, number)

        for each in tensors_in(output):
            if each.requires_grad:
                each.register_hook(enter_backward)

    def _arrive(self, mark: StepMark, param: torch.Tensor) -> None:
        param.grad = None  # the memory of gradients from here on depends on the API: the plan adds it
        self._watch.mark(mark)


def _cast_inputs(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    return torch_private.map_tensors(cast_one, (args, kwargs))

"""The hardware of ranks: rates, memory and links, as values in a small JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from shardwise.errors import ConfigError


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

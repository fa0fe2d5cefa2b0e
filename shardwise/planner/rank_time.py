"""The time of a step on one rank: computation, exposed communication, and the host that launches both."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType

from shardwise.errors import ConfigError
from shardwise.observe import Call, Op
from shardwise.planner.profile import OPTIMIZERS, SHARED, TIERS, UNIT_DOORS, Profile, Setting, Stretch
from shardwise.planner.rank_units import RankUnit, Steps, optimizer_transfers, update_flops

# ---- The hardware of ranks: rates, memory and links, as values in a small JSON file.


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
        op_seconds: measured seconds of operations by name and shapes, instead of the rates.  ``host_s_per_op`` is then
            the overhead of Python and autograd for each of them.
        cast_elements_per_s: measured, from fp32 to bf16 and back.  update_elements_per_s: of the optimizer, AdamW,
            fused. 0: both at the speed of memory.
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
    op_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    cast_elements_per_s: float = 0.0
    update_elements_per_s: float = 0.0
    library_bytes: int = 0


GB = 1e9
GIB = 2**30


def cublas_bytes(capability: int) -> int:
    """Return the bytes that torch reserves for cuBLAS on a GPU of this major compute capability.

    One workspace for the thread of forward and one for that of backward.  Source: ``CUBLAS_WORKSPACE_CONFIG`` in
    torch's notes on reproducibility, and measurements on an H100.
    """
    return 2 * (32 * 2**20 if capability >= 9 else 2 * 4096 * 2**10 + 8 * 16 * 2**10)


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
    library_bytes=cublas_bytes(9),
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
            library_bytes=cublas_bytes(8),
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
    base = _fields_of(HARDWARE[str(like)]) if like in HARDWARE else {}
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


def hardware_json(hardware: Hardware) -> str:
    """Return the JSON that :func:`read_hardware` reads."""
    values = _fields_of(hardware)
    values |= {name: asdict(wire) for name in _WIRES if (wire := getattr(hardware, name)) is not None}
    values |= {"flops_per_s": dict(hardware.flops_per_s), "op_seconds": dict(hardware.op_seconds)}
    return json.dumps(values, indent=2)


def _fields_of(hardware: Hardware) -> dict[str, object]:
    return {each.name: getattr(hardware, each.name) for each in fields(Hardware)}


def matrix_rate(hardware: Hardware, precision: str) -> float:
    """Return the floating-point operations per second that matrix products reach in "fp32", or else in bf16."""
    return hardware.efficiency * hardware.flops_per_s["fp32" if precision == "fp32" else "bf16"]


def ring_s(hardware: Hardware, num_bytes: float, ranks: int, is_within: bool) -> float:
    """Return the seconds of a ring all-gather, whose result has ``num_bytes``, or of a reduce-scatter with such an input.

    Source: (n - 1) / n of the bytes pass every link, in n - 1 steps: Patarasuk and Yuan 2009.
    """
    if ranks < 2 or not num_bytes:
        return 0.0
    wire = hardware.inside if is_within else hardware.between
    hops = ranks - 1
    if is_within:
        return num_bytes * hops / ranks / wire.bytes_per_s + hops * wire.latency_s
    hosts = math.ceil(ranks / hardware.ranks_per_host)
    return (
        num_bytes * hops / ranks / wire.bytes_per_s
        + (hosts - 1) * wire.latency_s
        + (hops - hosts + 1) * hardware.inside.latency_s
    )


@dataclass(frozen=True, slots=True)
class RankTime:
    """A step of one rank, in seconds.

    Attributes:
        step_s: total.  compute_s: of operations.  exposed_s: waits for other ranks that overlap nothing.
        host_s: time of the host to launch everything; a step is never shorter.
        optimizer_s: of the update.
        communication_s: of all collectives, overlapped or exposed.
        inside_bytes, between_bytes: that this rank sends within its host, and to other hosts.
        waits: exposed seconds by unit, the longest first.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    host_s: float
    optimizer_s: float
    communication_s: float
    inside_bytes: int
    between_bytes: int
    waits: tuple[tuple[str, float], ...]


@dataclass(slots=True)
class _Clock:
    """Two streams: computation, and collectives, one after another."""

    setting: Setting
    hardware: Hardware
    now: float = 0.0
    comm_free_at: float = 0.0
    exposed: float = 0.0
    moved_s: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    ends: dict[int, float] = field(default_factory=dict[int, float])
    waits: dict[str, float] = field(default_factory=dict[str, float])

    def launch(self, unit: str, num_bytes: float, ranks: int, is_within: bool, is_column: bool = False) -> float:
        """Start a ring collective over ``ranks`` for ``unit`` (``is_column``: one rank per host); return its end time."""
        hardware = replace(self.hardware, ranks_per_host=1) if is_column else self.hardware
        seconds = ring_s(hardware, num_bytes, ranks, is_within)
        self.send(num_bytes * (ranks - 1) / ranks, seconds, is_within)
        self.comm_free_at = max(self.comm_free_at, self.now) + seconds
        if not self.hardware.overlaps:
            self.comm_free_at = self.now + seconds
            self.expose(unit, seconds)
            self.now = self.comm_free_at
        return self.comm_free_at

    def send(self, num_bytes: float, seconds: float, is_within: bool = True) -> None:
        """Count what is sent, overlapped or exposed."""
        self.inside += num_bytes if is_within else 0
        self.between += 0 if is_within else num_bytes
        self.moved_s += seconds

    def block(self, unit: str, num_bytes: float, seconds: float, is_within: bool = True) -> None:
        """Send while nothing else runs."""
        self.send(num_bytes, seconds, is_within)
        self.expose(unit, seconds)
        self.now += seconds

    def expose(self, unit: str, seconds: float) -> None:
        if seconds > 0:
            self.exposed += seconds
            self.waits[unit] = self.waits.get(unit, 0.0) + seconds

    def wait(self, unit: str, end: float) -> None:
        """Continue computation at ``end`` at the earliest."""
        self.expose(unit, end - self.now)
        self.now = max(self.now, end)


def seconds_of(work: Stretch, profile: Profile, hardware: Hardware) -> float:
    """Return the seconds of the computation after a mark."""
    if hardware.op_seconds and work.work.ops:
        known = [hardware.op_seconds.get(profile.op_names[number]) for number, _ in work.work.ops]
        if all(each is not None for each in known):
            counts = [count for _, count in work.work.ops]
            return sum(each * count for each, count in zip(known, counts, strict=True) if each is not None)
    return (
        work.work.flops / matrix_rate(hardware, profile.precision)
        + work.work.traffic_bytes / hardware.memory_bytes_per_s
    )


def time_of(
    profile: Profile, units: Sequence[RankUnit], steps: Steps, setting: Setting, hardware: Hardware
) -> RankTime:
    """Return the seconds of a step of ``setting``: all of its microbatches, and the update."""
    # The ranks of a split are neighbours, so a host has fewer data-parallel ranks.
    near = replace(hardware, ranks_per_host=max(hardware.ranks_per_host // setting.tensor, 1))
    clock = _Clock(setting, near)
    numbers = {unit.facts.name: number for number, unit in enumerate(units)}
    compute = 0.0
    num_ops = 0
    for microbatch in range(setting.accumulate):
        is_last = microbatch == setting.accumulate - 1
        for passage in steps.passages:
            if setting.door in UNIT_DOORS:
                for call in passage.calls:
                    _carry_out(clock, call, units[numbers[call.unit]], numbers, is_last)
            seconds = seconds_of(passage.stretch, profile, hardware)
            compute += seconds
            clock.now += seconds
            num_ops += passage.stretch.work.num_ops
            _split_ranks_talk(clock, passage.stretch, hardware)
    if setting.door in UNIT_DOORS:
        clock.wait("end of backward", clock.comm_free_at)
    else:
        _without_units(clock, profile, compute)
    update = _update_s(profile, units, setting, hardware)
    if setting.matrices and setting.num_shards > 1:
        update += update_flops(profile, setting) / matrix_rate(hardware, "bf16")
        _exchange_matrices(clock, profile)
    host = num_ops * hardware.host_s_per_op
    host += len(units) * setting.accumulate * hardware.host_s_per_unit if setting.door in UNIT_DOORS else 0.0
    step = max(clock.now, host) if hardware.overlaps else clock.now + (host if hardware.op_seconds else 0.0)
    waits = tuple(sorted(clock.waits.items(), key=lambda item: -item[1]))
    return RankTime(
        step + update, compute, clock.exposed, host, update, clock.moved_s, int(clock.inside), int(clock.between), waits
    )


def _split_ranks_talk(clock: _Clock, stretch: Stretch, hardware: Hardware) -> None:
    """Count the collectives of the ranks that split a block: the next operation needs them, so they overlap nothing."""
    work, ranks = stretch.work, clock.setting.tensor
    if not work.num_rings:
        return
    is_within = ranks <= hardware.ranks_per_host
    seconds = work.num_rings * ring_s(hardware, work.ring_bytes / work.num_rings, ranks, is_within)
    clock.block("split blocks", work.ring_bytes * (ranks - 1) / ranks, seconds, is_within)


def _carry_out(clock: _Clock, call: Call, unit: RankUnit, numbers: Mapping[str, int], is_last: bool) -> None:
    setting, hardware = clock.setting, clock.hardware
    clock.now += _cast_s(call, unit, hardware)
    name, number = call.unit or "(root)", numbers[call.unit]
    is_within = setting.num_shards <= hardware.ranks_per_host
    copy_s = 2 / hardware.memory_bytes_per_s
    if setting.transport in (SHARED, TIERS) and hardware.shared is not None and setting.num_shards > 1:
        _through_memory(clock, call, unit, hardware.shared, is_last)
    elif call.op is Op.UNSHARD:
        end = clock.launch(name, unit.moved_bytes, setting.num_shards, is_within)
        if setting.offload and hardware.device != "cpu":
            end += unit.moved_bytes / setting.num_shards / hardware.host_memory.bytes_per_s
        clock.ends[number] = end
    elif call.op is Op.WAIT:
        clock.wait(name, clock.ends.get(number, 0.0))
        clock.now += 0.0 if unit.facts.in_place else unit.moved_bytes * copy_s
    elif call.op is Op.REDUCE and is_last:
        is_packed = setting.num_shards > 1 and not unit.sends
        clock.now += unit.reduced_bytes * copy_s if is_packed else 0.0
        clock.launch(name, unit.scattered_bytes if setting.num_shards > 1 else 0, setting.num_shards, is_within)
    if call.op is Op.REDUCE and is_last:
        if setting.near_replicas and hardware.shared is not None:
            _sum_in_memory(clock, unit, hardware.shared)
        elif setting.num_replicas > 1:
            is_near = setting.ranks <= hardware.ranks_per_host
            clock.launch(name, unit.summed_bytes, setting.num_replicas, is_near)
        if setting.offload and hardware.device != "cpu":
            clock.comm_free_at += unit.section_bytes / hardware.host_memory.bytes_per_s


def _cast_s(call: Call, unit: RankUnit, hardware: Hardware) -> float:
    """Return the seconds in which this rank's section is cast for a gather, or gradients for their reduction."""
    if call.op is Op.UNSHARD:
        numel = unit.cast_bytes // 2
    elif call.op in (Op.REDUCE, Op.HOLD) and unit.reduced_bytes != unit.gradient_bytes:
        numel = unit.reduced_bytes // 4
    else:
        return 0.0
    return (
        numel / hardware.cast_elements_per_s
        if hardware.cast_elements_per_s
        else 6 * numel / hardware.memory_bytes_per_s
    )


def _through_memory(clock: _Clock, call: Call, unit: RankUnit, shared: Wire, is_last: bool) -> None:
    """Count the copies by which this rank reads all sections, copies its gradients to the outbox, and sums its own."""
    num_shards, name = clock.setting.num_shards, call.unit or "(root)"
    if call.op is Op.WAIT:
        num_bytes, added = unit.moved_bytes, 0
    elif call.op is Op.REDUCE and is_last:
        num_bytes, added = unit.scattered_bytes, (num_shards + 1) * unit.section_bytes
    else:
        return
    seconds = num_bytes / shared.bytes_per_s + added / clock.hardware.memory_bytes_per_s + shared.latency_s
    hosts = clock.setting.hosts
    if hosts > 1:  # each section enters a host once, each sum leaves it once: a ring over the ranks of a column
        clock.launch(name, num_bytes * hosts / num_shards, hosts, is_within=False, is_column=True)
    clock.block(name, num_bytes * (1 - hosts / num_shards), seconds)


def _sum_in_memory(clock: _Clock, unit: RankUnit, shared: Wire) -> None:
    """Count the copies by which this rank publishes a unit's gradients to its replicas, sums a slice, and reads the others'."""
    replicas, num_bytes = clock.setting.num_replicas, unit.section_bytes
    moved = 2 * num_bytes * (replicas - 1) // replicas
    added = (replicas + 1) * num_bytes / replicas
    seconds = moved / shared.bytes_per_s + added / clock.hardware.memory_bytes_per_s + shared.latency_s
    clock.block(unit.facts.name or "(root)", moved, seconds)


def _without_units(clock: _Clock, profile: Profile, compute: float) -> None:
    """Count DDP's reduction during the last backward or ZeRO-2's after it, and ZeRO's broadcasts of updated parameters."""
    setting, hardware = clock.setting, clock.hardware
    is_within = setting.ranks <= hardware.ranks_per_host
    num_bytes = sum(param.num_bytes for param in profile.params if param.is_trainable)
    if setting.door == "gradients":
        clock.wait("gradients", clock.launch("gradients", num_bytes, setting.ranks, is_within))
    else:
        hidden = compute / setting.accumulate * 2 / 3 if hardware.overlaps else 0.0
        before = clock.now
        end = clock.launch("gradients", 2 * num_bytes, setting.ranks, is_within)
        clock.wait("gradients", max(before, end - hidden))
    if setting.door != "none":
        clock.wait("parameters", clock.launch("parameters", num_bytes, setting.ranks, is_within))


def _exchange_matrices(clock: _Clock, profile: Profile) -> None:
    """Count the two all-to-alls by which owners of whole matrices get shards, and send them back updated."""
    setting = clock.setting
    is_within = setting.num_shards <= clock.hardware.ranks_per_host
    for transfer in optimizer_transfers(profile, setting):
        clock.wait("matrices", clock.launch("matrices", transfer.num_bytes, setting.num_shards, is_within))


def _update_s(profile: Profile, units: Sequence[RankUnit], setting: Setting, hardware: Hardware) -> float:
    host = 0.0
    if setting.door in UNIT_DOORS:
        numel = sum(unit.state_numel for unit in units)
        if not hardware.overlaps:
            host = sum(param.is_trainable for param in profile.params) * hardware.host_s_per_update
    else:
        shared = setting.ranks if setting.door != "none" else 1
        numel = -(-sum(param.numel for param in profile.params if param.is_trainable) // shared)
    rate = hardware.memory_bytes_per_s
    if setting.offload and hardware.device != "cpu":
        rate = hardware.host_memory.bytes_per_s
    if hardware.update_elements_per_s and not setting.offload and setting.state_bytes == OPTIMIZERS["adamw"]:
        return host + numel / hardware.update_elements_per_s
    return host + numel * (setting.state_bytes * 2 + 3 * 4) / rate

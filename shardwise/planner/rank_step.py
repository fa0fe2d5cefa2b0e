"""A step of one rank in closed form: its memory by kind, and its time; the rank with the most memory stands for all."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from shardwise.collectives.buffer_pool import size_class
from shardwise.collectives.host.send_recv import NUM_INBOXES
from shardwise.collectives.host.shared_memory import NUM_SLOTS, sum_slot_bytes, sums_bytes
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.fsdp.flat_buffer import KEPT_BYTES
from shardwise.fsdp.gradients import FULL_BYTES_ON_HOST
from shardwise.observe import Call, Op
from shardwise.planner.hardware import Hardware, Wire, matrix_rate, ring_s
from shardwise.planner.profile import (
    MATRIX_STATE_BYTES,
    OPTIMIZERS,
    SHARED,
    TIERS,
    UNIT_STRATEGIES,
    Profile,
    Setting,
    Stretch,
)
from shardwise.planner.rank_units import (
    Exchanges,
    Passage,
    RankUnit,
    Steps,
    exchanges_of,
    optimizer_transfers,
)

KINDS: tuple[str, ...] = (
    "parameters",  # shards, replicated parameters, and the model's buffers
    "optimizer",
    "gradients",  # reduced, until the optimizer has used them
    "full parameters",
    "full gradients",  # as backward makes them, and unsynced ones that wait for later microbatches
    "staging",  # of collectives
    "activations",  # and temporaries of operations
    "idle buffers",  # of the buffer pool, on CPU; elsewhere the device's allocator has them
    "libraries",  # workspaces of the accelerator's libraries
)
UPDATE = "optimizer step"  # the last event of a step


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step: its place, the bytes of each of ``KINDS``, and the last event of a block before it."""

    place: str
    held: tuple[int, ...]
    event: str = ""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.held)

    def __repr__(self) -> str:
        held = sorted(zip(self.held, KINDS, strict=True), reverse=True)
        parts = ", ".join(f"{kind} {format_bytes(num_bytes)}" for num_bytes, kind in held if num_bytes)
        return f"{self.place}: {format_bytes(self.total)} ({parts})"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The moments of a step in order; ``host_bytes``: in the host's memory (offload)."""

    moments: tuple[Moment, ...]
    host_bytes: int = 0

    @property
    def peak(self) -> Moment:
        """The moment of the highest memory."""
        return max(self.moments, key=lambda moment: moment.total)

    def by_event(self) -> tuple[Moment, ...]:
        """Return, for each event of a block in order, the highest moment before the next event."""
        groups = groupby(self.moments, key=lambda moment: moment.event)
        return tuple(max(group, key=lambda moment: moment.total) for _, group in groups)


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


@dataclass(frozen=True, slots=True)
class RankStep:
    """The memory and the time of a warm step of one rank."""

    memory: RankMemory
    time: RankTime


def step_of(
    profile: Profile, units: Sequence[RankUnit], steps: Steps, setting: Setting, hardware: Hardware
) -> RankStep:
    """Return a warm step of ``setting``: all of its microbatches, and the update.

    Args:
        profile: of the precision and recomputation of ``setting``.
        units, steps: of ``setting``.
        hardware: on CPU the buffer pool keeps buffers, elsewhere the device's allocator does.
    """
    memory = _Memory(profile, units, setting, hardware)
    has_units = setting.strategy in UNIT_STRATEGIES
    if memory.on_cpu and has_units:  # so that the buffer pool is warm
        _walk(memory, _Clock(setting, hardware), profile, steps)
    clock = _Clock(setting, hardware)
    compute = _walk(memory, clock, profile, steps)
    if has_units:
        clock.wait("end of backward", clock.comm_free_at)
    else:
        clock.end_without_units(profile, compute)
    update = _update_s(profile, units, setting, hardware)
    if setting.matrices and setting.num_shards > 1:
        update += memory.exchanges.flops / matrix_rate(hardware, "bf16")
        clock.exchange_matrices(profile)
    num_ops = setting.accumulate * sum(passage.stretch.work.num_ops for passage in steps.passages)
    host = num_ops * hardware.host_s_per_op
    host += len(units) * setting.accumulate * hardware.host_s_per_unit if has_units else 0.0
    seconds = max(clock.now, host) if hardware.overlaps else clock.now + (host if hardware.op_seconds else 0.0)
    waits = tuple(sorted(clock.waits.items(), key=lambda item: -item[1]))
    sent = (int(clock.inside), int(clock.between))
    time = RankTime(seconds + update, compute, sum(clock.waits.values()), host, update, clock.moved_s, *sent, waits)
    return RankStep(RankMemory(tuple(memory.moments), memory.host_bytes), time)


def _walk(memory: _Memory, clock: _Clock, profile: Profile, steps: Steps) -> float:
    """Carry out a step; return the seconds of its computation."""
    setting, compute = memory.setting, 0.0
    has_units = setting.strategy in UNIT_STRATEGIES
    memory.moments.clear()
    for left in reversed(range(setting.accumulate)):
        for passage in steps.passages:
            mark = passage.mark
            if mark.event is not None:
                memory.event = f"{mark.event.value} {profile.blocks[mark.block] or '(root)'}"
            elif has_units:
                param = profile.params[mark.param]
                is_cast = profile.precision == "bf16" and param.is_floating
                memory.gradient_comes(passage, param.numel * (2 if is_cast else param.itemsize))
            for call in passage.calls if has_units else ():
                call = Call(Op.HOLD, call.unit) if call.op is Op.REDUCE and left else call
                memory.call(call)
                clock.call(call, memory.of[call.unit].unit)
            memory.compute(profile, passage)
            seconds = seconds_of(passage.stretch, profile, clock.hardware)
            compute += seconds
            clock.now += seconds
            clock.sum_split(passage.stretch)
        if has_units:
            memory.end_backward(steps, is_last=not left)
    memory.update(profile)
    return compute


@dataclass(slots=True)
class _Pool:
    """Storages by size class: on CPU the pool keeps those that are released."""

    keeps: bool
    free: Counter[int] = field(default_factory=Counter[int])

    @property
    def idle(self) -> int:
        return sum(size * count for size, count in self.free.items())

    def acquire(self, num_bytes: int) -> int:
        size = size_class(num_bytes) if self.keeps and num_bytes else num_bytes
        self.free[size] -= self.free[size] > 0
        return size

    def take_back(self, size: int) -> None:
        self.free[size] += self.keeps


@dataclass(slots=True)
class _Held:
    """The current memory of a unit.

    Attributes:
        sizes: of buffers in use, by what they are for.
        arrived: bytes of gradients since the last reduction.  waiting: of unsynced ones, for later microbatches.
        kept: of a small section that stays from step to step.
        flying: of coded gradients in flight.  sent: of gradients that are sent in place.
    """

    unit: RankUnit
    sizes: Counter[str] = field(default_factory=Counter[str])
    arrived: int = 0
    waiting: int = 0
    kept: int = 0
    flying: int = 0
    sent: int = 0


class _Memory:
    """The current memory of a rank, by kind, and its moments so far."""

    def __init__(self, profile: Profile, units: Sequence[RankUnit], setting: Setting, hardware: Hardware) -> None:
        self.setting = setting
        self.on_cpu = hardware.device == "cpu"
        self.units = [_Held(unit) for unit in units]
        self.of = {each.unit.facts.name: each for each in self.units}
        self.pool = _Pool(self.on_cpu)
        self.moments: list[Moment] = []
        self.event = ""
        self.reducing: list[_Held] = []  # units whose gradients are on the way
        self.exchanges = exchanges_of(profile, setting) if setting.matrices else Exchanges()
        self.held = dict.fromkeys(KINDS, 0)
        self.held["libraries"] = hardware.library_bytes
        if setting.strategy in UNIT_STRATEGIES:
            self._hold_shards(profile, units)
            return
        trainable = [param for param in profile.params if param.is_trainable]
        owners = setting.ranks if setting.strategy != "none" else 1
        self.held["parameters"] = profile.buffer_bytes + sum(param.num_bytes for param in profile.params)
        self.held["optimizer"] = -(-sum(param.numel for param in trainable) // owners) * setting.state_bytes
        self.held["gradients"] = sum(param.num_bytes for param in trainable)  # DDP's buckets

    @property
    def is_on_host(self) -> bool:
        return self.setting.offload and not self.on_cpu

    @property
    def host_bytes(self) -> int:
        if not self.is_on_host or self.setting.strategy not in UNIT_STRATEGIES:
            return 0
        return sum(each.unit.shard_bytes + each.unit.section_bytes for each in self.units) + self._state_bytes

    @property
    def _state_bytes(self) -> int:
        elementwise = sum(each.unit.state_numel for each in self.units) - self.exchanges.matrix_numel
        return elementwise * self.setting.state_bytes + self.exchanges.owned_numel * MATRIX_STATE_BYTES

    def _hold_shards(self, profile: Profile, units: Sequence[RankUnit]) -> None:
        held, setting = self.held, self.setting
        held["parameters"] = profile.buffer_bytes
        held["optimizer"] = sum(unit.residual_bytes for unit in units)
        if not self.is_on_host:
            held["parameters"] += sum(unit.shard_bytes for unit in units)
            held["optimizer"] += self._state_bytes
        if setting.transport in (SHARED, TIERS) and setting.num_shards > 1:
            outbox_sizes = [unit.outbox_bytes for unit in (*reversed(units[1:]), units[0]) if unit.outbox_bytes]
            # pages of shared memory take memory when they are written
            held["staging"] = sum(max(outbox_sizes[slot::NUM_SLOTS], default=0) for slot in range(NUM_SLOTS))
            sections = max((unit.moved_bytes // setting.num_shards for unit in units), default=0)
            held["staging"] += NUM_INBOXES * (setting.hosts - 1) * sections
        if setting.near_replicas:  # the largest chunk that replicas sum: of a unit, or of a bucket
            sizes = [unit.section_bytes for unit in units]
            shared = min(sum(sizes), FULL_BYTES_ON_HOST) if setting.strategy == "ddp" else 0
            held["staging"] += sums_bytes(sum_slot_bytes(max(shared, *sizes)))

    def note(self, place: str, activations: int = -1) -> None:
        """Record the current bytes; ``activations``: at the peak of the computation here."""
        if activations >= 0:
            self.held["activations"] = activations
        self.held["idle buffers"] = self.pool.idle
        self.moments.append(Moment(place, tuple([self.held[kind] for kind in KINDS]), self.event))

    def note_with(self, kind: str, num_bytes: int, place: str) -> None:
        """Record the current bytes with ``num_bytes`` more, which are there for this moment alone."""
        self.held[kind] += num_bytes
        self.note(place)
        self.held[kind] -= num_bytes

    def acquire(self, of: _Held, what: str, num_bytes: int) -> None:
        size = self.pool.acquire(num_bytes)
        of.sizes[what] += size
        self.held["full parameters" if what == "full" else "staging"] += size

    def give_back(self, of: _Held, what: str) -> None:
        size = of.sizes.pop(what, 0)
        self.pool.take_back(size)
        self.held["full parameters" if what == "full" else "staging"] -= size

    def compute(self, profile: Profile, passage: Passage) -> None:
        """Count the computation after a mark."""
        mark, stretch = passage.mark, passage.stretch
        place = "gradient of " + profile.params[mark.param].name if mark.event is None else self.event
        self.note(place, profile.input_bytes + stretch.peak_bytes)
        self.held["activations"] = profile.input_bytes + stretch.left_bytes

    def call(self, call: Call) -> None:
        """Carry out a call of the engine."""
        of = self.of[call.unit]
        unit, facts, place = of.unit, of.unit.facts, f"{call.op.value} {call.unit or '(root)'}"
        if call.op is Op.UNSHARD:
            self.held["staging"] += unit.cast_bytes
            held_full = facts.full_bytes if facts.in_place else 0
            if facts.gather_bytes > held_full:
                self.acquire(of, "gather", facts.gather_bytes - held_full)
            if held_full:
                self.acquire(of, "full", held_full)
        elif call.op is Op.WAIT:
            if not facts.in_place:
                self.acquire(of, "full", facts.full_bytes)
            self.note_with("staging", unit.decoding_bytes, place)
            self.give_back(of, "gather")
            self.held["staging"] -= unit.cast_bytes
        elif call.op is Op.RESHARD:
            self.give_back(of, "full")
        elif call.op is Op.REDUCE:
            self._reduce(of, place)
        elif call.op is Op.HOLD:
            self.note(place)
            of.waiting += of.arrived
            of.arrived = 0

    def gradient_comes(self, passage: Passage, num_bytes: int) -> None:
        """Count a gradient as backward makes it; after the last one, cast all to the dtype of the reduction."""
        of = self.units[passage.unit]
        unit = of.unit
        of.arrived += num_bytes
        self.held["full gradients"] += num_bytes
        if passage.ends and unit.reduced_bytes != unit.gradient_bytes:
            self.held["full gradients"] += unit.reduced_bytes - of.arrived
            of.arrived = unit.reduced_bytes
            largest = unit.largest_gradient_bytes
            self.note_with("full gradients", largest, f"cast gradients of {unit.facts.name or '(root)'}")

    def _reduce(self, of: _Held, place: str) -> None:
        unit, held = of.unit, self.held
        self.end_reductions()
        summed = unit.reduced_bytes if of.waiting else 0  # unsynced and new gradients stay alive with their sum
        held["full gradients"] += summed
        stays = self.setting.num_shards == 1 and self.on_cpu  # an all-reduce works in place
        self.reducing.append(of)
        if not stays:
            if unit.facts.reduce_bytes:
                self.acquire(of, "scatter", unit.facts.reduce_bytes)
            held["gradients"] += 0 if of.kept or self.is_on_host else unit.section_bytes
            of.kept = unit.section_bytes if unit.section_bytes <= KEPT_BYTES else 0
        self.note_with("staging", unit.coding_bytes, place)
        if unit.coded_bytes:  # the packed gradients are messages now
            self.give_back(of, "scatter")
            of.flying = unit.coded_bytes
            held["staging"] += unit.coded_bytes
        if unit.sends:
            of.sent = summed + of.arrived  # messages are sent in place
        else:
            held["full gradients"] -= summed + of.arrived
        if stays:
            held["gradients"] += unit.reduced_bytes
        of.arrived = 0
        self.note(place)

    def end_reductions(self) -> None:
        for of in self.reducing:
            self.give_back(of, "scatter")
            self.held["staging"] -= of.flying
            self.held["full gradients"] -= of.sent
            of.flying = of.sent = 0
        self.reducing.clear()

    def end_backward(self, steps: Steps, is_last: bool) -> None:
        """End a microbatch: commit, or add its gradients to the unsynced ones."""
        for call in steps.releases:
            self.call(call)
        for call in steps.commits if is_last else ():
            of = self.of[call.unit]
            self.give_back(of, "scatter")
            self.held["full gradients"] -= of.waiting
            of.waiting = 0
        if is_last:
            self.end_reductions()
            return
        for of in self.units:
            num_bytes = of.unit.reduced_bytes
            if of.waiting > num_bytes:
                self.note_with("full gradients", num_bytes, f"add gradients of {of.unit.facts.name or '(root)'}")
                self.held["full gradients"] -= of.waiting - num_bytes
                of.waiting = num_bytes

    def update(self, profile: Profile) -> None:
        """Count the step of the optimizer, and free the gradients."""
        setting = self.setting
        self.event = UPDATE
        self.note(UPDATE, 0)
        for place, staged in self.exchanges.moments() if setting.matrices and setting.num_shards > 1 else ():
            self.note_with("staging", staged, place)
        if setting.strategy in UNIT_STRATEGIES:
            self.held["gradients"] = sum(of.kept for of in self.units)  # zero_grad


@dataclass(slots=True)
class _Clock:
    """Two streams: computation, and collectives, one after another.

    Attributes:
        now: of the computation.  comm_free_at: when the last collective ends.
        moved_s: of all collectives.  inside, between: bytes sent, within a host and to others.
        ends: of all-gathers, by unit.  waits: exposed seconds, by what was waited for.
    """

    setting: Setting
    hardware: Hardware
    now: float = 0.0
    comm_free_at: float = 0.0
    moved_s: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    ends: dict[str, float] = field(default_factory=dict[str, float])
    waits: dict[str, float] = field(default_factory=dict[str, float])

    def is_near(self, ranks: int) -> bool:
        """Return True if so many data-parallel ranks are on one host, beside those that split blocks with them."""
        return ranks <= max(self.hardware.ranks_per_host // self.setting.tensor, 1)

    def launch(self, unit: str, num_bytes: float, ranks: int, is_near: bool, per_host: int | None = None) -> float:
        """Start a ring collective over ``ranks``, ``per_host`` of them on a host, for ``unit``; return its end time."""
        near = max(self.hardware.ranks_per_host // self.setting.tensor, 1) if per_host is None else per_host
        seconds = ring_s(replace(self.hardware, ranks_per_host=near), num_bytes, ranks, is_near)
        self.send(num_bytes * (ranks - 1) / ranks, seconds, is_near)
        self.comm_free_at = max(self.comm_free_at, self.now) + seconds
        if not self.hardware.overlaps:
            self.comm_free_at = self.now + seconds
            self.wait(unit, self.comm_free_at)
        return self.comm_free_at

    def send(self, num_bytes: float, seconds: float, is_near: bool) -> None:
        """Count what is sent, overlapped or exposed."""
        self.inside += num_bytes if is_near else 0
        self.between += 0 if is_near else num_bytes
        self.moved_s += seconds

    def block(self, unit: str, num_bytes: float, seconds: float, is_near: bool = True) -> None:
        """Send while nothing else runs."""
        self.send(num_bytes, seconds, is_near)
        self.wait(unit, self.now + seconds)

    def wait(self, unit: str, end: float) -> None:
        """Continue computation at ``end`` at the earliest."""
        if end > self.now:
            self.waits[unit] = self.waits.get(unit, 0.0) + end - self.now
            self.now = end

    def sum_split(self, stretch: Stretch) -> None:
        """Count the collectives of the ranks that split a block: the next operation needs them: they overlap nothing."""
        work, ranks = stretch.work, self.setting.tensor
        if work.num_rings:
            is_near = ranks <= self.hardware.ranks_per_host
            seconds = work.num_rings * ring_s(self.hardware, work.ring_bytes / work.num_rings, ranks, is_near)
            self.block("split blocks", work.ring_bytes * (ranks - 1) / ranks, seconds, is_near)

    def call(self, call: Call, unit: RankUnit) -> None:
        """Carry out a call of the engine."""
        setting, hardware, name = self.setting, self.hardware, call.unit or "(root)"
        self.now += _cast_s(call, unit, hardware)
        copy_s = 2 / hardware.memory_bytes_per_s
        offloads = setting.offload and hardware.device != "cpu"
        if setting.transport in (SHARED, TIERS) and hardware.shared is not None and setting.num_shards > 1:
            self._copy_in_memory(call, unit, hardware.shared)
        elif call.op is Op.UNSHARD:
            self.ends[name] = self.launch(name, unit.moved_bytes, setting.num_shards, self.is_near(setting.num_shards))
            if offloads:
                self.ends[name] += unit.moved_bytes / setting.num_shards / hardware.host_memory.bytes_per_s
        elif call.op is Op.WAIT:
            self.wait(name, self.ends.get(name, 0.0))
            self.now += 0.0 if unit.facts.in_place else unit.moved_bytes * copy_s
        elif call.op is Op.REDUCE:
            self.now += unit.reduced_bytes * copy_s if setting.num_shards > 1 and not unit.sends else 0.0
            self.launch(name, unit.scattered_bytes, setting.num_shards, self.is_near(setting.num_shards))
        if call.op is not Op.REDUCE:
            return
        if setting.near_replicas and hardware.shared is not None:
            self._sum_in_memory(unit, hardware.shared)
        elif setting.num_replicas > 1:
            self.launch(name, unit.summed_bytes, setting.num_replicas, self.is_near(setting.ranks))
        if offloads:
            self.comm_free_at += unit.section_bytes / hardware.host_memory.bytes_per_s

    def _copy_in_memory(self, call: Call, unit: RankUnit, shared: Wire) -> None:
        """Count the copies by which this rank reads all sections, copies its gradients to the outbox, and sums its own."""
        num_shards, hosts, name = self.setting.num_shards, self.setting.hosts, call.unit or "(root)"
        if call.op is Op.WAIT:
            num_bytes, added = unit.moved_bytes, 0
        elif call.op is Op.REDUCE:
            num_bytes, added = unit.scattered_bytes, (num_shards + 1) * unit.section_bytes
        else:
            return
        seconds = num_bytes / shared.bytes_per_s + added / self.hardware.memory_bytes_per_s + shared.latency_s
        if hosts > 1:  # each section enters a host once, each sum leaves it once: a ring over the ranks of a column
            self.launch(name, num_bytes * hosts / num_shards, hosts, is_near=False, per_host=1)
        self.block(name, num_bytes * (1 - hosts / num_shards), seconds)

    def _sum_in_memory(self, unit: RankUnit, shared: Wire) -> None:
        """Count the copies by which this rank publishes a unit's gradients to replicas, sums a slice, and reads the others'."""
        replicas, num_bytes = self.setting.num_replicas, unit.section_bytes
        moved = 2 * num_bytes * (replicas - 1) // replicas
        added = (replicas + 1) * num_bytes / replicas
        seconds = moved / shared.bytes_per_s + added / self.hardware.memory_bytes_per_s + shared.latency_s
        self.block(unit.facts.name or "(root)", moved, seconds)

    def end_without_units(self, profile: Profile, compute: float) -> None:
        """Count DDP's reduction during the last backward, and ZeRO-1's broadcasts of parameters."""
        setting, is_near = self.setting, self.is_near(self.setting.ranks)
        num_bytes = sum(param.num_bytes for param in profile.params if param.is_trainable)
        hidden = compute / setting.accumulate * 2 / 3 if self.hardware.overlaps else 0.0
        self.wait("gradients", self.launch("gradients", 2 * num_bytes, setting.ranks, is_near) - hidden)
        if setting.strategy != "none":
            self.wait("parameters", self.launch("parameters", num_bytes, setting.ranks, is_near))

    def exchange_matrices(self, profile: Profile) -> None:
        """Count the two all-to-alls by which owners of whole matrices get shards, and send them back updated."""
        ranks = self.setting.num_shards
        for transfer in optimizer_transfers(profile, self.setting):
            self.wait("matrices", self.launch("matrices", transfer.num_bytes, ranks, self.is_near(ranks)))


def seconds_of(stretch: Stretch, profile: Profile, hardware: Hardware) -> float:
    """Return the seconds of the computation after a mark."""
    work, known = stretch.work, hardware.op_seconds
    names = [profile.op_names[number] for number, _ in work.ops] if known else []
    if names and all(name in known for name in names):
        return sum(known[name] * count for name, (_, count) in zip(names, work.ops, strict=True))
    return work.flops / matrix_rate(hardware, profile.precision) + work.traffic_bytes / hardware.memory_bytes_per_s


def _cast_s(call: Call, unit: RankUnit, hardware: Hardware) -> float:
    """Return the seconds in which this rank's section is cast for a gather, or gradients for their reduction."""
    if call.op is Op.UNSHARD:
        numel = unit.cast_bytes // 2
    elif call.op in (Op.REDUCE, Op.HOLD) and unit.reduced_bytes != unit.gradient_bytes:
        numel = unit.reduced_bytes // 4
    else:
        return 0.0
    return numel / (hardware.cast_elements_per_s or hardware.memory_bytes_per_s / 6)


def _update_s(profile: Profile, units: Sequence[RankUnit], setting: Setting, hardware: Hardware) -> float:
    trainable = [param for param in profile.params if param.is_trainable]
    host, rate = 0.0, hardware.memory_bytes_per_s
    if setting.strategy in UNIT_STRATEGIES:
        numel = sum(unit.state_numel for unit in units)
        host = 0.0 if hardware.overlaps else len(trainable) * hardware.host_s_per_update
    else:
        owners = setting.ranks if setting.strategy != "none" else 1
        numel = -(-sum(param.numel for param in trainable) // owners)
    if setting.offload and hardware.device != "cpu":
        rate = hardware.host_memory.bytes_per_s
    if hardware.update_elements_per_s and not setting.offload and setting.state_bytes == OPTIMIZERS["adamw"]:
        return host + numel / hardware.update_elements_per_s
    return host + numel * (setting.state_bytes * 2 + 3 * 4) / rate


# ---- A drawing of one rank's memory over a step: stacked by kind, with the peak labelled.

COLOURS = ("#4c72b0", "#8172b3", "#937860", "#55a868", "#c44e52", "#dd8452", "#64b5cd", "#cccccc", "#8c8c8c")


def draw_memory(memory: RankMemory, title: str, limit: float, path: Path) -> None:
    """Draw ``memory`` to ``path``; ``limit``: bytes that a plan may fill.  Raises: ConfigError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib, which is not installed here: pip install 'shardwise[train]'")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plt: Any = pyplot
    moments, peak = memory.moments, memory.peak
    figure, axes = plt.subplots(figsize=(12, 6))
    rows = [[moment.held[kind] / 1e9 for moment in moments] for kind in range(len(KINDS))]
    shown = [number for number, row in enumerate(rows) if any(row)]
    places = range(len(moments))
    colours = [COLOURS[number] for number in shown]
    axes.stackplot(
        places, *[rows[number] for number in shown], labels=[KINDS[number] for number in shown], colors=colours
    )
    at = moments.index(peak)
    axes.annotate(
        f"{peak.total / 1e9:.3g} GB: {peak.place}",
        xy=(at, peak.total / 1e9),
        xytext=(0.5, 1.02),
        textcoords="axes fraction",
        ha="center",
        arrowprops={"arrowstyle": "->"},
    )
    if limit < 2 * peak.total:
        axes.axhline(limit / 1e9, color="black", linestyle="--", linewidth=1, label="what a plan may fill")
    axes.set(xlabel="moments of the step", ylabel="GB on one rank", xlim=(0, len(moments) - 1))
    axes.set_title(title, pad=24)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

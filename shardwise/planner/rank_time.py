"""How long a step takes on one rank: computation, communication that nothing hides, and the host that launches both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.events import Call, Op
from shardwise.planner.hardware import Hardware, Wire, matrix_rate, ring_s
from shardwise.planner.optimizer_calls import optimizer_transfers, update_flops
from shardwise.planner.profile import Profile, Stretch
from shardwise.planner.rank_units import RankUnit
from shardwise.planner.setting import OPTIMIZERS, SHARED, TIERS, UNIT_DOORS, Setting
from shardwise.planner.step_order import Steps


@dataclass(frozen=True, slots=True)
class RankTime:
    """A step of one rank, in seconds.

    Attributes:
        step_s: all of it.  compute_s: of operations.  exposed_s: waits for other ranks that nothing hides.
        host_s: what the host needs to launch everything; a step is never shorter.
        optimizer_s: of the update.
        communication_s: of all collectives, hidden or not.
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
    """Two lanes: computation, and collectives, one after another."""

    setting: Setting
    hardware: Hardware
    now: float = 0.0
    lane: float = 0.0
    exposed: float = 0.0
    moved_s: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    ends: dict[int, float] = field(default_factory=dict[int, float])
    waits: dict[str, float] = field(default_factory=dict[str, float])

    def launch(self, unit: str, num_bytes: float, ranks: int, is_within: bool, is_column: bool = False) -> float:
        """Start a ring collective over ``ranks`` for ``unit``, with ``is_column`` one of each host; return when it ends."""
        hardware = replace(self.hardware, ranks_per_host=1) if is_column else self.hardware
        seconds = ring_s(hardware, num_bytes, ranks, is_within)
        if ranks > 1:
            sent = num_bytes * (ranks - 1) / ranks
            self.inside += sent if is_within else 0
            self.between += 0 if is_within else sent
        self.moved_s += seconds
        self.lane = max(self.lane, self.now) + seconds
        if not self.hardware.overlaps:
            self.lane = self.now + seconds
            self.expose(unit, seconds)
            self.now = self.lane
        return self.lane

    def expose(self, unit: str, seconds: float) -> None:
        if seconds > 0:
            self.exposed += seconds
            self.waits[unit] = self.waits.get(unit, 0.0) + seconds

    def wait(self, unit: str, end: float) -> None:
        """Let computation go on at ``end`` at the earliest."""
        self.expose(unit, end - self.now)
        self.now = max(self.now, end)


def seconds_of(work: Stretch, profile: Profile, hardware: Hardware) -> float:
    """Return the seconds of what is computed after a mark."""
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
    # The ranks of a split are neighbours, so that a host has fewer ranks of the axes of data.
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
        clock.wait("end of backward", clock.lane)
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
    """Count the collectives of the ranks that split a block: what follows needs them, so that nothing hides them."""
    work, ranks = stretch.work, clock.setting.tensor
    if not work.num_rings:
        return
    is_within = ranks <= hardware.ranks_per_host
    seconds = work.num_rings * ring_s(hardware, work.ring_bytes / work.num_rings, ranks, is_within)
    sent = work.ring_bytes * (ranks - 1) / ranks
    clock.inside += sent if is_within else 0
    clock.between += 0 if is_within else sent
    clock.moved_s += seconds
    clock.expose("split blocks", seconds)
    clock.now += seconds


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
        clock.now += 0.0 if unit.facts.in_place else unit.moved_bytes * copy_s  # messages come where they belong
    elif call.op is Op.REDUCE and is_last:
        is_packed = setting.num_shards > 1 and not unit.facts.in_place
        clock.now += unit.reduced_bytes * copy_s if is_packed else 0.0
        clock.launch(name, unit.scattered_bytes if setting.num_shards > 1 else 0, setting.num_shards, is_within)
    if call.op is Op.REDUCE and is_last:
        if setting.near_replicas and hardware.shared is not None:
            _sum_in_memory(clock, unit, hardware.shared)
        elif setting.num_replicas > 1:
            is_near = setting.ranks <= hardware.ranks_per_host
            clock.launch(name, unit.summed_bytes, setting.num_replicas, is_near)
        if setting.offload and hardware.device != "cpu":
            clock.lane += unit.section_bytes / hardware.host_memory.bytes_per_s


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
    """Count the copies by which this rank reads all sections, lays out its gradients for the others, and sums its own."""
    num_shards, name = clock.setting.num_shards, call.unit or "(root)"
    if call.op is Op.WAIT:
        num_bytes, added = unit.moved_bytes, 0
    elif call.op is Op.REDUCE and is_last:
        num_bytes, added = unit.scattered_bytes, (num_shards + 1) * unit.section_bytes
    else:
        return
    seconds = num_bytes / shared.bytes_per_s + added / clock.hardware.memory_bytes_per_s + shared.latency_s
    hosts = clock.setting.hosts
    if hosts > 1:  # each section comes to a host once, sums leave it once: a ring over the ranks of a column
        clock.launch(name, num_bytes * hosts / num_shards, hosts, is_within=False, is_column=True)
    clock.inside += num_bytes * (1 - hosts / num_shards)
    clock.moved_s += seconds
    clock.expose(name, seconds)
    clock.now += seconds


def _sum_in_memory(clock: _Clock, unit: RankUnit, shared: Wire) -> None:
    """Count the copies by which this rank lays out a unit's gradients for its replicas, sums a slice, and reads the others'."""
    replicas, num_bytes = clock.setting.num_replicas, unit.section_bytes
    moved = 2 * num_bytes * (replicas - 1) // replicas
    added = (replicas + 1) * num_bytes / replicas
    seconds = moved / shared.bytes_per_s + added / clock.hardware.memory_bytes_per_s + shared.latency_s
    clock.inside += moved
    clock.moved_s += seconds
    clock.expose(unit.facts.name or "(root)", seconds)
    clock.now += seconds


def _without_units(clock: _Clock, profile: Profile, compute: float) -> None:
    """DDP reduces during the last backward, ZeRO-2 after it; ZeRO sends the updated parameters of each owner to all."""
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
    """Count the two all-to-alls by which owners of whole matrices get shards, and give them back updated."""
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

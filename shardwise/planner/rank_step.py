"""A step of one rank in closed form: its memory by kind, and its time; the rank with the most memory stands for all."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shardwise.collectives.shared_memory import NUM_SLOTS, sum_slot_bytes, sums_bytes
from shardwise.collectives.streams import size_class
from shardwise.formatting import format_bytes
from shardwise.fsdp.flat_buffer import KEPT_BYTES
from shardwise.layout import Bucket, ChunkShard, align, build_bucket, by_size
from shardwise.observe import Call, Op
from shardwise.plan.grouping import compress_paths, group_blocks
from shardwise.plan.schedule import (
    ExecutionOrder,
    OrderEntry,
    PrefetchBudget,
    StepEvent,
    StepPlan,
    UnitFacts,
    UnitPolicy,
    plan_step,
)
from shardwise.planner.hardware import (
    ONE_UNIT,
    RESHARDING,
    ROOT,
    SHARED,
    UNIT_STRATEGIES,
    Hardware,
    ParamFacts,
    Profile,
    Setting,
    StepMark,
    Stretch,
    Wire,
    matrix_rate,
    params_by_block,
    ring_s,
)

# ---- The units of a model on one rank, with sizes and padding exactly as the layout computes them.

K = TypeVar("K", bound=Hashable)
_BYTE_ALIGNMENT = 16  # of each bucket in a section that several dtypes share, as in fsdp/flat_buffer.py


@dataclass(frozen=True, slots=True)
class RankUnit:
    """A unit on one rank, the rank with the most memory.

    Attributes:
        facts: what planning a step needs.
        blocks: its blocks.  params: its parameters, by number.
        shard_bytes: of its sections, padding included.
        state_numel: elements that the optimizer updates here.
        section_bytes: of its reduced gradients, as the reduction leaves them.
        gradient_bytes: of the gradients of the full unit, as backward makes them; ``reduced_bytes``: as they are
            reduced.
        largest_gradient_bytes: of the largest parameter's gradient, as backward makes it.
        padding_ratio: elements that an all-gather moves divided by those of the parameters.
        moved_bytes: of an all-gather's result.
        outbox_bytes: that its reduction writes for other ranks, or for all if it has no large tensors, in shared
            memory.
        cast_bytes: of this rank's section in the dtype of the all-gather, if that differs from the stored one.
    """

    facts: UnitFacts
    blocks: tuple[int, ...]
    params: tuple[int, ...]
    shard_bytes: int
    state_numel: int
    gradient_bytes: int
    largest_gradient_bytes: int
    padding_ratio: float
    moved_bytes: int
    cast_bytes: int
    section_bytes: int
    reduced_bytes: int
    outbox_bytes: int


def rank_units(profile: Profile, setting: Setting, device: str) -> tuple[RankUnit, ...]:
    """Return the units of ``setting``, the root's first; ``device``: "cpu" or an accelerator, which aligns tensors."""
    groups = [tuple(profile.blocks.index(path) for path in paths) for paths in unit_paths(profile, setting)]
    taken = {block for group in groups for block in group}
    rest = tuple(block for block in range(len(profile.blocks)) if block not in taken)
    params = params_by_block(profile)
    found: list[RankUnit] = []
    for blocks in (rest, *sorted(groups)):
        numbers = tuple(sorted(number for block in blocks for number in params[block]))
        found.append(_unit(profile, setting, device == "cpu", blocks, numbers))
    return tuple(found)


def unit_paths(profile: Profile, setting: Setting) -> list[tuple[str, ...]]:
    """Return the paths of the blocks of each unit but the root's."""
    if setting.min_unit_bytes >= ONE_UNIT:
        return []
    merged = setting.min_unit_bytes if setting.strategy != "ddp" else 0
    return [paths for children in profile.families for paths in group_blocks(children, merged)]


@functools.lru_cache(maxsize=1024)
def _layout(shapes: tuple[tuple[int, ...], ...], shards: int, alignment: int, full_alignment: int) -> Bucket:
    cuts = [ChunkShard(shape, 0, shards) for shape in shapes]
    return build_bucket([cuts[index] for index in by_size(cuts)], alignment, full_alignment)


def _unit(
    profile: Profile, setting: Setting, on_cpu: bool, blocks: tuple[int, ...], numbers: tuple[int, ...]
) -> RankUnit:
    """Return the unit of ``blocks``, whose parameters have these numbers."""
    ranks, is_bf16, is_shared = setting.num_shards, setting.precision == "bf16", setting.transport == SHARED
    is_cut = ranks > 1

    def layout(members: Sequence[ParamFacts], itemsize: int, full_itemsize: int = 1, is_sent: bool = True) -> Bucket:
        # Bytes, as in fsdp/flat_buffer.py.  Shards that are the full parameters are aligned as these.
        full, section = (64, 1) if on_cpu else (512, 16)
        alignments = max((section if is_sent else full) // itemsize, 1), full // full_itemsize
        return _layout(tuple(param.shape for param in members), ranks, *alignments)

    def full_itemsize_of(param: ParamFacts) -> int:
        return 2 if is_bf16 and param.is_floating else param.itemsize

    params = [profile.params[number] for number in numbers]
    trainable = [param for param in params if param.is_trainable]
    shard = section = cast = full = packed = 0
    is_full = False
    kept = _by([(param.dtype, full_itemsize_of(param)) for param in params], params)
    for (_, full_itemsize), members in kept:
        itemsize = members[0].itemsize
        is_copied = is_cut or itemsize != full_itemsize or setting.offload
        bucket = layout(members, itemsize, full_itemsize, is_copied)
        mine = bucket.section_numel * full_itemsize
        shard += bucket.section_numel * itemsize
        section = align(section + mine, _BYTE_ALIGNMENT)
        cast += mine if itemsize != full_itemsize else 0
        packed = mine * ranks
        if is_copied:
            full += bucket.full_numel * full_itemsize
        is_full = is_cut and bucket.is_one_tensor and len(kept) == 1
    if len(kept) > 1:
        packed, cast = section * ranks, section
    section_bytes = staged = outbox = 0
    for itemsize, members in _by([4 if is_bf16 else param.itemsize for param in trainable], trainable):
        bucket = layout(members, itemsize, is_sent=setting.ranks > 1)
        section_bytes += bucket.section_numel * itemsize
        staged += 0 if ranks == 1 or is_shared else ranks * bucket.section_numel * itemsize
        # this rank's own section is not in the outbox if parts are copied one by one
        others = ranks - (1 if bucket.num_large else 0)
        outbox = max(outbox, bucket.section_numel * itemsize * others)
    is_gathered = is_cut and not is_shared  # sections in shared memory are read in place
    keeps = ROOT in blocks or setting.strategy not in RESHARDING
    gradients = [param.numel * full_itemsize_of(param) for param in trainable]
    kept_bytes = sum(param.num_bytes for param in params)
    facts = UnitFacts(
        name="" if ROOT in blocks else compress_paths([profile.blocks[block] for block in blocks]),
        policy=UnitPolicy(reshard_after_forward=not keeps),
        gather_bytes=packed if is_gathered else 0,
        in_place=is_full and is_gathered,
        full_bytes=full,
        reduce_bytes=staged,
    )
    return RankUnit(
        facts=facts,
        blocks=blocks,
        params=numbers,
        shard_bytes=shard,
        state_numel=sum(ChunkShard(param.shape, 0, ranks).shard_numel(0) for param in trainable),
        gradient_bytes=sum(gradients),
        largest_gradient_bytes=max(gradients, default=0),
        padding_ratio=shard * ranks / kept_bytes if kept_bytes else 1.0,
        moved_bytes=packed if is_cut else 0,
        cast_bytes=cast,
        section_bytes=section_bytes,
        reduced_bytes=sum(param.numel * (4 if is_bf16 else param.itemsize) for param in trainable),
        outbox_bytes=outbox,
    )


def _by(keys: Sequence[K], params: Sequence[ParamFacts]) -> list[tuple[K, list[ParamFacts]]]:
    """Return the parameters of each key, in the order in which keys first appear."""
    found: dict[K, list[ParamFacts]] = {}
    for key, param in zip(keys, params, strict=True):
        found.setdefault(key, []).append(param)
    return list(found.items())


# ---- The step of a profile as the engine would run it with some units: events, and the calls that follow from each
# mark.


@dataclass(frozen=True, slots=True)
class Passage:
    """A mark of the profile and what the engine does there.

    Attributes:
        stretch: the computation after it.
        calls: of the engine, at the mark.
        unit: number of the unit of the mark.
        ends: the backward of the unit ends here, with its last gradient.
    """

    stretch: Stretch
    calls: tuple[Call, ...]
    unit: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Steps:
    """A step of some units: its passages; then the release of units without gradients, then commits."""

    plan: StepPlan
    passages: tuple[Passage, ...]
    releases: tuple[Call, ...]
    commits: tuple[Call, ...]


def steps_of(profile: Profile, units: Sequence[RankUnit], depth: int) -> Steps:
    """Return the step that uses ``units`` as the blocks of ``profile`` were used."""
    unit_of = {block: number for number, unit in enumerate(units) for block in unit.blocks}
    unit_of_param = {param: number for number, unit in enumerate(units) for param in unit.params}
    awaited = Counter(unit_of_param[each.mark.param] for each in profile.stretches if each.mark.event is None)
    with_gradients, in_backward = set(awaited), set[int]()
    left = [set[int]() for _ in units]  # blocks whose forward has not ended

    def event_of(unit: int, mark: StepMark) -> StepEvent | None:
        """Return the event of the unit at a mark: it enters with its first block, and leaves with its last one."""
        event = mark.event
        if event is None:
            awaited[unit] -= 1
            return None if awaited[unit] else StepEvent.POST_BACKWARD
        if event is StepEvent.PRE_FORWARD:
            is_first = not left[unit]
            left[unit].update(units[unit].blocks if is_first else ())
        elif event is StepEvent.POST_FORWARD:
            left[unit].discard(mark.block)
            is_first = not left[unit]
        else:
            is_first = unit not in in_backward
            in_backward.add(unit)
        return event if is_first else None

    entries: list[OrderEntry] = []
    at: list[tuple[int, StepEvent | None]] = []
    for stretch in profile.stretches:
        mark = stretch.mark
        unit = unit_of_param[mark.param] if mark.event is None else unit_of[mark.block]
        event = event_of(unit, mark)
        at.append((unit, event))
        if event is not None:
            entries.append(OrderEntry(unit, event))
    num_passed = len(entries)
    entries += [OrderEntry(unit, StepEvent.RELEASE_IN_BACKWARD) for unit in sorted(in_backward - with_gradients)]
    plan = plan_step(ExecutionOrder(tuple(entries)), [unit.facts for unit in units], PrefetchBudget(depth))
    spans = zip(plan.starts, plan.starts[1:], strict=False)
    passages = tuple(
        Passage(stretch, plan.calls[slice(*next(spans))] if event else (), unit, event is StepEvent.POST_BACKWARD)
        for stretch, (unit, event) in zip(profile.stretches, at, strict=True)
    )
    return Steps(plan, passages, plan.calls[plan.starts[num_passed] : plan.starts[-1]], plan.calls[plan.starts[-1] :])


# ---- A step of one rank in closed form: its memory by kind, and its time; the rank with the most memory stands for all.

KINDS: tuple[str, ...] = (
    "parameters",  # shards, replicated parameters, and the model's buffers
    "optimizer",
    "gradients",  # reduced, until the optimizer has used them
    "full parameters",
    "full gradients",  # as backward makes them, and unsynced ones that wait for later microbatches
    "staging",  # of collectives
    "activations",  # and temporaries of operations
    "idle buffers",  # of the buffer pool, on CPU; elsewhere the device's allocator has them
    "libraries",  # workspaces of the accelerator's libraries; on CPU, the process before it has a model
    "other ranks",  # shards and gradients of other ranks of this host, which are resident where they are read
)


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step: its place, and the bytes of each of ``KINDS``."""

    place: str
    held: tuple[int, ...]

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


def step_of(
    profile: Profile, units: Sequence[RankUnit], steps: Steps, setting: Setting, hardware: Hardware
) -> tuple[RankMemory, RankTime]:
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
    num_ops = setting.accumulate * sum(passage.stretch.work.num_ops for passage in steps.passages)
    host = num_ops * hardware.host_s_per_op
    host += len(units) * setting.accumulate * hardware.host_s_per_unit if has_units else 0.0
    seconds = max(clock.now, host) if hardware.overlaps else clock.now
    waits = tuple(sorted(clock.waits.items(), key=lambda item: -item[1]))
    sent = (int(clock.inside), int(clock.between))
    time = RankTime(seconds + update, compute, sum(clock.waits.values()), host, update, clock.moved_s, *sent, waits)
    return RankMemory(tuple(memory.moments), memory.host_bytes), time


def _walk(memory: _Memory, clock: _Clock, profile: Profile, steps: Steps) -> float:
    """Carry out a step; return the seconds of its computation."""
    setting, compute = memory.setting, 0.0
    has_units = setting.strategy in UNIT_STRATEGIES
    memory.moments.clear()
    for left in reversed(range(setting.accumulate)):
        for passage in steps.passages:
            stretch, mark = passage.stretch, passage.stretch.mark
            if mark.event is not None:
                place = f"{mark.event.value} {profile.blocks[mark.block] or '(root)'}"
            else:
                param = profile.params[mark.param]
                place = f"gradient of {param.name}"
                if has_units:
                    is_cast = profile.precision == "bf16" and param.is_floating
                    memory.gradient_comes(passage, param.numel * (2 if is_cast else param.itemsize))
            for call in passage.calls if has_units else ():
                call = Call(Op.HOLD, call.unit) if call.op is Op.REDUCE and left else call
                memory.call(call)
                clock.call(call, memory.of[call.unit].unit)
            memory.note(place, profile.input_bytes + stretch.peak_bytes)
            memory.held["activations"] = profile.input_bytes + stretch.left_bytes
            work = stretch.work
            seconds = work.flops / matrix_rate(clock.hardware, profile.precision)
            seconds += work.traffic_bytes / clock.hardware.memory_bytes_per_s
            compute += seconds
            clock.now += seconds
            clock.sum_split(stretch)
        if has_units:
            memory.end_backward(steps, is_last=not left)
    memory.end_step()
    return compute


@dataclass(slots=True)
class _Held:
    """The current memory of a unit.

    Attributes:
        sizes: of buffers in use, by what they are for.
        arrived: bytes of gradients since the last reduction.  waiting: of unsynced ones, for later microbatches.
        kept: of a small section that stays from step to step.
    """

    unit: RankUnit
    sizes: Counter[str] = field(default_factory=Counter[str])
    arrived: int = 0
    waiting: int = 0
    kept: int = 0


class _Memory:
    """The current memory of a rank, by kind, and its moments so far."""

    def __init__(self, profile: Profile, units: Sequence[RankUnit], setting: Setting, hardware: Hardware) -> None:
        self.setting = setting
        self.on_cpu = hardware.device == "cpu"
        self.units = [_Held(unit) for unit in units]
        self.of = {each.unit.facts.name: each for each in self.units}
        self.free = Counter[int]()  # buffers that the pool keeps, by size
        self.moments: list[Moment] = []
        self.reducing: list[_Held] = []  # units whose gradients are on the way
        self.held = dict.fromkeys(KINDS, 0)
        self.held["libraries"] = hardware.library_bytes
        self.is_on_disk = setting.offload and self.on_cpu
        self.host_bytes = 0
        if setting.strategy not in UNIT_STRATEGIES:
            trainable = [param for param in profile.params if param.is_trainable]
            owners = setting.ranks if setting.strategy != "none" else 1
            self.held["parameters"] = profile.buffer_bytes + sum(param.num_bytes for param in profile.params)
            self.held["optimizer"] = int(-(-sum(param.numel for param in trainable) // owners) * setting.state_bytes)
            self.held["gradients"] = sum(param.num_bytes for param in trainable)  # DDP's buckets
            return
        shards, numel = sum(unit.shard_bytes for unit in units), sum(unit.state_numel for unit in units)
        state_bytes = int(numel * setting.state_bytes * (1 - setting.disk_share))
        if setting.offload:
            everything = shards + sum(unit.section_bytes for unit in units) + state_bytes
            self.host_bytes, shards = (0, pages_of(units)) if self.is_on_disk else (everything, 0)
        else:
            self.held["optimizer"] = state_bytes
        self.held["parameters"] = profile.buffer_bytes + shards
        if setting.transport == SHARED and setting.num_shards > 1:
            # pages of shared memory take memory when they are written
            reduced = [(u.outbox_bytes, u.section_bytes) for u in (*reversed(units[1:]), units[0]) if u.outbox_bytes]
            slots = [max(reduced[slot::NUM_SLOTS], default=(0, 0)) for slot in range(NUM_SLOTS)]
            self.held["staging"] = sum(written for written, _ in slots)
            self.held["other ranks"] = (setting.num_shards - 1) * (shards + sum(read for _, read in slots))
        if setting.transport == SHARED and 1 < setting.num_replicas <= hardware.data_ranks_per_host(setting.tensor):
            sums = sums_bytes(sum_slot_bytes(sum(unit.section_bytes for unit in units)))
            self.held["staging"] += sums
            self.held["other ranks"] += sums * 2 * (setting.num_replicas - 1) // setting.num_replicas

    def note(self, place: str, activations: int = -1) -> None:
        """Record the current bytes; ``activations``: at the peak of the computation here."""
        if activations >= 0:
            self.held["activations"] = activations
        self.held["idle buffers"] = sum(size * count for size, count in self.free.items())
        self.moments.append(Moment(place, tuple([self.held[kind] for kind in KINDS])))

    def note_with(self, more: Mapping[str, int], place: str) -> None:
        """Record the current bytes with ``more`` of some kinds, which are there for this moment alone."""
        before = self.held
        self.held = {kind: num_bytes + more.get(kind, 0) for kind, num_bytes in before.items()}
        self.note(place)
        self.held = before

    def acquire(self, of: _Held, what: str, num_bytes: int) -> None:
        size = size_class(num_bytes) if self.on_cpu and num_bytes else num_bytes
        self.free[size] -= self.free[size] > 0
        of.sizes[what] += size
        self.held["full parameters" if what == "full" else "staging"] += size

    def give_back(self, of: _Held, what: str) -> None:
        size = of.sizes.pop(what, 0)
        self.free[size] += self.on_cpu
        self.held["full parameters" if what == "full" else "staging"] -= size

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
            self.note(place)
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
            self.note_with(
                {"full gradients": unit.largest_gradient_bytes}, f"cast gradients of {unit.facts.name or '(root)'}"
            )

    def _reduce(self, of: _Held, place: str) -> None:
        unit, held = of.unit, self.held
        self.end_reductions()
        summed = unit.reduced_bytes if of.waiting else 0  # unsynced and new gradients stay alive with their sum
        held["full gradients"] += summed
        # an all-reduce works in place
        stays = self.setting.num_shards == 1 and self.on_cpu and not self.setting.offload
        self.reducing.append(of)
        if not stays:
            if unit.facts.reduce_bytes:
                self.acquire(of, "scatter", unit.facts.reduce_bytes)
            held["gradients"] += 0 if of.kept or self.setting.offload else unit.section_bytes
            of.kept = unit.section_bytes if unit.section_bytes <= KEPT_BYTES else 0
        self.note(place)
        held["full gradients"] -= summed + of.arrived
        if stays:
            held["gradients"] += unit.reduced_bytes
        of.arrived = 0
        self.note(place)

    def end_reductions(self) -> None:
        for of in self.reducing:
            self.give_back(of, "scatter")
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
                self.note_with({"full gradients": num_bytes}, f"add gradients of {of.unit.facts.name or '(root)'}")
                self.held["full gradients"] -= of.waiting - num_bytes
                of.waiting = num_bytes

    def end_step(self) -> None:
        """End the optimizer step, in which two units of state that is on disk move while one is updated."""
        self.held["activations"] = 0
        states = [int(of.unit.state_numel * self.setting.state_bytes) for of in self.units]
        away = int(sum(states) * self.setting.disk_share)
        read = sum(of.unit.section_bytes for of in self.units) if self.is_on_disk else 0  # by the norm of gradients
        self.note_with({"gradients": read, "optimizer": min(away, sum(sorted(states)[-2:]))}, "optimizer step")
        if self.setting.strategy in UNIT_STRATEGIES:
            self.held["gradients"] = sum(of.kept for of in self.units)  # zero_grad
        if away:  # which a checkpoint reads into memory, as it reads parameters that are on the disk
            units = [of.unit for of in self.units]
            shards = sum(unit.shard_bytes for unit in units) - pages_of(units) if self.is_on_disk else 0
            self.note_with({"optimizer": away, "parameters": shards}, "checkpoint")


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

    def launch(self, unit: str, num_bytes: float, ranks: int, spread: int = 0) -> float:
        """Start a ring collective over ``ranks`` for ``unit``; return its end time.

        ``spread``: data-parallel ranks among which they are, if these are more: they may be on several hosts.
        """
        near = self.hardware.data_ranks_per_host(self.setting.tensor)
        is_near = max(spread, ranks) <= near
        seconds = ring_s(self.hardware, num_bytes, ranks, near, is_near)
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

    def wait(self, unit: str, end: float) -> None:
        """Continue computation at ``end`` at the earliest."""
        if end > self.now:
            self.waits[unit] = self.waits.get(unit, 0.0) + end - self.now
            self.now = end

    def sum_split(self, stretch: Stretch) -> None:
        """Count the collectives of the ranks that split a block: the next operation needs them: they overlap nothing."""
        work, ranks = stretch.work, self.setting.tensor
        if work.num_rings:
            near = self.hardware.ranks_per_host
            seconds = work.num_rings * ring_s(
                self.hardware, work.ring_bytes / work.num_rings, ranks, near, ranks <= near
            )
            self.send(work.ring_bytes * (ranks - 1) / ranks, seconds, ranks <= near)
            self.wait("split blocks", self.now + seconds)

    def call(self, call: Call, unit: RankUnit) -> None:
        """Carry out a call of the engine."""
        setting, hardware, name = self.setting, self.hardware, call.unit or "(root)"
        shards, copy_s = setting.num_shards, 2 / hardware.memory_bytes_per_s
        self.now += _cast_s(call, unit, hardware)
        offloads = setting.offload and hardware.device != "cpu"
        if setting.transport == SHARED and hardware.shared is not None and shards > 1:
            self._copy_in_memory(call, unit, hardware.shared)
        elif call.op is Op.UNSHARD:
            self.ends[name] = self.launch(name, unit.moved_bytes, shards)
            if offloads:
                self.ends[name] += unit.moved_bytes / shards / hardware.host_memory.bytes_per_s
        elif call.op is Op.WAIT:
            self.wait(name, self.ends.get(name, 0.0))
            self.now += 0.0 if unit.facts.in_place else unit.moved_bytes * copy_s
        elif call.op is Op.REDUCE:
            self.now += unit.reduced_bytes * copy_s if shards > 1 else 0.0
            self.launch(name, unit.section_bytes * shards, shards)
        if call.op is Op.REDUCE and setting.num_replicas > 1:
            self.launch(name, 2 * unit.section_bytes, setting.num_replicas, setting.ranks)
        if call.op is Op.REDUCE and offloads:
            self.comm_free_at += unit.section_bytes / hardware.host_memory.bytes_per_s

    def _copy_in_memory(self, call: Call, unit: RankUnit, shared: Wire) -> None:
        """Count the copies by which this rank reads all sections, copies its gradients to the outbox, and sums its own."""
        shards = self.setting.num_shards
        num_bytes, added = unit.moved_bytes, 0
        if call.op is Op.REDUCE:
            num_bytes, added = unit.section_bytes * shards, (shards + 1) * unit.section_bytes
        elif call.op is not Op.WAIT:
            return
        seconds = num_bytes / shared.bytes_per_s + added / self.hardware.memory_bytes_per_s + shared.latency_s
        self.send(num_bytes * (shards - 1) / shards, seconds, is_near=True)
        self.wait(call.unit or "(root)", self.now + seconds)

    def end_without_units(self, profile: Profile, compute: float) -> None:
        """Count DDP's reduction during the last backward, and ZeRO-1's broadcasts of parameters."""
        setting = self.setting
        num_bytes = sum(param.num_bytes for param in profile.params if param.is_trainable)
        hidden = compute / setting.accumulate * 2 / 3 if self.hardware.overlaps else 0.0
        self.wait("gradients", self.launch("gradients", 2 * num_bytes, setting.ranks) - hidden)
        if setting.strategy != "none":
            self.wait("parameters", self.launch("parameters", num_bytes, setting.ranks))


def _cast_s(call: Call, unit: RankUnit, hardware: Hardware) -> float:
    """Return the seconds in which this rank's section is cast for a gather, or gradients for their reduction."""
    if call.op is Op.UNSHARD:
        numel = unit.cast_bytes // 2
    elif call.op in (Op.REDUCE, Op.HOLD) and unit.reduced_bytes != unit.gradient_bytes:
        numel = unit.reduced_bytes // 4
    else:
        return 0.0
    return numel * 6 / hardware.memory_bytes_per_s


def pages_of(units: Sequence[RankUnit]) -> int:
    """Return the bytes in memory of parameters and gradients that are on a disk: those of one unit."""
    return max(unit.shard_bytes + unit.section_bytes for unit in units)


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
    update = numel * (setting.state_bytes * 2 + 3 * 4) / rate
    on_disk = numel * setting.disk_share * setting.state_bytes * 2  # read, and written
    # Forward and backward of each microbatch read parameters; the update reads and writes them; gradients are written and read.
    if setting.offload and hardware.device == "cpu":
        on_disk += sum(2 * (1 + setting.accumulate) * unit.shard_bytes + 2 * unit.section_bytes for unit in units)
    return host + max(update, on_disk / hardware.disk.bytes_per_s)

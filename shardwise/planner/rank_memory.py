"""The memory of one rank over the events of a step, by kind, in closed form; the rank with the most memory stands for all."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from shardwise.collectives.buffer_pool import size_class
from shardwise.collectives.host.send_recv import NUM_INBOXES
from shardwise.collectives.host.shared_memory import NUM_SLOTS, sum_slot_bytes, sums_bytes
from shardwise.errors import ConfigError
from shardwise.fsdp.flat_buffer import KEPT_BYTES
from shardwise.fsdp.gradients import FULL_BYTES_ON_HOST
from shardwise.observe import Call, Op
from shardwise.planner.profile import (
    MATRIX_STATE_BYTES,
    SHARED,
    TIERS,
    UNIT_DOORS,
    ParamFacts,
    Profile,
    Setting,
    StepMark,
)
from shardwise.planner.rank_units import (
    Exchanges,
    Passage,
    RankUnit,
    Steps,
    exchange_moments,
    exchanges_of,
    messages,
)

KINDS = (
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


@dataclass(slots=True)
class _Pool:
    """Storages by size class: on CPU the pool keeps those that are released; ``idle`` counts their bytes."""

    keeps: bool
    free: dict[int, int] = field(default_factory=dict[int, int])
    idle: int = 0

    def acquire(self, num_bytes: int) -> int:
        if not self.keeps:
            return num_bytes
        size = size_class(num_bytes) if num_bytes else 0
        if self.free.get(size, 0):
            self.free[size] -= 1
            self.idle -= size
        return size

    def take_back(self, size: int) -> None:
        if self.keeps and size:
            self.free[size] = self.free.get(size, 0) + 1
            self.idle += size


class _Rank:
    """The current memory of a rank."""

    def __init__(
        self, profile: Profile, units: Sequence[RankUnit], setting: Setting, device: str, library_bytes: int
    ) -> None:
        self.units = units
        self.setting = setting
        self.on_cpu = device == "cpu"
        self.pool = _Pool(self.on_cpu)
        self.held = dict.fromkeys(KINDS, 0)
        self.held["libraries"] = library_bytes
        self.moments: list[Moment] = []
        self.event = ""
        self.is_on_host = setting.offload and not self.on_cpu
        self.names = {unit.facts.name: number for number, unit in enumerate(units)}
        shards = sum(unit.shard_bytes for unit in units)
        self.exchanges = exchanges_of(profile, setting) if setting.matrices else Exchanges()
        elementwise = sum(unit.state_numel for unit in units) - self.exchanges.matrix_numel
        state = elementwise * setting.state_bytes + self.exchanges.owned_numel * MATRIX_STATE_BYTES
        self.held["parameters"] = profile.buffer_bytes + (0 if self.is_on_host else shards)
        self.held["optimizer"] = 0 if self.is_on_host else state
        self.held["optimizer"] += sum(unit.residual_bytes for unit in units)
        if setting.transport in (SHARED, TIERS) and setting.num_shards > 1:
            outbox_sizes = [unit.outbox_bytes for unit in (*reversed(units[1:]), units[0]) if unit.outbox_bytes]
            # pages of shared memory take memory when they are written
            self.held["staging"] = sum(max(outbox_sizes[slot::NUM_SLOTS], default=0) for slot in range(NUM_SLOTS))
            sections = max((unit.moved_bytes // setting.num_shards for unit in units), default=0)
            self.held["staging"] += NUM_INBOXES * (setting.hosts - 1) * sections
        if setting.near_replicas:
            self.held["staging"] += sums_bytes(_sum_slot(units, setting))
        self.host_bytes = shards + state + sum(u.section_bytes for u in units) if self.is_on_host else 0
        self.in_use: dict[tuple[str, int], int] = {}
        self.reducing: list[int] = []  # units whose packed gradients are in use
        self.coded = self.sent = 0  # bytes of coded gradients in flight; bytes of gradients that are sent in place
        self.arrived = [0] * len(units)
        self.waiting = [0] * len(units)  # unsynced, for later microbatches
        self.kept = [0] * len(units)  # small sections that stay from step to step

    def note(self, place: str, activations: int = -1) -> None:
        """Record the current bytes; ``activations``: at the peak of the computation here."""
        held = self.held
        if activations >= 0:
            held["activations"] = activations
        held["idle buffers"] = self.pool.idle
        self.moments.append(Moment(place, tuple([held[kind] for kind in KINDS]), self.event))

    def acquire(self, kind: str, unit: int, num_bytes: int) -> None:
        size = self.pool.acquire(num_bytes)
        self.in_use[kind, unit] = self.in_use.get((kind, unit), 0) + size
        self.held["full parameters" if kind == "full" else "staging"] += size

    def give_back(self, kind: str, unit: int) -> None:
        size = self.in_use.pop((kind, unit), 0)
        self.pool.take_back(size)
        self.held["full parameters" if kind == "full" else "staging"] -= size

    # ---- calls of the engine ----

    def call(self, call: Call, is_last: bool) -> None:
        number = self.names[call.unit]
        unit, place = self.units[number], f"{call.op.value} {call.unit or '(root)'}"
        if call.op is Op.UNSHARD:
            self.held["staging"] += unit.cast_bytes
            held_full = unit.facts.full_bytes if unit.facts.in_place else 0
            if unit.facts.gather_bytes > held_full:
                self.acquire("gather", number, unit.facts.gather_bytes - held_full)
            if held_full:
                self.acquire("full", number, held_full)
        elif call.op is Op.WAIT:
            if not unit.facts.in_place:
                self.acquire("full", number, unit.facts.full_bytes)
            self.held["staging"] += unit.decoding_bytes
            self.note(place)
            self.held["staging"] -= unit.decoding_bytes
            self.give_back("gather", number)
            self.held["staging"] -= unit.cast_bytes
        elif call.op is Op.RESHARD:
            self.give_back("full", number)
        elif call.op is Op.REDUCE:
            self.reduce(number, place)
        elif call.op is Op.HOLD:
            self.note(place)
            self.waiting[number] += self.arrived[number]
            self.arrived[number] = 0
        elif call.op is Op.COMMIT and is_last:
            self.give_back("scatter", number)
            self.held["full gradients"] -= self.waiting[number]
            self.waiting[number] = 0

    def gradient_comes(self, passage: Passage, num_bytes: int) -> None:
        """Count a gradient as backward makes it; after the last one, cast all to the dtype of the reduction."""
        self.arrived[passage.unit] += num_bytes
        self.held["full gradients"] += num_bytes
        unit = self.units[passage.unit]
        if passage.ends and unit.reduced_bytes != unit.gradient_bytes:
            self.held["full gradients"] += unit.reduced_bytes - self.arrived[passage.unit]
            self.arrived[passage.unit] = unit.reduced_bytes
            self.held["full gradients"] += unit.largest_gradient_bytes
            self.note(f"cast gradients of {unit.facts.name or '(root)'}")
            self.held["full gradients"] -= unit.largest_gradient_bytes

    def reduce(self, number: int, place: str) -> None:
        unit, held = self.units[number], self.held
        self.reductions_end()
        summed = (
            unit.reduced_bytes if self.waiting[number] else 0
        )  # unsynced and new gradients stay alive with their sum
        held["full gradients"] += summed
        stays = self.setting.num_shards == 1 and self.on_cpu  # an all-reduce works in place
        if not stays:
            if unit.facts.reduce_bytes:
                self.acquire("scatter", number, unit.facts.reduce_bytes)
                self.reducing.append(number)
            fresh = 0 if self.kept[number] or self.is_on_host else unit.section_bytes
            self.kept[number] = unit.section_bytes if unit.section_bytes <= KEPT_BYTES else 0
            held["gradients"] += fresh
        held["staging"] += unit.coding_bytes
        self.note(place)
        held["staging"] -= unit.coding_bytes
        if unit.coded_bytes:  # the packed gradients are messages now
            self.give_back("scatter", number)
            self.coded += unit.coded_bytes
            held["staging"] += unit.coded_bytes
        if unit.sends:
            self.sent += summed + self.arrived[number]  # messages are sent in place
        else:
            held["full gradients"] -= summed + self.arrived[number]
        if stays:
            held["gradients"] += unit.reduced_bytes
        self.arrived[number] = 0
        self.note(place)

    def reductions_end(self) -> None:
        while self.reducing:
            self.give_back("scatter", self.reducing.pop(0))
        self.held["staging"] -= self.coded
        self.held["full gradients"] -= self.sent
        self.coded = self.sent = 0

    def add_waiting(self) -> None:
        """End a microbatch that is not the last: add its gradients to the unsynced ones."""
        for number, unit in enumerate(self.units):
            if self.waiting[number] > unit.reduced_bytes:
                self.held["full gradients"] += unit.reduced_bytes
                self.note(f"add gradients of {unit.facts.name or '(root)'}")
                self.held["full gradients"] -= self.waiting[number]
                self.waiting[number] = unit.reduced_bytes


def memory_of(
    profile: Profile, units: Sequence[RankUnit], steps: Steps, setting: Setting, device: str, library_bytes: int = 0
) -> RankMemory:
    """Return the memory of one rank over a warm step.

    Args:
        profile: of the precision and recomputation of ``setting``.
        units, steps: of ``setting``.
        device: "cpu" or an accelerator: on CPU the buffer pool keeps buffers, elsewhere the device's allocator does.
        library_bytes: of that allocator, for libraries.
    """
    rank = _Rank(profile, units, setting, device, library_bytes)
    if setting.door not in UNIT_DOORS:
        return _under_ddp(rank, profile, units, steps)
    for _ in range(2 if rank.on_cpu else 1):  # the second time the pool is warm
        rank.moments = []
        for microbatch in range(setting.accumulate):
            _microbatch(rank, profile, steps, is_last=microbatch == setting.accumulate - 1)
        rank.event = UPDATE
        rank.note(UPDATE, 0)
        for place, staged in exchange_moments(rank.exchanges) if setting.matrices and setting.num_shards > 1 else ():
            rank.held["staging"] += staged
            rank.note(place)
            rank.held["staging"] -= staged
        rank.held["gradients"] = sum(rank.kept)  # zero_grad
    return RankMemory(tuple(rank.moments), rank.host_bytes)


def _microbatch(rank: _Rank, profile: Profile, steps: Steps, is_last: bool) -> None:
    for passage in steps.passages:
        mark = passage.mark
        _pass_event(rank, profile, mark)
        if mark.event is None:
            param = profile.params[mark.param]
            is_cast = profile.precision == "bf16" and param.is_floating
            rank.gradient_comes(passage, param.numel * (2 if is_cast else param.itemsize))
        for call in passage.calls:
            held = call.op is Op.REDUCE and not is_last
            rank.call(Call(Op.HOLD, call.unit) if held else call, is_last)
        _compute(rank, profile, passage)
    for call in steps.releases:
        rank.call(call, is_last)
    if is_last:
        for call in steps.commits:
            rank.call(call, is_last)
        rank.reductions_end()
    else:
        rank.add_waiting()


def _pass_event(rank: _Rank, profile: Profile, mark: StepMark) -> None:
    if mark.event is not None:
        rank.event = f"{mark.event.value} {profile.blocks[mark.block] or '(root)'}"


def _compute(rank: _Rank, profile: Profile, passage: Passage) -> None:
    mark, stretch = passage.mark, passage.stretch
    place = "gradient of " + profile.params[mark.param].name if mark.event is None else rank.event
    rank.note(place, profile.input_bytes + stretch.peak_bytes)
    rank.held["activations"] = profile.input_bytes + stretch.left_bytes


def _under_ddp(rank: _Rank, profile: Profile, units: Sequence[RankUnit], steps: Steps) -> RankMemory:
    """Count replicated parameters; gradients are DDP's ("none", "optimizer") or plain ("gradients")."""
    setting, held = rank.setting, rank.held
    whole = sum(param.num_bytes for param in profile.params)
    trainable = [param for param in profile.params if param.is_trainable]
    gradients = sum(param.num_bytes for param in trainable)
    numel = sum(param.numel for param in trainable)
    shared = setting.ranks if setting.door != "none" else 1
    held["parameters"] = profile.buffer_bytes + whole
    held["optimizer"] = -(-numel // shared) * setting.state_bytes
    has_buckets = setting.door != "gradients"
    held["gradients"] = gradients if has_buckets else 0
    for microbatch in range(setting.accumulate):
        for passage in steps.passages:
            if passage.mark.event is None and not has_buckets and not microbatch:
                held["full gradients"] += profile.params[passage.mark.param].num_bytes
            _pass_event(rank, profile, passage.mark)
            _compute(rank, profile, passage)
    held["activations"] = 0
    if not has_buckets:
        _reduce_to_owners(rank, trainable)
    rank.event = UPDATE
    rank.note(UPDATE)
    return RankMemory(tuple(rank.moments))


def _reduce_to_owners(rank: _Rank, params: Sequence[ParamFacts]) -> None:
    """Send gradients of ``params`` to their owners, message by message; every rank owns a part of each."""
    ranks = rank.setting.ranks
    before = len(rank.moments)
    on_the_way: list[tuple[int, ...]] = []
    for message in messages(params, ranks):
        mine = -(-message // ranks)
        on_the_way.append((rank.pool.acquire(message), rank.pool.acquire(mine * ranks), mine, message))
        rank.held["staging"] += sum(on_the_way[-1][:2])
        rank.note("reduce gradients to owners")
        rank.held["full gradients"] -= message
        if len(on_the_way) > 1:
            _arrive(rank, on_the_way.pop(0))
    for message in on_the_way:
        _arrive(rank, message)
    idle = KINDS.index("idle buffers")
    for number, moment in enumerate(rank.moments[:before]):  # from the second step on, the pool has this size
        held = (*moment.held[:idle], moment.held[idle] + rank.pool.idle, *moment.held[idle + 1 :])
        rank.moments[number] = replace(moment, held=held)


def _arrive(rank: _Rank, message: Sequence[int]) -> None:
    out, received, mine, _ = message
    rank.held["gradients"] += mine
    rank.note("reduce gradients to owners")
    for size in (out, received):
        rank.pool.take_back(size)
        rank.held["staging"] -= size


def _sum_slot(units: Sequence[RankUnit], setting: Setting) -> int:
    """Return the bytes of the largest chunk of gradients that replicas sum in shared memory: of a unit, or of a bucket."""
    sections = [unit.section_bytes for unit in units]
    shared = min(sum(sections), FULL_BYTES_ON_HOST) if setting.door == "replicate" else 0
    return sum_slot_bytes(max(shared, *sections))


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

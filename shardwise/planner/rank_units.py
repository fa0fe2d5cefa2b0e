"""The units of a model on one rank, with sizes and padding exactly as the layout computes them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardwise.layout import Bucket, ChunkShard, align, build_bucket, by_size
from shardwise.observe import Call
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
from shardwise.planner.profile import (
    ONE_UNIT,
    RESHARDING,
    ROOT,
    SHARED,
    ParamFacts,
    Profile,
    Setting,
    StepMark,
    Stretch,
    params_by_block,
)

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

    def layout(members: Sequence[ParamFacts], itemsize: int, full_itemsize: int = 0) -> Bucket:
        # full parameters have an alignment only where they are gathered
        aligned = [1 if on_cpu or not size else max(16 // size, 1) for size in (itemsize, full_itemsize)]
        return _layout(tuple(param.shape for param in members), ranks, *aligned)

    def full_itemsize_of(param: ParamFacts) -> int:
        return 2 if is_bf16 and param.is_floating else param.itemsize

    params = [profile.params[number] for number in numbers]
    trainable = [param for param in params if param.is_trainable]
    shard = section = cast = full = packed = 0
    is_full = False
    kept = _by([(param.dtype, full_itemsize_of(param)) for param in params], params)
    for (_, full_itemsize), members in kept:
        itemsize = members[0].itemsize
        bucket = layout(members, itemsize, full_itemsize)
        mine = bucket.section_numel * full_itemsize
        shard += bucket.section_numel * itemsize
        section = align(section + mine, _BYTE_ALIGNMENT)
        cast += mine if itemsize != full_itemsize else 0
        packed = mine * ranks
        if is_cut or itemsize != full_itemsize or (setting.offload and not on_cpu):
            full += bucket.full_numel * full_itemsize
        is_full = is_cut and bucket.is_one_tensor and len(kept) == 1
    if len(kept) > 1:
        packed, cast = section * ranks, section
    section_bytes = staged = outbox = 0
    for itemsize, members in _by([4 if is_bf16 else param.itemsize for param in trainable], trainable):
        bucket = layout(members, itemsize)
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

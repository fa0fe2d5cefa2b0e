"""The units of a model on one rank, with sizes and padding exactly as the layout computes them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.collectives.codec import BlockCode, CodedSection, takes
from shardwise.collectives.host.send_recv import is_worth_messages
from shardwise.collectives.owned import exchanged_bytes
from shardwise.layout import Bucket, ChunkShard, align, assign_owners, build_bucket, by_size
from shardwise.observe import Call
from shardwise.optim.slices import step_cost
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
    SEND_RECV,
    SHARED,
    TIERS,
    ParamFacts,
    Profile,
    Setting,
    StepMark,
    Stretch,
    params_by_block,
)

# ---- The transfers of an optimizer's step, call by call, as a trace records them; the rank that sends most stands for
# all.

_STATUS_BYTES = 8


@dataclass(frozen=True, slots=True)
class Transfer:
    """One call of an optimizer.

    Attributes:
        what: as traces name it: "all-gather" of ZeRO-1, "exchange" of whole matrices.
        num_bytes: of the send buffer, this rank's own part included.
    """

    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The two exchanges of a step over whole matrices, as the first rank makes them.

    Attributes:
        gather_out, gather_in: bytes of shards that it sends to owners, and that it receives as an owner.
        scatter_out, scatter_in: of updated shards, likewise.
        whole_bytes: of the matrices that it owns, without gradients.
        owned_numel: their elements.  matrix_numel: of its shards of all matrices.
        flops: of its update: five Newton-Schulz iterations.
    """

    gather_out: int = 0
    gather_in: int = 0
    scatter_out: int = 0
    scatter_in: int = 0
    whole_bytes: int = 0
    owned_numel: int = 0
    matrix_numel: int = 0
    flops: float = 0.0

    def moments(self) -> Iterator[tuple[str, int]]:
        """Yield the moments of the step, with the bytes of its buffers."""
        values_and_gradients = 2 * self.whole_bytes
        yield "send shards to owners", self.gather_out + self.gather_in
        yield "put matrices together", self.gather_in + values_and_gradients
        yield "send matrices back", values_and_gradients + self.scatter_out + self.scatter_in


def optimizer_transfers(profile: Profile, setting: Setting) -> tuple[Transfer, ...]:
    """Return the calls of one step of the optimizer of ``setting``, without DDP's own all-reduces."""
    trainable = [param for param in profile.params if param.is_trainable]
    if setting.ranks > 1 and setting.strategy == "zero1":
        return (Transfer("all-gather", sum(param.num_bytes for param in trainable)),)
    if not setting.matrices or setting.num_shards == 1:
        return ()
    found = exchanges_of(profile, setting)
    return (Transfer("exchange", found.gather_out), Transfer("exchange", found.scatter_out))


def exchanges_of(profile: Profile, setting: Setting) -> Exchanges:
    """Return what the first rank exchanges in a step over whole matrices, in closed form in ranks.

    Source of the operations: Muon, kellerjordan.github.io/posts/muon: X X^T, its square, and the product with X, of the
    shorter side.
    """
    ranks = setting.num_shards
    params = [param for param in profile.params if param.is_trainable and len(param.shape) == 2]
    owners = assign_owners([step_cost(torch.optim.Muon, param.shape) for param in params], ranks)
    counts = Counter(owners)
    shards = [ChunkShard(param.shape, 0, ranks).shard_numel(0) for param in params]
    local = sum(exchanged_bytes(numel * param.itemsize) for numel, param in zip(shards, params, strict=True))
    mine = [param for param, owner in zip(params, owners, strict=True) if not owner]
    from_all = sum(_of_all_ranks(param, ranks) for param in mine)
    sides = [sorted(param.shape) for param in mine]
    return Exchanges(
        gather_out=sum(map(exchanged_bytes, counts.values())) + 2 * local,
        gather_in=ranks * exchanged_bytes(counts[0]) + 2 * from_all,
        scatter_out=ranks * exchanged_bytes(_STATUS_BYTES) + from_all,
        scatter_in=ranks * exchanged_bytes(_STATUS_BYTES) + local,
        whole_bytes=sum(param.num_bytes for param in mine),
        owned_numel=sum(param.numel for param in mine),
        matrix_numel=sum(shards),
        flops=float(sum(5 * (4 * short**2 * long + 2 * short**3) for short, long in sides)),
    )


def _of_all_ranks(param: ParamFacts, ranks: int) -> int:
    """Return the bytes of the shards of all ranks, each aligned: those of full ones, and of the one that is shorter."""
    rows, inner = param.shape[0], math.prod(param.shape[1:]) * param.itemsize
    each = -(-rows // ranks)
    full, rest = divmod(rows, each)
    return full * exchanged_bytes(each * inner) + exchanged_bytes(rest * inner)


_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_BYTE_ALIGNMENT = 16  # of each bucket in a section that several dtypes share, as in fsdp/flat_buffer.py


@dataclass(frozen=True, slots=True)
class RankUnit:
    """A unit on one rank, the rank with the most memory.

    Attributes:
        facts: what planning a step needs.
        blocks: its blocks.  params: its parameters, by number.
        sends: its tensors travel as messages, in place.
        shard_bytes: of its sections, padding included.
        state_numel: elements that the optimizer updates here.
        section_bytes: of its reduced gradients, as the reduction leaves them.
        gradient_bytes: of the gradients of the full unit, as backward makes them; ``reduced_bytes``: as they are
            reduced.
        largest_gradient_bytes: of the largest parameter's gradient, as backward makes it.
        padding_ratio: elements that an all-gather moves divided by those of the parameters.
        moved_bytes: of an all-gather's result; scattered_bytes: of a reduce-scatter's input; summed_bytes: of the two
            rings that sum sections over replicas.  All as they are sent, coded or not.
        decoding_bytes: of a coded all-gather until its sections are decoded; coding_bytes: of a coded reduction in
            addition to its packed gradients; coded_bytes: of it until the sum; residual_bytes: between steps.
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
    sends: bool
    decoding_bytes: int
    section_bytes: int = 0
    reduced_bytes: int = 0
    scattered_bytes: int = 0
    summed_bytes: int = 0
    coding_bytes: int = 0
    coded_bytes: int = 0
    residual_bytes: int = 0
    outbox_bytes: int = 0


def rank_units(profile: Profile, setting: Setting, device: str) -> tuple[RankUnit, ...]:
    """Return the units of ``setting``, the root's first; ``device``: "cpu" or an accelerator, which aligns tensors."""
    groups = [tuple(profile.blocks.index(path) for path in paths) for paths in unit_paths(profile, setting)]
    taken = {block for group in groups for block in group}
    rest = tuple(block for block in range(len(profile.blocks)) if block not in taken)
    sizes, params = _Sizes(setting, device == "cpu"), params_by_block(profile)
    found: list[RankUnit] = []
    for blocks in (rest, *sorted(groups)):
        name = "" if ROOT in blocks else compress_paths([profile.blocks[block] for block in blocks])
        numbers = tuple(sorted(number for block in blocks for number in params[block]))
        found.append(sizes.unit(name, blocks, numbers, [profile.params[number] for number in numbers]))
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


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of units under a setting."""

    setting: Setting
    on_cpu: bool

    def unit(self, name: str, blocks: tuple[int, ...], numbers: tuple[int, ...], params: list[ParamFacts]) -> RankUnit:
        """Return the unit of ``blocks``, whose parameters have these numbers."""
        setting = self.setting
        trainable = [param for param in params if param.is_trainable]
        facts, gathered = self._gathered(params)
        reduced = self._reduced(trainable)
        keeps = ROOT in blocks or setting.strategy not in RESHARDING
        policy = UnitPolicy(reshard_after_forward=not keeps)
        gradients = [param.numel * self._full_itemsize(param) for param in trainable]
        kept_bytes = sum(param.num_bytes for param in params)
        return RankUnit(
            facts=UnitFacts(name=name, policy=policy, reduce_bytes=reduced.pop("staged"), **facts),
            blocks=blocks,
            params=numbers,
            state_numel=sum(ChunkShard(param.shape, 0, setting.num_shards).shard_numel(0) for param in trainable),
            gradient_bytes=sum(gradients),
            largest_gradient_bytes=max(gradients, default=0),
            padding_ratio=gathered["shard_bytes"] * setting.num_shards / kept_bytes if kept_bytes else 1.0,
            **gathered,
            **reduced,
        )

    def _full_itemsize(self, param: ParamFacts) -> int:
        return 2 if self.setting.precision == "bf16" and param.is_floating else param.itemsize

    def _layout(self, params: Sequence[ParamFacts], itemsize: int, full_itemsize: int = 0) -> Bucket:
        """Return the layout of ``params``; full parameters have an alignment only where they are gathered."""
        alignment, full = (1 if self.on_cpu or not size else max(16 // size, 1) for size in (itemsize, full_itemsize))
        return _layout(tuple(param.shape for param in params), self.setting.num_shards, alignment, full)

    def _coded(self, way: str, params: Sequence[ParamFacts], bucket: Bucket, itemsize: int) -> CodedSection | None:
        """Return how a section goes its ``way``, "gather" or "reduce", under the policy; None if it is not coded."""
        policy = self.setting.compression
        coding = None if policy is None else getattr(policy, way)
        if policy is None or coding is None:
            return None
        order = by_size([ChunkShard(param.shape, 0, self.setting.num_shards) for param in params])
        each = [params[number] for number in order]
        is_coded = [param.is_floating and takes(policy, param.name, param.shape, param.itemsize) for param in each]
        section = CodedSection.of(bucket, is_coded, _DTYPES[itemsize], BlockCode(coding, policy.block))
        return section if section.runs else None

    def _gathered(self, params: Sequence[ParamFacts]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of the facts, and of the unit, that tell of its shards and its all-gather."""
        setting, ranks = self.setting, self.setting.num_shards
        is_cut, is_linked = ranks > 1, setting.transport in (SHARED, TIERS)
        kept = _by([(param.dtype, self._full_itemsize(param)) for param in params], params)
        sends = bool(params) and setting.transport == SEND_RECV
        shard = tails = section = cast = full = payload = messages = packed = 0
        is_full = is_coded = False
        for (_, full_itemsize), members in kept:
            itemsize = members[0].itemsize
            bucket = self._layout(members, itemsize, full_itemsize)
            mine = bucket.section_numel * full_itemsize
            shard += bucket.section_numel * itemsize
            tails += bucket.tail_numel * full_itemsize
            section = align(section + mine, _BYTE_ALIGNMENT)
            cast += mine if itemsize != full_itemsize else 0
            packed = max(packed, mine * ranks)
            sends = sends and is_worth_messages(bucket)
            if is_cut or itemsize != full_itemsize or (setting.offload and not self.on_cpu):
                full += bucket.full_numel * full_itemsize
                payload += sum(each.numel for each in bucket.shards) * full_itemsize
            is_full = is_cut and bucket.is_one_tensor and len(kept) == 1
            coded = self._coded("gather", members, bucket, full_itemsize)
            is_coded = is_coded or coded is not None
            messages += align(mine, _BYTE_ALIGNMENT) if coded is None else coded.message_bytes
        decoding = packed * is_coded * is_cut
        if len(kept) > 1:
            packed, cast = section * ranks, section
        packed = messages * ranks if is_coded else packed
        staged = (full + (ranks - 1) * tails, True) if sends else (packed, is_full and not is_coded)
        if not is_cut or is_linked:  # sections are read in place
            staged = (0, False)
        copied = 0 if is_full or is_coded or (is_cut and (sends or is_linked)) else payload
        facts = {"gather_bytes": staged[0], "in_place": staged[1], "full_bytes": full, "copied_bytes": copied}
        moved, sends = packed if is_cut else 0, is_cut and sends
        return facts, {
            "shard_bytes": shard,
            "moved_bytes": moved,
            "cast_bytes": cast,
            "sends": sends,
            "decoding_bytes": decoding,
        }

    def _reduced(self, params: Sequence[ParamFacts]) -> dict[str, Any]:
        """Return the fields of the unit that tell of its reductions, and the bytes that these stage."""
        found, peaks = Counter(staged=0), {"coding_bytes": 0, "outbox_bytes": 0}
        for itemsize, members in _by([4 if self.setting.precision == "bf16" else p.itemsize for p in params], params):
            bucket = self._layout(members, itemsize)
            sent = self._sent(members, bucket, itemsize)
            for peak in peaks:
                peaks[peak] = max(peaks[peak], sent.pop(peak, 0))
            found.update(sent)
            found.update(
                staged=self._reduce_staging(bucket, itemsize),
                section_bytes=bucket.section_numel * itemsize,
                reduced_bytes=sum(param.numel for param in members) * itemsize,
            )
        return {**found, **peaks}

    def _reduce_staging(self, bucket: Bucket, itemsize: int) -> int:
        setting = self.setting
        if setting.num_shards == 1 or setting.transport == SHARED:
            return 0
        if setting.transport == SEND_RECV and is_worth_messages(bucket):
            return (setting.num_shards - 1) * (bucket.section_numel + bucket.tail_numel) * itemsize
        if setting.transport == TIERS:
            return 2 * (setting.hosts - 1) * (bucket.section_numel + 1) * itemsize
        return setting.num_shards * bucket.section_numel * itemsize

    def _sent(self, members: Sequence[ParamFacts], bucket: Bucket, itemsize: int) -> dict[str, int]:
        """Return how gradients in ``bucket`` are sent: coded between replicas if there are any, else between shards."""
        shards, replicas = self.setting.num_shards, self.setting.num_replicas
        section = bucket.section_numel * itemsize
        own = 1 if bucket.num_large else 0  # it is not in the outbox if parts are copied one by one
        plain = {
            "scattered_bytes": section * shards,
            "summed_bytes": 2 * section,
            "outbox_bytes": section * (shards - own),
        }
        coded, policy = self._coded("reduce", members, bucket, itemsize), self.setting.compression
        if coded is None or policy is None or policy.reduce is None or self.setting.ranks == 1:
            return plain
        floats = 4 * coded.coded_numel * (shards if replicas == 1 else 1)
        residuals = floats if policy.error_feedback else 0
        if replicas > 1:
            mine = align(-(-coded.coded_numel // replicas), policy.block)
            each = 2 * align(BlockCode(policy.reduce, policy.block).num_bytes(mine), 16)  # to sum, and to share the sum
            summed = replicas * each + 2 * coded.rest_numel * itemsize
            coding = 3 * floats + replicas * each
            return plain | {"summed_bytes": summed, "coding_bytes": coding, "residual_bytes": residuals}
        sent = coded.message_bytes * shards
        return {
            "scattered_bytes": sent,
            "summed_bytes": 2 * section,
            "coding_bytes": sent + 3 * floats,
            "coded_bytes": 2 * sent,
            "residual_bytes": residuals,
        }


def _by(keys: Sequence[Any], params: Sequence[ParamFacts]) -> list[tuple[Any, list[ParamFacts]]]:
    """Return the parameters of each key, in the order in which keys first appear."""
    found: dict[Any, list[ParamFacts]] = {}
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

    @property
    def mark(self) -> StepMark:
        """The mark."""
        return self.stretch.mark


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
    awaited = [0] * len(units)
    for stretch in profile.stretches:
        if stretch.mark.event is None:
            awaited[unit_of_param[stretch.mark.param]] += 1
    entries: list[OrderEntry] = []
    at: list[tuple[int, int | None, bool]] = []
    places = _Places(units)
    for stretch in profile.stretches:
        mark = stretch.mark
        unit = unit_of_param[mark.param] if mark.event is None else unit_of[mark.block]
        entry: OrderEntry | None = None
        ends = False
        if mark.event is None:
            awaited[unit] -= 1
            ends = awaited[unit] == 0
            entry = OrderEntry(unit, StepEvent.POST_BACKWARD) if ends else None
        elif places.passes(unit, mark.event, mark.block):
            entry = OrderEntry(unit, mark.event)
        at.append((unit, len(entries) if entry is not None else None, ends))
        if entry is not None:
            entries.append(entry)
    num_passed = len(entries)
    gradients = {unit_of_param[stretch.mark.param] for stretch in profile.stretches if stretch.mark.event is None}
    entries += [OrderEntry(unit, StepEvent.RELEASE_IN_BACKWARD) for unit in sorted(places.in_backward - gradients)]
    plan = plan_step(ExecutionOrder(tuple(entries)), [unit.facts for unit in units], PrefetchBudget(depth))
    passages: list[Passage] = []
    for stretch, (unit, number, ends) in zip(profile.stretches, at, strict=True):
        calls = () if number is None else plan.calls[plan.starts[number] : plan.starts[number + 1]]
        passages.append(Passage(stretch, calls, unit, ends))
    releases = plan.calls[plan.starts[num_passed] : plan.starts[-1]]
    return Steps(plan, tuple(passages), releases, plan.calls[plan.starts[-1] :])


class _Places:
    """Decides which events of blocks are events of their units: the first block's entry, the last one's exit.

    Attributes:
        in_backward: units whose backward has begun.
    """

    def __init__(self, units: Sequence[RankUnit]) -> None:
        self._units = units
        self._left = [set[int]() for _ in units]
        self.in_backward: set[int] = set()

    def passes(self, unit: int, event: StepEvent, block: int) -> bool:
        """Return True if ``unit`` reaches ``event`` when ``block``, one of its blocks, does."""
        left = self._left[unit]
        if event is StepEvent.PRE_FORWARD:
            if left:
                return False
            left.update(self._units[unit].blocks)
            return True
        if event is StepEvent.POST_FORWARD:
            left.discard(block)
            return not left
        is_first = unit not in self.in_backward
        self.in_backward.add(unit)
        return is_first

"""The units of a model that one rank would hold, with sizes and padding exactly as the layout makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.comm.links.send_recv import is_worth_messages
from shardwise.layout.bucket import Bucket, align, build_bucket, by_size
from shardwise.layout.shard import ChunkShard
from shardwise.plan.grouping import group_blocks
from shardwise.plan.naming import compress_paths
from shardwise.plan.policy import UnitPolicy
from shardwise.plan.prefetch import UnitFacts
from shardwise.planner.coded_bytes import Codings
from shardwise.planner.profile import ROOT, ParamFacts, Profile, params_by_block
from shardwise.planner.setting import ONE_UNIT, SEND_RECV, SHARED, TIERS, Setting

_BYTE_ALIGNMENT = 16  # of each bucket in a section that several dtypes share, as in units/shards.py
KEPT_SECTION_BYTES = 1 << 20  # reduced gradients up to this size stay for the next step, as in units/gradient_memory.py


@dataclass(frozen=True, slots=True)
class RankUnit:
    """A unit as one rank holds it, the rank that holds most.

    Attributes:
        facts: what planning a step needs.
        blocks: its blocks.  params: its parameters, by number.
        shard_bytes: of its sections, padding included.
        state_numel: elements that the optimizer updates here.
        section_bytes: of its reduced gradients, as the reduction leaves them.
        gradient_bytes: of the gradients of the whole unit, as backward makes them; ``reduced_bytes``: as they are reduced.
        largest_gradient_bytes: of the largest parameter's, as backward makes it.
        padding_ratio: elements that an all-gather moves divided by those there are.
        moved_bytes: of an all-gather's result; scattered_bytes: of a reduce-scatter's input; summed_bytes: of the two rings
            that sum sections over replicas.  All as they travel, coded or not.
        decoding_bytes: that a coded all-gather takes until its sections are decoded; coding_bytes: that a coded reduction
            takes beside its packed gradients at first; coded_bytes: that it holds until the sum; residual_bytes: between steps.
        outbox_bytes: that its reduction writes for other ranks, or for all if it has no large tensors, in shared memory.
        cast_bytes: of this rank's section in the dtype of the all-gather, where that is another than it is kept in.
    """

    facts: UnitFacts
    blocks: tuple[int, ...]
    params: tuple[int, ...]
    shard_bytes: int
    state_numel: int
    section_bytes: int
    gradient_bytes: int
    reduced_bytes: int
    largest_gradient_bytes: int
    padding_ratio: float
    moved_bytes: int
    scattered_bytes: int
    summed_bytes: int
    cast_bytes: int
    decoding_bytes: int = 0
    coding_bytes: int = 0
    coded_bytes: int = 0
    residual_bytes: int = 0
    outbox_bytes: int = 0


def rank_units(profile: Profile, setting: Setting, device: str) -> tuple[RankUnit, ...]:
    """Return the units of ``setting``, the root's first; ``device``: "cpu" or an accelerator, which aligns tensors."""
    groups = [tuple(profile.blocks.index(path) for path in paths) for paths in unit_paths(profile, setting)]
    taken = {block for group in groups for block in group}
    rest = tuple(block for block in range(len(profile.blocks)) if block not in taken)
    sizes = _UnitSizes(profile, setting, device)
    return tuple(sizes.unit(blocks) for blocks in (rest, *sorted(groups)))


def unit_paths(profile: Profile, setting: Setting) -> list[tuple[str, ...]]:
    """Return the paths of the blocks of each unit but the root's."""
    if setting.min_unit_bytes >= ONE_UNIT:
        return []
    merged = setting.min_unit_bytes if setting.door != "replicate" else 0
    return [paths for children in profile.families for paths in group_blocks(children, merged)]


class _UnitSizes:
    """Makes units; those of equal parameters are computed once."""

    def __init__(self, profile: Profile, setting: Setting, device: str) -> None:
        self._profile = profile
        self._setting = setting
        self._on_cpu = device == "cpu"
        self._is_cut = setting.num_shards > 1
        self._buckets: dict[tuple[object, ...], Bucket] = {}
        self._params = params_by_block(profile)
        self._alike: dict[tuple[object, ...], RankUnit] = {}
        policy = setting.compression
        self._codings = None if policy is None else Codings(policy, setting.num_shards)

    def _alignment(self, itemsize: int) -> int:
        return 1 if self._on_cpu else max(16 // itemsize, 1)

    def _full_itemsize(self, param: ParamFacts) -> int:
        return 2 if self._setting.precision == "bf16" and param.is_floating else param.itemsize

    def _bucket(self, params: Sequence[ParamFacts], alignment: int, full_alignment: int) -> Bucket:
        key = (tuple(param.shape for param in params), alignment, full_alignment)
        bucket = self._buckets.get(key)
        if bucket is None:
            cuts = [ChunkShard(param.shape, 0, self._setting.num_shards) for param in params]
            shards = [cuts[index] for index in by_size(cuts)]
            bucket = self._buckets[key] = build_bucket(shards, alignment, full_alignment)
        return bucket

    def unit(self, blocks: tuple[int, ...]) -> RankUnit:
        """Return the unit of ``blocks``."""
        numbers = tuple(sorted([number for block in blocks for number in self._params[block]]))
        params = [self._profile.params[number] for number in numbers]
        coded = [] if self._codings is None else [self._codings.is_coded(param) for param in params]
        key = (ROOT in blocks, *coded, *[(param.shape, param.dtype, param.is_trainable) for param in params])
        alike = self._alike.get(key)
        if alike is None:
            alike = self._alike[key] = self._made(blocks, numbers)
        return replace(alike, facts=replace(alike.facts, name=self._name(blocks)), blocks=blocks, params=numbers)

    def _name(self, blocks: tuple[int, ...]) -> str:
        return "" if ROOT in blocks else compress_paths([self._profile.blocks[block] for block in blocks])

    def _made(self, blocks: tuple[int, ...], numbers: tuple[int, ...]) -> RankUnit:
        params = [self._profile.params[number] for number in numbers]
        kept: dict[tuple[str, int], list[ParamFacts]] = {}
        for param in params:
            kept.setdefault((param.dtype, self._full_itemsize(param)), []).append(param)
        shard_bytes = packed = full_bytes = section = cast = messages = decoding = tails = 0
        sends = bool(numbers) and self._setting.transport == SEND_RECV
        is_coded = False
        for (_, full_itemsize), members in kept.items():
            itemsize = members[0].itemsize
            bucket = self._bucket(members, self._alignment(itemsize), self._alignment(full_itemsize))
            shard_bytes += bucket.section_numel * itemsize
            tails += bucket.tail_numel * full_itemsize
            sends = sends and is_worth_messages(bucket)
            section = -(-(section + bucket.section_numel * full_itemsize) // _BYTE_ALIGNMENT) * _BYTE_ALIGNMENT
            cast += bucket.section_numel * full_itemsize if itemsize != full_itemsize else 0
            full_bytes += bucket.full_numel * full_itemsize if self._travels(itemsize, full_itemsize) else 0
            packed = bucket.section_numel * full_itemsize * self._setting.num_shards
            coded = None if self._codings is None else self._codings.gathered(members, bucket, full_itemsize)
            is_coded = is_coded or coded is not None
            messages += align(packed // self._setting.num_shards, 16) if coded is None else coded.message_bytes
            decoding = max(decoding, packed)
        if len(kept) > 1:
            packed, cast = section * self._setting.num_shards, section
        if is_coded:
            packed = messages * self._setting.num_shards
        return self._assembled(
            blocks,
            numbers,
            _Moved(shard_bytes, packed, full_bytes, cast, decoding * is_coded, tails if sends else None),
        )

    def _travels(self, itemsize: int, full_itemsize: int) -> bool:
        return self._is_cut or itemsize != full_itemsize or (self._setting.offload and not self._on_cpu)

    def _assembled(self, blocks: tuple[int, ...], numbers: tuple[int, ...], moved: _Moved) -> RankUnit:
        setting = self._setting
        params = [self._profile.params[number] for number in numbers]
        trainable = [param for param in params if param.is_trainable]
        by_dtype: dict[int, list[ParamFacts]] = {}
        for param in trainable:
            by_dtype.setdefault(4 if setting.precision == "bf16" else param.itemsize, []).append(param)
        section_bytes = staged = 0
        travels = _Reduced()
        for itemsize, members in by_dtype.items():
            bucket = self._bucket(members, self._alignment(itemsize), 1)
            section_bytes += bucket.section_numel * itemsize
            staged += self._reduce_staging(bucket, itemsize)
            travels = travels.plus(self._reduced(members, bucket, itemsize))
        keeps = ROOT in blocks or setting.door == "replicate"
        gather, in_place = self._gather_staging(moved)
        facts = UnitFacts(
            name="",
            policy=UnitPolicy(reshard_after_forward=not keeps),
            gather_bytes=gather,
            in_place=in_place,
            full_bytes=moved.full_bytes,
            reduce_bytes=staged,
        )
        numel = sum(param.numel for param in params)
        return RankUnit(
            facts=facts,
            blocks=blocks,
            params=numbers,
            shard_bytes=moved.shard_bytes,
            state_numel=sum(ChunkShard(param.shape, 0, setting.num_shards).shard_numel(0) for param in trainable),
            section_bytes=section_bytes,
            gradient_bytes=sum(param.numel * self._full_itemsize(param) for param in trainable),
            reduced_bytes=sum(param.numel * itemsize for itemsize, each in by_dtype.items() for param in each),
            largest_gradient_bytes=max((param.numel * self._full_itemsize(param) for param in trainable), default=0),
            padding_ratio=moved.padding(numel, params, setting.num_shards),
            moved_bytes=moved.packed if self._is_cut else 0,
            scattered_bytes=travels.scattered,
            summed_bytes=travels.summed,
            cast_bytes=moved.cast_bytes,
            decoding_bytes=moved.decoding_bytes if self._is_cut else 0,
            coding_bytes=travels.coding,
            coded_bytes=travels.coded,
            residual_bytes=travels.residuals,
            outbox_bytes=travels.outbox,
        )

    def _gather_staging(self, moved: _Moved) -> tuple[int, bool]:
        """Return what a launched gather holds, and whether the full parameters are among it."""
        if not self._is_cut or self._setting.transport in (SHARED, TIERS):
            return 0, False  # sections are read where they lie
        if moved.tail_bytes is not None:
            return moved.full_bytes + (self._setting.num_shards - 1) * moved.tail_bytes, True
        return moved.packed, False

    def _reduce_staging(self, bucket: Bucket, itemsize: int) -> int:
        setting = self._setting
        if not self._is_cut or setting.transport == SHARED:
            return 0
        if setting.transport == SEND_RECV and is_worth_messages(bucket):
            return (setting.num_shards - 1) * (bucket.section_numel + bucket.tail_numel) * itemsize
        if setting.transport == TIERS:
            return 2 * (setting.hosts - 1) * (bucket.section_numel + 1) * itemsize
        return setting.num_shards * bucket.section_numel * itemsize

    def _reduced(self, members: Sequence[ParamFacts], bucket: Bucket, itemsize: int) -> _Reduced:
        """Return how gradients in ``bucket`` travel: coded between replicas where there are any, else between shards."""
        setting = self._setting
        section = bucket.section_numel * itemsize
        own = 1 if bucket.num_large else 0  # stays out of the outbox where parts are copied one by one
        plain = _Reduced(section * setting.num_shards, 2 * section, outbox=section * (setting.num_shards - own))
        coded = None if self._codings is None else self._codings.reduced(members, bucket, itemsize)
        ranks = setting.num_replicas if setting.num_replicas > 1 else setting.num_shards
        if coded is None or self._codings is None or ranks == 1:
            return plain
        sections = setting.num_shards if setting.num_replicas == 1 else 1
        floats = 4 * coded.coded_numel * sections
        residuals = floats if self._codings.policy.error_feedback else 0
        if setting.num_replicas > 1:
            each = self._codings.between(coded, ranks)
            return replace(
                plain, summed=ranks * each + 2 * coded.rest_bytes, coding=3 * floats + ranks * each, residuals=residuals
            )
        messages = coded.message_bytes * ranks
        return _Reduced(messages, 2 * section, messages + 3 * floats, 2 * messages, residuals)


@dataclass(frozen=True, slots=True)
class _Reduced:
    """What gradients of one dtype travel as, in bytes: fields as those of :class:`RankUnit`."""

    scattered: int = 0
    summed: int = 0
    coding: int = 0
    coded: int = 0
    residuals: int = 0
    outbox: int = 0

    def plus(self, other: _Reduced) -> _Reduced:
        return _Reduced(
            self.scattered + other.scattered,
            self.summed + other.summed,
            max(self.coding, other.coding),
            self.coded + other.coded,
            self.residuals + other.residuals,
            max(self.outbox, other.outbox),
        )


@dataclass(frozen=True, slots=True)
class _Moved:
    shard_bytes: int
    packed: int
    full_bytes: int
    cast_bytes: int
    decoding_bytes: int
    tail_bytes: int | None  # of small tensors, which are one message; None: nothing is sent as messages

    def padding(self, numel: int, params: Sequence[ParamFacts], num_shards: int) -> float:
        """Return the bytes of all sections divided by those of the parameters."""
        num_bytes = sum(param.num_bytes for param in params)
        return self.shard_bytes * num_shards / num_bytes if numel else 1.0

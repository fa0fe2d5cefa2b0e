"""The units of a model on one rank, with sizes and padding exactly as the layout computes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from shardwise.collectives.codec import BlockCode, CodedSection, CompressionPolicy, takes
from shardwise.collectives.host.send_recv import is_worth_messages
from shardwise.collectives.owned import exchanged_bytes
from shardwise.layout import Bucket, ChunkShard, align, assign_owners, build_bucket, by_size, runs_of
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
        what: as traces name it: "reduction" and "all-gather" of ZeRO, "exchange" of whole matrices.
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
    """

    gather_out: int = 0
    gather_in: int = 0
    scatter_out: int = 0
    scatter_in: int = 0
    whole_bytes: int = 0
    owned_numel: int = 0
    matrix_numel: int = 0


def is_matrix(param: ParamFacts) -> bool:
    """Return True if a whole-matrix optimizer updates ``param``."""
    return param.is_trainable and len(param.shape) == 2


def optimizer_transfers(profile: Profile, setting: Setting) -> tuple[Transfer, ...]:
    """Return the calls of one step of the optimizer of ``setting``, without DDP's own all-reduces."""
    if setting.ranks == 1:
        return ()
    trainable = [param for param in profile.params if param.is_trainable]
    everything = Transfer("all-gather", sum(param.num_bytes for param in trainable))
    if setting.door == "gradients":
        return (*[Transfer("reduction", size) for size in messages(trainable, setting.ranks)], everything)
    if setting.door == "optimizer":
        return (everything,)
    if not setting.matrices or setting.num_shards == 1:
        return ()
    found = exchanges_of(profile, setting)
    return (Transfer("exchange", found.gather_out), Transfer("exchange", found.scatter_out))


def messages(params: Sequence[ParamFacts], ranks: int) -> Iterator[int]:
    """Yield the bytes of each message that sends gradients of ``params`` to their owners: run by run, the last one first."""
    for run in reversed(runs_of([param.numel for param in params], ranks)):
        sizes: dict[str, int] = {}
        for param in params[run.start : run.stop]:
            sizes[param.dtype] = sizes.get(param.dtype, 0) + param.num_bytes
        yield from sizes.values()


def exchanges_of(profile: Profile, setting: Setting) -> Exchanges:
    """Return what the first rank exchanges in a step over whole matrices, in closed form in ranks."""
    ranks, params = setting.num_shards, [param for param in profile.params if is_matrix(param)]
    owners = assign_owners([step_cost(torch.optim.Muon, param.shape) for param in params], ranks)
    counts: dict[int, int] = {}
    for owner in owners:
        counts[owner] = counts.get(owner, 0) + 1
    shards = [ChunkShard(param.shape, 0, ranks).shard_numel(0) for param in params]
    local = [exchanged_bytes(numel * param.itemsize) for numel, param in zip(shards, params, strict=True)]
    mine = [param for param, owner in zip(params, owners, strict=True) if not owner]
    from_all = sum(_of_all_ranks(param, ranks) for param in mine)
    return Exchanges(
        gather_out=sum(map(exchanged_bytes, counts.values())) + 2 * sum(local),
        gather_in=ranks * exchanged_bytes(counts.get(0, 0)) + 2 * from_all,
        scatter_out=ranks * exchanged_bytes(_STATUS_BYTES) + from_all,
        scatter_in=ranks * exchanged_bytes(_STATUS_BYTES) + sum(local),
        whole_bytes=sum(param.num_bytes for param in mine),
        owned_numel=sum(param.numel for param in mine),
        matrix_numel=sum(shards),
    )


def exchange_moments(found: Exchanges) -> Iterator[tuple[str, int]]:
    """Yield the moments of a step over whole matrices, with the bytes of its buffers."""
    values_and_gradients = 2 * found.whole_bytes
    yield "send shards to owners", found.gather_out + found.gather_in
    yield "put matrices together", found.gather_in + values_and_gradients
    yield "send matrices back", values_and_gradients + found.scatter_out + found.scatter_in


def update_flops(profile: Profile, setting: Setting) -> float:
    """Return the floating-point operations of the first rank's update of its matrices: five Newton-Schulz iterations.

    Source: Muon, kellerjordan.github.io/posts/muon: X X^T, its square, and the product with X, of the shorter side.
    """
    params = [param for param in profile.params if is_matrix(param)]
    owners = assign_owners([step_cost(torch.optim.Muon, param.shape) for param in params], setting.num_shards)
    shapes = [sorted(param.shape) for param, owner in zip(params, owners, strict=True) if not owner]
    return float(sum(5 * (4 * short**2 * long + 2 * short**3) for short, long in shapes))


def _of_all_ranks(param: ParamFacts, ranks: int) -> int:
    """Return the bytes of the shards of all ranks, each aligned: those of full ones, and of the one that is shorter."""
    rows, inner = param.shape[0], math.prod(param.shape[1:]) * param.itemsize
    each = -(-rows // ranks)
    full, rest = divmod(rows, each)
    return full * exchanged_bytes(each * inner) + exchanged_bytes(rest * inner)


# ---- Bytes of messages under a ``CompressionPolicy``, as the codec lays them out.

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True, slots=True)
class Coded:
    """The message of one section.

    Attributes:
        message_bytes: its size.  coded_numel: coded elements, with padding to blocks; rest_bytes: of the others.
    """

    message_bytes: int
    coded_numel: int
    rest_bytes: int


@dataclass(frozen=True, slots=True)
class Codings:
    """The sections of a model under a policy."""

    policy: CompressionPolicy
    num_shards: int

    def between(self, coded: Coded, replicas: int) -> int:
        """Return the bytes that a rank sends to each other one of ``replicas`` to sum a coded section and share the sum."""
        assert self.policy.reduce is not None
        code = BlockCode(self.policy.reduce, self.policy.block)
        mine = align(-(-coded.coded_numel // replicas), self.policy.block)
        return 2 * align(code.num_bytes(mine), 16)

    def section(self, way: str, params: Sequence[ParamFacts], bucket: Bucket, itemsize: int) -> Coded | None:
        """Return the message of a section of a ``way``, "gather" or "reduce"; None if it is not coded."""
        coding = getattr(self.policy, way)
        if coding is None:
            return None
        order = by_size([ChunkShard(param.shape, 0, self.num_shards) for param in params])
        is_coded = [self.is_coded(params[number]) for number in order]
        section = CodedSection.of(bucket, is_coded, _DTYPES[itemsize], BlockCode(coding, self.policy.block))
        if not section.runs:
            return None
        return Coded(section.message_bytes, section.coded_numel, section.rest_numel * itemsize)

    def is_coded(self, param: ParamFacts) -> bool:
        """Return True if the policy codes ``param``."""
        return param.is_floating and takes(self.policy, param.name, param.shape, param.itemsize)


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
    section_bytes: int
    gradient_bytes: int
    reduced_bytes: int
    largest_gradient_bytes: int
    padding_ratio: float
    moved_bytes: int
    scattered_bytes: int
    summed_bytes: int
    cast_bytes: int
    sends: bool = False
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
    """Computes units; those with equal parameters are computed once."""

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
        shard_bytes = packed = full_bytes = section = cast = messages = decoding = tails = payload = 0
        sends = bool(numbers) and self._setting.transport == SEND_RECV
        is_coded = is_full = False
        for (_, full_itemsize), members in kept.items():
            itemsize = members[0].itemsize
            bucket = self._bucket(members, self._alignment(itemsize), self._alignment(full_itemsize))
            shard_bytes += bucket.section_numel * itemsize
            tails += bucket.tail_numel * full_itemsize
            sends = sends and is_worth_messages(bucket)
            section = align(section + bucket.section_numel * full_itemsize, _BYTE_ALIGNMENT)
            cast += bucket.section_numel * full_itemsize if itemsize != full_itemsize else 0
            if self._travels(itemsize, full_itemsize):
                full_bytes += bucket.full_numel * full_itemsize
                payload += sum(shard.numel for shard in bucket.shards) * full_itemsize
            is_full = self._is_cut and bucket.is_one_tensor and len(kept) == 1
            packed = bucket.section_numel * full_itemsize * self._setting.num_shards
            coded = None if self._codings is None else self._codings.section("gather", members, bucket, full_itemsize)
            is_coded = is_coded or coded is not None
            messages += align(packed // self._setting.num_shards, 16) if coded is None else coded.message_bytes
            decoding = max(decoding, packed)
        if len(kept) > 1:
            packed, cast = section * self._setting.num_shards, section
        is_linked = self._is_cut and (sends or self._setting.transport in (SHARED, TIERS))
        if is_coded:
            packed = messages * self._setting.num_shards
        return self._assembled(
            blocks,
            numbers,
            _Moved(
                shard_bytes,
                packed,
                full_bytes,
                cast,
                decoding * is_coded,
                tails if sends else None,
                is_full and not is_coded,
                0 if is_full or is_coded or is_linked else payload,
            ),
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
            copied_bytes=moved.copied_bytes,
        )
        kept_bytes = sum(param.num_bytes for param in params)
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
            padding_ratio=moved.shard_bytes * setting.num_shards / kept_bytes if kept_bytes else 1.0,
            moved_bytes=moved.packed if self._is_cut else 0,
            cast_bytes=moved.cast_bytes,
            sends=self._is_cut and moved.tail_bytes is not None,
            decoding_bytes=moved.decoding_bytes if self._is_cut else 0,
            **asdict(travels),
        )

    def _gather_staging(self, moved: _Moved) -> tuple[int, bool]:
        """Return the bytes of a launched gather, and whether they include the full parameters."""
        if not self._is_cut or self._setting.transport in (SHARED, TIERS):
            return 0, False  # sections are read in place
        if moved.tail_bytes is not None:
            return moved.full_bytes + (self._setting.num_shards - 1) * moved.tail_bytes, True
        return moved.packed, moved.is_full

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
        """Return how gradients in ``bucket`` are sent: coded between replicas if there are any, else between shards."""
        setting = self._setting
        section = bucket.section_numel * itemsize
        own = 1 if bucket.num_large else 0  # it is not in the outbox if parts are copied one by one
        plain = _Reduced(section * setting.num_shards, 2 * section, outbox_bytes=section * (setting.num_shards - own))
        coded = None if self._codings is None else self._codings.section("reduce", members, bucket, itemsize)
        ranks = setting.num_replicas if setting.num_replicas > 1 else setting.num_shards
        if coded is None or self._codings is None or ranks == 1:
            return plain
        sections = setting.num_shards if setting.num_replicas == 1 else 1
        floats = 4 * coded.coded_numel * sections
        residuals = floats if self._codings.policy.error_feedback else 0
        if setting.num_replicas > 1:
            each = self._codings.between(coded, ranks)
            return replace(
                plain,
                summed_bytes=ranks * each + 2 * coded.rest_bytes,
                coding_bytes=3 * floats + ranks * each,
                residual_bytes=residuals,
            )
        messages = coded.message_bytes * ranks
        return _Reduced(messages, 2 * section, messages + 3 * floats, 2 * messages, residuals)


@dataclass(frozen=True, slots=True)
class _Reduced:
    """The bytes in which gradients of one dtype are sent; fields are those of :class:`RankUnit`."""

    scattered_bytes: int = 0
    summed_bytes: int = 0
    coding_bytes: int = 0
    coded_bytes: int = 0
    residual_bytes: int = 0
    outbox_bytes: int = 0

    def plus(self, other: _Reduced) -> _Reduced:
        pairs = zip(asdict(self).items(), asdict(other).values(), strict=True)
        peaks = ("coding_bytes", "outbox_bytes")
        return _Reduced(**{name: max(one, two) if name in peaks else one + two for (name, one), two in pairs})


@dataclass(frozen=True, slots=True)
class _Moved:
    shard_bytes: int
    packed: int
    full_bytes: int
    cast_bytes: int
    decoding_bytes: int
    tail_bytes: int | None  # of small tensors, which are one message; None: nothing is sent as messages
    is_full: bool  # the buffer of a collective becomes the full parameter
    copied_bytes: int  # from the buffer of a collective to full parameters


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

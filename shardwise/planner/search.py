"""Which ways to train there are, what each costs, which to take, and what would have to change where none fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch.distributed.tensor.parallel import ParallelStyle

from shardwise.codec.compression_policy import CompressionPolicy
from shardwise.comm.links.send_recv import MAX_RANKS
from shardwise.errors import ConfigError
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES
from shardwise.planner.hardware import Hardware
from shardwise.planner.profile import Profile
from shardwise.planner.rank_memory import Moment, RankMemory, memory_of
from shardwise.planner.rank_time import RankTime, time_of
from shardwise.planner.rank_units import rank_units, unit_paths
from shardwise.planner.setting import ONE_UNIT, OPTIMIZERS, SEND_RECV, SHARED, TIERS, UNIT_DOORS, Setting
from shardwise.planner.step_order import steps_of

_MOST_RANKS = 1 << 17
ProfileOf = Callable[
    [str, bool, int], Profile
]  # (precision of the dry run, recomputation, ranks of a split) -> profile


@dataclass(frozen=True, slots=True)
class Choices:
    """What may be chosen from.

    Attributes:
        doors: as ``shardwise train --shard`` calls them.
        unit_bytes: sizes that blocks are merged up to; those that make the same units count once.
        recompute, offload: whether to try without, with, or both.
        precision: "fp32" or "bf16".
        accumulate: microbatches of a step.
        optimizer: one of ``adamw``, ``adam``, ``adagrad``, ``momentum``, ``sgd``, ``muon`` (matrices whole, the rest AdamW).
        measures: time this machine's operations and links first.  threads: of a rank that shares a CPU host with others, as
            ``shardwise train`` and torchrun give it one.
        tensor: ranks that may split every block (tensor parallelism); 1: none.
        tensor_plan: how they split it, as ``parallelize_module`` takes it for one block.
        compression: in how many bits parameters and gradients travel, of the doors that take such a policy.
    """

    doors: tuple[str, ...] = ("full", "hybrid", "replicate", "gradients", "optimizer")
    unit_bytes: tuple[int, ...] = (DEFAULT_MIN_UNIT_BYTES, 64 << 20, 512 << 20, ONE_UNIT)
    recompute: tuple[bool, ...] = (False, True)
    offload: tuple[bool, ...] = (False, True)
    precision: str = "bf16"
    accumulate: int = 1
    optimizer: str = "adamw"
    measures: bool = False
    threads: int = 1
    tensor: tuple[int, ...] = (1,)
    tensor_plan: Mapping[str, ParallelStyle] = field(default_factory=dict[str, ParallelStyle])
    compression: CompressionPolicy | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer is {self.optimizer!r}, expected one of {', '.join(OPTIMIZERS)}")
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"precision is {self.precision!r}, expected fp32 or bf16")
        if self.threads < 1:
            raise ConfigError(f"threads is {self.threads}, expected 1 or more")
        if not self.tensor or min(self.tensor) < 1:
            raise ConfigError(f"tensor is {self.tensor}, expected numbers of ranks, 1 or more")
        if max(self.tensor) > 1 and not self.tensor_plan:
            raise ConfigError(
                f"tensor is {self.tensor} without a tensor_plan; give what parallelize_module takes for one block, such as "
                "{'mlp.up': ColwiseParallel(), 'mlp.down': RowwiseParallel()}"
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting and what it costs.

    Attributes:
        peak: the moment at which a rank holds most.  host_bytes: in the host's memory (offload).
        fits: in what a plan may fill of the device's memory.
        padding_ratio: elements that are kept and moved divided by those of the model.
        num_units: of the model.
    """

    setting: Setting
    peak: Moment
    host_bytes: int
    time: RankTime
    fits: bool
    padding_ratio: float
    num_units: int

    @property
    def rank_s(self) -> float:
        """Seconds of a step on one rank for each data-parallel rank: what ways with unlike steps are compared by."""
        return self.time.step_s * self.setting.tensor


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the question after which something fits, and the fastest that does."""

    words: str
    best: Candidate


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search has found: candidates, the fastest that fit first, and where none does, changes, the smallest first.

    Attributes:
        left_out: settings that were not looked at, and why.
    """

    candidates: tuple[Candidate, ...]
    changes: tuple[Change, ...] = ()
    left_out: tuple[str, ...] = ()


def evaluate(profile: Profile, setting: Setting, hardware: Hardware) -> Candidate:
    """Return what ``setting`` costs on ``hardware``: closed form in ranks.

    CPU ranks whose shards are all on one host read each other's memory, unless what they read is coded.
    """
    if hardware.shared is not None and setting.door in UNIT_DOORS and setting.compression is None:
        setting = _routed(setting, max(hardware.ranks_per_host // setting.tensor, 1))
    units = rank_units(profile, setting, hardware.device)
    steps = steps_of(profile, units, setting.depth)
    memory = memory_of(profile, units, steps, setting, hardware.device, hardware.library_bytes)
    numel = profile.numel
    padded = sum(unit.padding_ratio * sum(profile.params[p].numel for p in unit.params) for unit in units)
    return Candidate(
        setting=setting,
        peak=memory.peak,
        host_bytes=memory.host_bytes,
        time=time_of(profile, units, steps, setting, hardware),
        fits=memory.peak.total <= hardware.usable * hardware.memory_bytes,
        padding_ratio=padded / numel if numel else 1.0,
        num_units=len(units),
    )


def _routed(setting: Setting, ranks_per_host: int) -> Setting:
    """Return ``setting`` with the way that CPU ranks, so many on a host, would take: as comm/links/meet.py finds it."""
    shards = setting.num_shards
    if shards <= ranks_per_host:
        is_near = setting.num_replicas > 1 and setting.ranks <= ranks_per_host
        return replace(setting, transport=SHARED, near_replicas=is_near)
    if shards % ranks_per_host or shards > ranks_per_host * MAX_RANKS:
        return setting
    return replace(setting, transport=SEND_RECV if ranks_per_host == 1 else TIERS, hosts=shards // ranks_per_host)


def memory_over_step(profile: Profile, setting: Setting, device: str, library_bytes: int = 0) -> RankMemory:
    """Return the moments of the step of ``setting``."""
    units = rank_units(profile, setting, device)
    return memory_of(profile, units, steps_of(profile, units, setting.depth), setting, device, library_bytes)


@dataclass(slots=True)
class Search:
    """The candidates for one model, number of ranks and hardware."""

    profile_of: ProfileOf
    ranks: int
    hardware: Hardware
    choices: Choices
    left_out: list[str] = field(default_factory=list[str])

    def run(self) -> SearchResult:
        """Return candidates, the fastest that fit first, then those that do not, the smallest first."""
        candidates = list(self._candidates())
        candidates.sort(key=lambda each: (not each.fits, each.rank_s if each.fits else each.peak.total))
        changes = () if any(each.fits for each in candidates) else tuple(self._changes(candidates))
        return SearchResult(tuple(candidates), changes, tuple(dict.fromkeys(self.left_out)))

    def _candidates(self) -> Iterator[Candidate]:
        for setting in self._settings():
            plain = [False] if False in self.choices.offload else [True]
            for recompute in self.choices.recompute:
                chosen = replace(setting, recompute=recompute, offload=plain[0] and setting.door in UNIT_DOORS)
                if self._is_hopeless(chosen):
                    continue
                found = self._evaluate(chosen)
                yield found
                if self.may_offload(chosen) and not found.fits and self._frees_enough(found):
                    yield self._evaluate(replace(chosen, offload=True))

    def may_offload(self, setting: Setting) -> bool:
        """Return True if state may go to the host's memory: it costs time, so it is tried where nothing else fits."""
        is_wanted = True in self.choices.offload and not setting.offload
        return is_wanted and setting.door in UNIT_DOORS and self.hardware.device != "cpu"

    def _frees_enough(self, found: Candidate) -> bool:
        """Return True if ``found`` may fit without what offload moves away."""
        moved = sum(found.peak.held[:3])  # parameters, optimizer, gradients
        return found.peak.total - moved <= self.hardware.usable * self.hardware.memory_bytes

    def _evaluate(self, setting: Setting) -> Candidate:
        return evaluate(self._profile(setting), setting, self.hardware)

    def _profile(self, setting: Setting) -> Profile:
        return self.profile_of(setting.computes_in, setting.recompute, setting.tensor)

    def _is_hopeless(self, setting: Setting) -> bool:
        """Return True if whole parameters and gradients alone are too much: no dry run is worth it."""
        if setting.door in UNIT_DOORS:
            return False
        numel = self.profile_of(_computes_in(self.choices.precision), False, 1).numel
        least = 8 * numel
        if least <= self.hardware.usable * self.hardware.memory_bytes:
            return False
        self.left_out.append(
            f"{setting.door}: whole fp32 parameters and gradients alone are {least / 1e9:.4g} GB on every rank"
        )
        return True

    def _settings(self) -> Iterator[Setting]:
        for tensor in self.choices.tensor:
            if self.ranks % tensor:
                self.left_out.append(f"tp {tensor}: it does not divide {self.ranks:,} ranks")
                continue
            yield from self._settings_of(tensor)

    def _settings_of(self, tensor: int) -> Iterator[Setting]:
        choices = self.choices
        for door in choices.doors:
            if tensor > 1 and door not in UNIT_DOORS:
                continue
            if choices.optimizer == "muon" and door not in ("full", "hybrid"):
                self.left_out.append(f"{door}: whole matrices are planned for the doors that shard parameters")
                continue
            policy = choices.compression
            if policy is not None and (door not in UNIT_DOORS or (policy.gather is not None and door != "full")):
                self.left_out.append(f"{door}: it takes no CompressionPolicy" + " that gathers" * (door in UNIT_DOORS))
                continue
            base = Setting(
                ranks=self.ranks // tensor,
                tensor=tensor,
                compression=policy,
                precision=choices.precision,
                accumulate=choices.accumulate,
                state_bytes=OPTIMIZERS[choices.optimizer],
                matrices=choices.optimizer == "muon" and door in ("full", "hybrid"),
            )
            if door == "hybrid":
                for replicas in self._replicas(base.ranks, tensor):
                    yield replace(base, door=door, replicas=replicas)
                continue
            profile = self.profile_of(base.computes_in, choices.recompute[0], tensor)
            seen: set[tuple[tuple[str, ...], ...]] = set()
            for unit_bytes in choices.unit_bytes if door == "full" else choices.unit_bytes[:1]:
                setting = replace(base, door=door, min_unit_bytes=unit_bytes)
                paths = tuple(unit_paths(profile, setting))
                if paths not in seen:
                    seen.add(paths)
                    yield setting

    def _replicas(self, ranks: int, tensor: int) -> Iterator[int]:
        """Yield numbers of replicas: shards over one host, two, four, and so on, up to two replicas."""
        shards = min(max(self.hardware.ranks_per_host // tensor, 1), ranks // 2)
        while shards and shards * 2 <= ranks:
            if ranks % shards == 0 and shards > 1:
                yield ranks // shards
            shards *= 2

    # ---- where nothing fits ----

    def _changes(self, candidates: list[Candidate]) -> Iterator[Change]:
        """Yield changes of one thing each after which something fits."""
        settings = [each.setting for each in candidates]
        if not settings:
            return
        for words, changed in (
            ("recompute blocks in backward", [replace(each, recompute=True) for each in settings]),
            (
                "compute in bf16",
                [replace(each, precision="bf16") for each in settings if self.choices.precision == "fp32"],
            ),
            (
                "keep shards and optimizer state in the host's memory (offload)",
                [replace(each, offload=True) for each in settings if each.door in UNIT_DOORS],
            ),
        ):
            new = [each for each in changed if each not in settings]
            if self.hardware.device == "cpu":
                new = [each for each in new if not each.offload]
            best = self._fastest([self._evaluate(each) for each in new])
            if best is not None:
                yield Change(words, best)
        yield from self._split(settings)
        yield from self._smaller_batch(settings)
        yield from self._more_ranks(settings)
        yield from self._larger_memory(candidates)

    @staticmethod
    def _fastest(candidates: list[Candidate]) -> Candidate | None:
        fitting = [each for each in candidates if each.fits]
        return min(fitting, key=lambda each: each.rank_s) if fitting else None

    def _split(self, settings: list[Setting]) -> Iterator[Change]:
        """Yield tensor parallelism, over the fewest ranks of a host with which something fits."""
        able = [each for each in settings if each.door == "full"]
        tensor = max(self.choices.tensor) * 2
        while self.choices.tensor_plan and able and tensor <= min(self.hardware.ranks_per_host, self.ranks):
            if self.ranks % tensor == 0:
                tried = [replace(each, ranks=self.ranks // tensor, tensor=tensor) for each in able]
                best = self._fastest([self._evaluate(each) for each in dict.fromkeys(tried)])
                if best is not None:
                    yield Change(f"split every block over {tensor} ranks (tensor parallelism)", best)
                    return
            tensor *= 2

    def _smaller_batch(self, settings: list[Setting]) -> Iterator[Change]:
        batch = self._profile(settings[0]).batch
        whole = batch
        while batch > 1:
            batch //= 2
            tried = [evaluate(self._profile(each).for_batch(batch), each, self.hardware) for each in settings]
            best = self._fastest(tried)
            if best is not None:
                more = -(-whole // batch)
                words = f"a batch of {batch} in place of {whole} on every rank: {more} microbatches make the same step"
                yield Change(words, best)
                return

    def _more_ranks(self, settings: list[Setting]) -> Iterator[Change]:
        ranks, sharded = self.ranks, [each for each in settings if each.door == "full"]
        while sharded and ranks * 2 <= _MOST_RANKS:
            ranks *= 2
            best = self._fastest([self._evaluate(replace(s, ranks=ranks // s.tensor)) for s in sharded])
            if best is not None:
                yield Change(f"{ranks:,} ranks in place of {self.ranks:,}, with the same batch on each", best)
                return

    def _larger_memory(self, candidates: list[Candidate]) -> Iterator[Change]:
        least = min(candidates, key=lambda each: each.peak.total)
        needed = least.peak.total / self.hardware.usable
        yield Change(
            f"devices with {needed / 1e9:.4g} GB, in place of {self.hardware.memory_bytes / 1e9:.4g} GB", least
        )


def _computes_in(precision: str) -> str:
    return "fp32" if precision == "fp32" else "bf16"

"""``plan``: the memory of one rank and the time of a step, for every way to train, before anything runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwise.collectives.codec import CompressionPolicy
from shardwise.collectives.host.send_recv import MAX_RANKS
from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES, compress_paths
from shardwise.planner.dry_run import DryRun, Loss, TensorSplit, default_loss, dry_run
from shardwise.planner.hardware import Hardware, read_hardware
from shardwise.planner.profile import (
    ONE_UNIT,
    OPTIMIZERS,
    SEND_RECV,
    SHARDING,
    SHARED,
    TIERS,
    UNIT_STRATEGIES,
    Profile,
    Setting,
)
from shardwise.planner.rank_step import KINDS, Moment, RankMemory, RankStep, RankTime, draw_memory, step_of
from shardwise.planner.rank_units import rank_units, steps_of, unit_paths

# ---- The code of a setting, to paste into a training script.


def code_of(setting: Setting, profile: Profile, device: str, tensor_plan: Mapping[str, ParallelStyle]) -> str:
    """Return Python that trains ``model`` with ``setting``, under ``torchrun``, on all of its ranks."""
    return "\n".join([*_imports(setting, tensor_plan), "", *_body(setting, profile, device, tensor_plan)]) + "\n"


def _imports(setting: Setting, tensor_plan: Mapping[str, ParallelStyle]) -> Iterator[str]:
    if setting.recompute:
        yield "import functools"
        yield ""
    yield "import torch"
    if setting.strategy in UNIT_STRATEGIES:
        yield "from torch.distributed.device_mesh import init_device_mesh"
    else:
        yield "from torch.nn.parallel import DistributedDataParallel"
    if setting.tensor > 1:
        if any(_style(each) != f"{type(each).__name__}()" for each in tensor_plan.values()):
            yield "from torch.distributed.tensor import Replicate, Shard"
        kinds = sorted({type(each).__name__ for each in tensor_plan.values()})
        yield f"from torch.distributed.tensor.parallel import {', '.join([*kinds, 'parallelize_module'])}"
    if setting.recompute:
        yield "from torch.utils.checkpoint import checkpoint"
    names = {"ddp": {"replicate"}, "zero1": {"ZeroRedundancyOptimizer"}, "none": set[str]()}
    wanted = set(names.get(setting.strategy, {"shard_model"}))
    if setting.strategy == "zero3" and setting.min_unit_bytes >= ONE_UNIT:
        wanted = {"fully_shard"}
    if setting.strategy in UNIT_STRATEGIES and setting.precision == "bf16":
        wanted.add("MixedPrecisionPolicy")
    if setting.strategy in UNIT_STRATEGIES and setting.offload:
        wanted.add("CPUOffloadPolicy")
    if setting.matrices:
        wanted.add("ShardedOptimizer")
    if setting.compression is not None:
        wanted.add("CompressionPolicy")
    if setting.accumulate > 1 and setting.strategy in UNIT_STRATEGIES:
        wanted.add("policy")
    if wanted:
        yield ""
        yield f"from shardwise import {', '.join(sorted(wanted))}"


def _body(setting: Setting, profile: Profile, device: str, tensor_plan: Mapping[str, ParallelStyle]) -> Iterator[str]:
    if setting.recompute:
        blocks = compress_paths(profile.blocks[1:]) or "no repeated blocks"
        parents = list(dict.fromkeys(path.rpartition(".")[0] for path in profile.blocks[1:]))
        yield f"# {blocks}: keep only the inputs, recompute in backward"
        for parent in parents:
            yield f'for block in model.get_submodule("{parent}").children():'
            yield "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    if setting.strategy in UNIT_STRATEGIES:
        yield from _mesh(setting, device)
        if setting.tensor > 1:
            yield from _split(profile, tensor_plan)
        yield from _shard(setting, profile)
        if setting.matrices:
            yield "named = dict(model.named_parameters())"
            yield "matrices = {name: param for name, param in named.items() if param.ndim == 2}"
            yield "optimizer = ShardedOptimizer(matrices, torch.optim.Muon, lr=3e-4)"
            yield "rest = torch.optim.AdamW([param for param in named.values() if param.ndim != 2], lr=3e-4, fused=True)"
        elif setting.tensor > 1:
            yield "groups = {}  # a fused update takes tensors of one mesh"
            yield "for param in model.parameters():"
            yield "    groups.setdefault(param.device_mesh, []).append(param)"
            groups = '[{"params": params} for params in groups.values()]'
            yield f"optimizer = torch.optim.AdamW({groups}, lr=3e-4, fused=True)"
        else:
            yield "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)"
    else:
        yield "ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)"
        if setting.strategy == "none":
            yield "optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4, fused=True)"
        else:
            yield 'optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, partition="even", lr=3e-4)'
    if setting.precision == "bf16" and setting.strategy not in UNIT_STRATEGIES:
        yield f'# around forward and loss: with torch.autocast("{device}", torch.bfloat16)'
    if setting.accumulate > 1 and setting.strategy in UNIT_STRATEGIES:
        yield f"# {setting.accumulate} microbatches: around all but the last: with policy(model, sync=False)"


def _mesh(setting: Setting, device: str) -> Iterator[str]:
    axes = {"replicate": setting.replicas, "shard": setting.num_shards} if setting.strategy == "hsdp" else {}
    axes = axes or {"shard" if setting.strategy in SHARDING else "replicate": setting.ranks}
    axes |= {"tp": setting.tensor} if setting.tensor > 1 else {}
    yield f'mesh = init_device_mesh("{device}", {tuple(axes.values())}, mesh_dim_names={_quoted(axes)})'


def _quoted(names: Iterable[str]) -> str:
    words = [f'"{name}"' for name in names]
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def _split(profile: Profile, tensor_plan: Mapping[str, ParallelStyle]) -> Iterator[str]:
    yield "for block in (  # the ranks of one tp group take the same batches"
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in profile.blocks[1:]):
        yield f'    *model.get_submodule("{parent}").children(),'
    yield "):"
    yield '    parallelize_module(block, mesh["tp"], {'
    yield from (f'        "{name}": {_style(style)},' for name, style in tensor_plan.items())
    yield "    })"


def _style(style: ParallelStyle) -> str:
    plain = type(style)
    try:
        return f"{plain.__name__}()" if repr(plain()) == repr(style) else repr(style)
    except TypeError:  # a style that requires arguments
        return repr(style)


def _shard(setting: Setting, profile: Profile) -> Iterator[str]:
    data = (
        '"replicate", "shard"'
        if setting.strategy == "hsdp"
        else '"shard"'
        if setting.strategy in SHARDING
        else '"replicate"'
    )
    options = [f"mesh=mesh[{data}]" if setting.tensor > 1 else "mesh=mesh"]
    if setting.precision == "bf16":
        options.append("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
    if setting.offload:
        options.append("offload_policy=CPUOffloadPolicy()")
    if setting.compression is not None:
        options.append(f"compression={setting.compression!r}")
    if setting.strategy == "zero2":
        options.insert(0, 'strategy="zero2"')
    if setting.strategy == "ddp":
        yield f"options = dict({', '.join(options)})"
        for parent in dict.fromkeys(path.rpartition(".")[0] for path in profile.blocks[1:]):
            yield f'for block in model.get_submodule("{parent}").children():'
            yield "    replicate(block, **options)"
        yield "replicate(model, **options)"
    elif setting.strategy == "zero3" and setting.min_unit_bytes >= ONE_UNIT:
        yield f"fully_shard(model, {', '.join(options)})"
    else:
        yield f"shard_model(model, min_unit_bytes={setting.min_unit_bytes}, {', '.join(options)})"


# ---- The search: the ways to train, their costs, which to take, and what to change if none fits.

_MOST_RANKS = 1 << 17
ProfileOf = Callable[
    [str, bool, int], Profile
]  # (precision of the dry run, recomputation, ranks of a split) -> profile


@dataclass(frozen=True, slots=True)
class Choices:
    """The options to choose from.

    Attributes:
        strategies: as ``shardwise train --shard`` names them.  doors: their deprecated name.
        unit_bytes: sizes up to which blocks are merged; sizes that give the same units count once.
        recompute, offload: whether to try without, with, or both.
        precision: "fp32" or "bf16".
        accumulate: microbatches of a step.
        optimizer: one of ``adamw``, ``adam``, ``adagrad``, ``momentum``, ``sgd``, ``muon`` (whole matrices, the rest
            AdamW).
        measures: time this machine's operations and links first.  threads: of a rank that shares a CPU host with
            others, as ``shardwise train`` and torchrun set it.
        tensor: numbers of ranks that may split every block (tensor parallelism); 1: none.
        tensor_plan: how they split it, as ``parallelize_module`` takes it for one block.
        compression: the compression of parameters and gradients, for the strategies that take such a policy.
    """

    strategies: tuple[str, ...] = ("zero3", "hsdp", "ddp", "zero2", "zero1")
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
    doors: InitVar[tuple[str, ...] | None] = None

    def __post_init__(self, doors: tuple[str, ...] | None) -> None:
        if doors is not None:
            warnings.warn("Choices(doors=) is called strategies= now", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "strategies", doors)
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
    """A setting and its costs.

    Attributes:
        peak: the moment of the highest memory.  host_bytes: in the host's memory (offload).
        fits: in the part of the device's memory that a plan may fill.
        padding_ratio: elements that are stored and moved divided by those of the model.
        num_units: of the model.
        copied_bytes: that a step copies from gathered buffers into full parameters.
    """

    setting: Setting
    peak: Moment
    host_bytes: int
    time: RankTime
    fits: bool
    padding_ratio: float
    num_units: int
    copied_bytes: int = 0

    @property
    def rank_s(self) -> float:
        """Seconds of a step on one rank for each data-parallel rank, to compare ways whose steps differ."""
        return self.time.step_s * self.setting.tensor


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the question after which something fits, and the fastest way that does."""

    words: str
    best: Candidate


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search: candidates, the fastest that fit first; and if none fits, changes, the smallest first.

    Attributes:
        left_out: settings that were not evaluated, and why.
    """

    candidates: tuple[Candidate, ...]
    changes: tuple[Change, ...] = ()
    left_out: tuple[str, ...] = ()


def evaluate(profile: Profile, setting: Setting, hardware: Hardware) -> Candidate:
    """Return the costs of ``setting`` on ``hardware``, in closed form in ranks.

    CPU ranks whose shards are all on one host read each other's memory, unless it is compressed.
    """
    if hardware.shared is not None and setting.strategy in UNIT_STRATEGIES and setting.compression is None:
        setting = _routed(setting, max(hardware.ranks_per_host // setting.tensor, 1))
    units = rank_units(profile, setting, hardware.device)
    steps = steps_of(profile, units, setting.depth)
    step = step_of(profile, units, steps, setting, hardware)
    peak = step.memory.peak
    numel = profile.numel
    padded = sum(unit.padding_ratio * sum(profile.params[p].numel for p in unit.params) for unit in units)
    return Candidate(
        setting=setting,
        peak=peak,
        host_bytes=step.memory.host_bytes,
        time=step.time,
        fits=peak.total <= hardware.usable * hardware.memory_bytes,
        padding_ratio=padded / numel if numel else 1.0,
        num_units=len(units),
        copied_bytes=setting.accumulate * sum(call.copied_bytes for call in steps.plan.calls),
    )


def _routed(setting: Setting, ranks_per_host: int) -> Setting:
    """Return ``setting`` with the transport of CPU ranks, as collectives/host/local_peers.py chooses it."""
    shards = setting.num_shards
    if shards <= ranks_per_host:
        is_near = setting.num_replicas > 1 and setting.ranks <= ranks_per_host
        return replace(setting, transport=SHARED, near_replicas=is_near)
    if shards % ranks_per_host or shards > ranks_per_host * MAX_RANKS:
        return setting
    return replace(setting, transport=SEND_RECV if ranks_per_host == 1 else TIERS, hosts=shards // ranks_per_host)


def step_under(profile: Profile, setting: Setting, hardware: Hardware) -> RankStep:
    """Return the step of ``setting`` on ``hardware``, with the transport that it names."""
    units = rank_units(profile, setting, hardware.device)
    return step_of(profile, units, steps_of(profile, units, setting.depth), setting, hardware)


@dataclass(slots=True)
class Search:
    """The search for one model, number of ranks and hardware."""

    profile_of: ProfileOf
    ranks: int
    hardware: Hardware
    choices: Choices
    left_out: list[str] = field(default_factory=list[str])

    def run(self) -> SearchResult:
        """Return candidates, the fastest that fit first, then those that do not fit, the smallest first."""
        candidates = list(self._candidates())
        candidates.sort(key=lambda each: (not each.fits, each.rank_s if each.fits else each.peak.total))
        changes = () if any(each.fits for each in candidates) else tuple(self._changes(candidates))
        return SearchResult(tuple(candidates), changes, tuple(dict.fromkeys(self.left_out)))

    def _candidates(self) -> Iterator[Candidate]:
        for setting in self._settings():
            plain = [False] if False in self.choices.offload else [True]
            for recompute in self.choices.recompute:
                chosen = replace(setting, recompute=recompute, offload=plain[0] and setting.strategy in UNIT_STRATEGIES)
                if self._is_hopeless(chosen):
                    continue
                found = self._evaluate(chosen)
                yield found
                if self.may_offload(chosen) and not found.fits and self._frees_enough(found):
                    yield self._evaluate(replace(chosen, offload=True))

    def may_offload(self, setting: Setting) -> bool:
        """Return True if state may be in the host's memory: that costs time, so it is tried only if nothing else fits."""
        is_wanted = True in self.choices.offload and not setting.offload
        return is_wanted and setting.strategy in UNIT_STRATEGIES and self.hardware.device != "cpu"

    def _frees_enough(self, found: Candidate) -> bool:
        """Return True if ``found`` may fit without what offload moves."""
        moved = sum(found.peak.held[:3])  # parameters, optimizer, gradients
        return found.peak.total - moved <= self.hardware.usable * self.hardware.memory_bytes

    def _evaluate(self, setting: Setting) -> Candidate:
        return evaluate(self._profile(setting), setting, self.hardware)

    def _profile(self, setting: Setting) -> Profile:
        return self.profile_of(setting.computes_in, setting.recompute, setting.tensor)

    def _is_hopeless(self, setting: Setting) -> bool:
        """Return True if full parameters and gradients alone exceed the memory, so that a dry run is not worthwhile."""
        if setting.strategy in UNIT_STRATEGIES:
            return False
        numel = self.profile_of(self.choices.precision, False, 1).numel
        least = 8 * numel
        if least <= self.hardware.usable * self.hardware.memory_bytes:
            return False
        self.left_out.append(
            f"{setting.strategy}: whole fp32 parameters and gradients alone are {least / 1e9:.4g} GB on every rank"
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
        for strategy in choices.strategies:
            if tensor > 1 and strategy not in UNIT_STRATEGIES:
                continue
            if choices.optimizer == "muon" and strategy not in SHARDING:
                self.left_out.append(f"{strategy}: whole matrices are planned for the strategies that shard parameters")
                continue
            policy = choices.compression
            if policy is not None and (
                strategy not in UNIT_STRATEGIES or (policy.gather is not None and strategy not in SHARDING - {"hsdp"})
            ):
                self.left_out.append(
                    f"{strategy}: it takes no CompressionPolicy" + " that gathers" * (strategy in UNIT_STRATEGIES)
                )
                continue
            base = Setting(
                ranks=self.ranks // tensor,
                tensor=tensor,
                compression=policy,
                precision=choices.precision,
                accumulate=choices.accumulate,
                state_bytes=OPTIMIZERS[choices.optimizer],
                matrices=choices.optimizer == "muon" and strategy in SHARDING,
            )
            if strategy == "hsdp":
                for replicas in self._replicas(base.ranks, tensor):
                    yield replace(base, strategy=strategy, replicas=replicas)
                continue
            profile = self.profile_of(base.computes_in, choices.recompute[0], tensor)
            seen: set[tuple[tuple[str, ...], ...]] = set()
            for unit_bytes in choices.unit_bytes if strategy == "zero3" else choices.unit_bytes[:1]:
                setting = replace(base, strategy=strategy, min_unit_bytes=unit_bytes)
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
        """Yield single changes after which something fits."""
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
                [replace(each, offload=True) for each in settings if each.strategy in UNIT_STRATEGIES],
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
        able = [each for each in settings if each.strategy == "zero3"]
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
        ranks, sharded = self.ranks, [each for each in settings if each.strategy == "zero3"]
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


_HEADINGS = (
    "",
    "way",
    "peak",
    "of which",
    "step",
    "samples/s",
    "compute",
    "exposed",
    "host",
    "sent",
    "copied out",
    "padding",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The ways to train a model on some ranks, their costs, and which to take.

    Attributes:
        model: name of its class.  num_parameters: elements.
        ranks: all of them.  batch: of a microbatch of one data-parallel rank.
        hardware: of a rank.
        candidates: the fastest that fit first, then those that do not fit, the smallest first.
        changes: if nothing fits: single changes after which something does, the smallest first.
        left_out: ways that were not evaluated, and why.
    """

    model: str
    num_parameters: int
    ranks: int
    batch: int
    hardware: Hardware
    found: SearchResult
    _profiles: tuple[Profile, ...]
    tensor_plan: Mapping[str, ParallelStyle]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All evaluated ways, the best first."""
        return self.found.candidates

    @property
    def changes(self) -> tuple[Change, ...]:
        """What to change if nothing fits, the smallest change first."""
        return self.found.changes

    @property
    def best(self) -> Candidate | None:
        """The fastest way that fits; None if none does."""
        first = self.found.candidates[0] if self.found.candidates else None
        return first if first is not None and first.fits else None

    def why(self) -> str:
        """Return in a sentence or two why to take this way, or what to change."""
        if self.best is None:
            return self._why_nothing_fits()
        best, faster = self.best, [each for each in self.candidates if not each.fits]
        peak = format_bytes(best.peak.total)
        words = f"Take {best.setting.label}: {_seconds(best.time.step_s)} a step, {peak} at most on a rank"
        tight = [each for each in faster if each.rank_s < best.rank_s]
        if tight:
            first = min(tight, key=lambda each: each.rank_s)
            seconds, needed = _seconds(first.time.step_s), format_bytes(first.peak.total)
            words += f"; {first.setting.label} would take {seconds} but needs {needed}"
        waits = ", ".join(f"{unit} {_seconds(seconds)}" for unit, seconds in best.time.waits[:3])
        return f"{words}. " + (f"Waits that nothing hides: {waits}." if waits else "Nothing waits for other ranks.")

    def _why_nothing_fits(self) -> str:
        if not self.candidates:
            return "No way to train was looked at: none of the strategies goes with these numbers of ranks."
        if not self.changes:
            return "Nothing fits, and no single change makes it fit."
        first = self.changes[0]
        others = "".join(f"\n  or: {each.words} ({each.best.setting.label})" for each in self.changes[1:])
        return (
            f"Nothing fits in {format_bytes(self._limit)}. The smallest change that makes it fit: {first.words} "
            f"({first.best.setting.label}, {format_bytes(first.best.peak.total)}).{others}"
        )

    @property
    def _limit(self) -> float:
        return self.hardware.usable * self.hardware.memory_bytes

    def table(self, most: int = 16) -> str:
        """Return the candidates as text, at most ``most``, and the reasons."""
        head = (
            f"{self.model}: {self.num_parameters:,} parameters on {self.ranks:,} ranks, batch {self.batch} on each; "
            f"{self.hardware.name}; a plan may fill {format_bytes(self._limit)}"
        )
        if not self.candidates:
            return "\n".join([head, *[f"left out: {each}" for each in self.found.left_out], "", self.why()])
        rows = [_HEADINGS, *[self._cells(each) for each in self.candidates[:most]]]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        more = len(self.candidates) - most
        notes = [f"... and {more} more"] if more > 0 else []
        notes += [f"left out: {each}" for each in self.found.left_out]
        return "\n".join([head, "", *lines, *notes, "", self.why()])

    def _cells(self, candidate: Candidate) -> tuple[str, ...]:
        largest = sorted(zip(candidate.peak.held, KINDS, strict=True), reverse=True)[:2]
        parts = [f"{kind} {format_bytes(num_bytes)}" for num_bytes, kind in largest if num_bytes]
        time, setting = candidate.time, candidate.setting
        return (
            "->" if candidate is self.best else "" if candidate.fits else "no",
            setting.label,
            format_bytes(candidate.peak.total),
            ", ".join([*parts, *([f"host {format_bytes(candidate.host_bytes)}"] if candidate.host_bytes else [])]),
            _seconds(time.step_s),
            f"{self.batch * setting.accumulate * setting.ranks / max(time.step_s, 1e-12):.3g}",
            _seconds(time.compute_s),
            _seconds(time.exposed_s),
            _seconds(time.host_s),
            format_bytes(time.inside_bytes + time.between_bytes),
            format_bytes(candidate.copied_bytes),
            f"{candidate.padding_ratio:.2f}",
        )

    def __str__(self) -> str:
        return self.table()

    def _chosen(self) -> Candidate:
        if self.best is not None:
            return self.best
        if self.changes:
            return self.changes[0].best
        reasons = "".join(f" ({each})" for each in self.found.left_out)
        raise ConfigError(
            f"no way to train was looked at{reasons}; name other strategies, or numbers of ranks that go together"
        )

    def code(self) -> str:
        """Return Python to paste: the best way, or that of the smallest change if nothing fits."""
        chosen = self._chosen()
        return code_of(chosen.setting, self._profile(chosen), self.hardware.device, self.tensor_plan)

    def _profile(self, candidate: Candidate) -> Profile:
        wanted = (candidate.setting.computes_in, candidate.setting.recompute, candidate.setting.tensor)
        return next(p for p in self._profiles if (p.precision, p.recomputes, p.tensor) == wanted)

    def memory(self, candidate: Candidate | None = None) -> RankMemory:
        """Return a rank's memory over the step of ``candidate``, by default that of :meth:`code`."""
        chosen = candidate or self._chosen()
        return step_under(self._profile(chosen), chosen.setting, self.hardware).memory

    def to_json(self) -> str:
        """Return everything as JSON: bytes, seconds."""
        values = {
            "model": self.model,
            "parameters": self.num_parameters,
            "ranks": self.ranks,
            "batch": self.batch,
            "hardware": self.hardware.name,
            "candidates": [_json_of(each) for each in self.candidates],
            "best": None if self.best is None else self.best.setting.label,
            "changes": [{"change": each.words, "way": _json_of(each.best)} for each in self.changes],
            "left_out": list(self.found.left_out),
            "why": self.why(),
            "code": self.code() if self.candidates else "",
        }
        return json.dumps(values, indent=2)

    def picture(self, path: str | Path) -> None:
        """Draw the memory of the chosen way over the step, stacked by kind, with the peak labelled (needs matplotlib)."""
        chosen = self._chosen()
        title = f"{self.model} on {self.ranks:,} ranks: {chosen.setting.label}"
        draw_memory(self.memory(chosen), title, self._limit, Path(path))


def plan(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Sequence[object] | tuple[int, int],
    ranks: int,
    *,
    hardware: Hardware | str | Path = "h100",
    loss: Loss = default_loss,
    choices: Choices = Choices(),
) -> Plan:
    """Return the memory and the time of every way to train ``model`` on ``ranks`` ranks, before any of them runs.

    Args:
        model: a module, on any device, or a function that makes one, which is called on the meta device, without
            memory.
        inputs: of one microbatch of one data-parallel rank: tensors, of which only shape and dtype matter; or (batch,
            time) for int64 tokens.
        ranks: all of them, 1 or more, including those that split blocks (``Choices.tensor``).
        hardware: "a100", "h100", "h200", "cpu", a JSON file with the fields of :class:`Hardware`, or a Hardware.
        loss: called as ``loss(model, *inputs)``; default: next-token cross entropy for tokens, else the mean of the
            output.
        choices: the options to choose from.

    Returns: a :class:`Plan`; ``print(plan)`` is its table.  Bytes are those of the rank with the most memory. Needs no
    process group, no GPU and no memory for the model.
    Raises: ConfigError (a ValueError) for impossible arguments; errors of the model's forward pass through.

    Example:
        >>> import torch, shardwise
        >>> make = lambda: torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        >>> found = shardwise.plan(make, (torch.empty(8, 64),), ranks=4, hardware="cpu")
        >>> found.best is not None
        True
    """
    if ranks < 1:
        raise ConfigError(f"ranks is {ranks}, expected at least 1")
    built = _build(model)
    given = _inputs(inputs)
    runs = _Runs(built, given, loss, choices.tensor_plan)
    machine = hardware if isinstance(hardware, Hardware) else read_hardware(hardware)
    if choices.measures:
        from shardwise.planner.measure import measured

        machine = measured(machine, list(runs.all_of(choices)), ranks, choices.threads)
    found = Search(runs.profile, ranks, machine, choices).run()
    if not runs.done:  # no way suits this number of ranks
        runs.all_of(replace(choices, tensor=(1,)))
    profiles = tuple(run.profile for run in runs.done.values())
    first = profiles[0]
    numel = sum(param.numel() for param in built.parameters())
    return Plan(first.model, numel, ranks, first.batch, machine, found, profiles, choices.tensor_plan)


class _Runs:
    """Dry runs of one model, each made when it is first needed."""

    def __init__(
        self, model: nn.Module, inputs: Sequence[object], loss: Loss, tensor_plan: Mapping[str, ParallelStyle]
    ) -> None:
        self.model, self.inputs, self.loss, self.tensor_plan = model, inputs, loss, tensor_plan
        self.done: dict[tuple[str, bool, int], DryRun] = {}

    def profile(self, precision: str, recompute: bool, tensor: int) -> Profile:
        """Return the profile of a precision, with or without recomputation, with blocks split over ``tensor`` ranks."""
        key = (precision, recompute, tensor)
        if key not in self.done:
            split = TensorSplit(tensor, self.tensor_plan) if tensor > 1 else None
            self.done[key] = dry_run(
                self.model, self.inputs, self.loss, precision=precision, recompute=recompute, split=split
            )
        return self.done[key].profile

    def all_of(self, choices: Choices) -> Sequence[DryRun]:
        """Return the runs that ``choices`` may need."""
        precisions = ["fp32"] if choices.precision == "fp32" else ["bf16", "autocast"]
        for precision in precisions:
            for recompute in choices.recompute:
                for tensor in choices.tensor if precision != "autocast" else (1,):
                    self.profile(precision, recompute, tensor)
        return list(self.done.values())


def _build(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    with torch.device("meta"):
        made = model()
    if not isinstance(made, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  from user code
        raise ConfigError(
            f"plan takes a module or a function that makes one; the function returned {type(made).__name__}"
        )
    return made


def _inputs(inputs: Sequence[object] | tuple[int, int]) -> Sequence[object]:
    sizes = [each for each in inputs if isinstance(each, int)]
    if len(inputs) == 2 and len(sizes) == 2:
        if min(sizes) < 1:
            raise ConfigError(f"inputs are (batch, time) = {tuple(inputs)}, expected at least 1 of each")
        return (torch.empty(sizes, dtype=torch.int64, device="meta"),)
    if not any(isinstance(each, torch.Tensor) for each in inputs):
        raise ConfigError("inputs hold no tensor; give the tensors of one microbatch, or (batch, time) for tokens")
    return inputs


def _json_of(candidate: Candidate) -> dict[str, object]:
    return {
        "way": candidate.setting.label,
        **asdict(candidate.setting),
        "fits": candidate.fits,
        "peak_bytes": candidate.peak.total,
        "peak_at": candidate.peak.place,
        "held_bytes": dict(zip(KINDS, candidate.peak.held, strict=True)),
        "host_bytes": candidate.host_bytes,
        "seconds": asdict(candidate.time),
        "copied_bytes": candidate.copied_bytes,
        "padding_ratio": candidate.padding_ratio,
        "units": candidate.num_units,
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

"""``plan``: the memory of one rank and the time of a step, for every way to train, before anything runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwise.errors import ConfigError
from shardwise.formatting import format_bytes
from shardwise.plan.grouping import DEFAULT_MIN_UNIT_BYTES
from shardwise.planner.hardware import (
    ONE_UNIT,
    OPTIMIZERS,
    SHARED,
    UNIT_STRATEGIES,
    Hardware,
    Loss,
    MakeOptimizer,
    Profile,
    Setting,
    TensorSplit,
    default_loss,
    dry_run,
    read_hardware,
    state_bytes_of,
)
from shardwise.planner.rank_step import KINDS, Moment, RankMemory, RankTime, rank_units, step_of, steps_of, unit_paths


def code_of(setting: Setting, device: str) -> str:
    """Return the call that shards ``model`` on all ranks, under ``torchrun``; comments say what else ``setting`` asks."""
    has_units, is_bf16 = setting.strategy in UNIT_STRATEGIES, setting.precision == "bf16"
    blocks = f"every block but the last {setting.keep_blocks}" if setting.keep_blocks else "every block"
    notes = (
        ("parallelize_module(block, mesh['tp'], tensor_plan) of every block comes first", setting.tensor > 1),
        (f"{blocks} under torch.utils.checkpoint", setting.recompute),
        ("forward and loss under torch.autocast", is_bf16 and not has_units),
        (f"ShardedOptimizer(offload=OptimizerOffload(folder=, fraction={setting.disk_share}))", setting.disk_share > 0),
        ("policy(model, sync=False) around all microbatches but the last", setting.accumulate > 1 and has_units),
    )
    lines = [f"# {note}" for note, is_on in notes if is_on]
    if not has_units:
        call = "ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)"
        zero = 'optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, partition="even", lr=3e-4)'
        return "\n".join([*lines, call, *[zero] * (setting.strategy == "zero1"), ""])
    axes = {"replicate": setting.replicas} if setting.strategy == "hsdp" else {}
    axes["shard" if setting.strategy != "ddp" else "replicate"] = setting.ranks // setting.replicas
    data, sizes = tuple(axes), (*axes.values(), *[setting.tensor] * (setting.tensor > 1))
    names = (*data, *["tp"] * (setting.tensor > 1))
    lines.append(f'mesh = init_device_mesh("{device}", {sizes}, mesh_dim_names={names})')
    one_unit = setting.strategy == "zero3" and setting.min_unit_bytes >= ONE_UNIT
    options = [] if one_unit else [f'strategy="{setting.strategy}"', f"min_unit_bytes={setting.min_unit_bytes}"]
    options.append(f"mesh=mesh[{data}]" if setting.tensor > 1 else "mesh=mesh")
    if is_bf16:
        options.append("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
    where = "CPUOffloadPolicy()" if device != "cpu" else "DiskOffloadPolicy(folder=)"
    options += [f"offload_policy={where}"] * setting.offload
    return "\n".join([*lines, f"{'fully_shard' if one_unit else 'shard_model'}(model, {', '.join(options)})", ""])


# ---- The search: the ways to train, their costs, which to take, and what to change if none fits.

_MOST_RANKS = 1 << 17
ProfileOf = Callable[[Setting], Profile]  # of the precision, recomputation and split of a setting


@dataclass(frozen=True, slots=True)
class Choices:
    """The options to choose from.

    Attributes:
        strategies: as ``shardwise train --shard`` names them.  replicas: with "hsdp"; None: several numbers are tried.
        unit_bytes: sizes up to which blocks are merged; sizes that give the same units count once.
        recompute, offload: whether to try without, with, or both.
        keep_blocks: where nothing fits without recomputation, as many blocks as fit may do without.
        disk: on CPU ranks, as little optimizer state as makes a way fit may be on disk, at last with parameters and gradients.
        precision: "fp32" or "bf16".
        accumulate: microbatches of a step.
        optimizer: one of ``adamw``, ``adam``, ``adagrad``, ``momentum``, ``sgd``, with state in fp32; or a function of
            parameters that makes yours, whose state is measured: ``torchao.optim.AdamW8bit``.
        tensor: numbers of ranks that may split every block (tensor parallelism); 1: none.
        tensor_plan: how they split it, as ``parallelize_module`` takes it for one block.
    """

    strategies: tuple[str, ...] = ("zero3", "hsdp", "ddp", "zero2", "zero1")
    replicas: int | None = None
    unit_bytes: tuple[int, ...] = (DEFAULT_MIN_UNIT_BYTES, 64 << 20, 512 << 20, ONE_UNIT)
    recompute: tuple[bool, ...] = (False, True)
    keep_blocks: bool = False
    offload: tuple[bool, ...] = (False, True)
    disk: bool = False
    precision: str = "bf16"
    accumulate: int = 1
    optimizer: str | MakeOptimizer = "adamw"
    tensor: tuple[int, ...] = (1,)
    tensor_plan: Mapping[str, ParallelStyle] = field(default_factory=dict[str, ParallelStyle])

    def __post_init__(self) -> None:
        if not callable(self.optimizer) and self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer is {self.optimizer!r}, expected one of {', '.join(OPTIMIZERS)}, or a function"
            )
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"precision is {self.precision!r}, expected fp32 or bf16")
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
        section_bytes: of the gradients that a rank keeps, as they are reduced.
    """

    setting: Setting
    peak: Moment
    host_bytes: int
    time: RankTime
    fits: bool
    padding_ratio: float
    num_units: int
    section_bytes: int

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

    CPU ranks whose shards are all on one host read each other's memory.
    """
    near = hardware.data_ranks_per_host(setting.tensor)
    if hardware.shared is not None and setting.strategy in UNIT_STRATEGIES and setting.num_shards <= near:
        setting = replace(setting, transport=SHARED)
    units = rank_units(profile, setting, hardware.device)
    steps = steps_of(profile, units, setting.depth)
    memory, time = step_of(profile, units, steps, setting, hardware)
    padded = sum(unit.padding_ratio * sum(profile.params[p].numel for p in unit.params) for unit in units)
    return Candidate(
        setting=setting,
        peak=memory.peak,
        host_bytes=memory.host_bytes,
        time=time,
        fits=memory.peak.total <= hardware.limit_bytes,
        padding_ratio=padded / profile.numel if profile.numel else 1.0,
        num_units=len(units),
        section_bytes=sum(unit.section_bytes for unit in units),
    )


def step_under(profile: Profile, setting: Setting, hardware: Hardware) -> tuple[RankMemory, RankTime]:
    """Return the step of ``setting`` on ``hardware``, with the transport that it names."""
    units = rank_units(profile, setting, hardware.device)
    return step_of(profile, units, steps_of(profile, units, setting.depth), setting, hardware)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A change, and the settings that it makes; ``batch``: of a microbatch, if that is changed."""

    kind: str
    words: str
    settings: Sequence[Setting]
    batch: int = 0


@dataclass(slots=True)
class Search:
    """The search for one model, number of ranks and hardware."""

    profile_of: ProfileOf
    ranks: int
    hardware: Hardware
    choices: Choices
    dtype: torch.dtype = torch.float32  # of the parameters
    left_out: list[str] = field(default_factory=list[str])

    def run(self) -> SearchResult:
        """Return candidates, the fastest that fit first, then those that do not fit, the smallest first."""
        candidates = list(self._candidates())
        candidates.sort(key=lambda each: (not each.fits, each.rank_s if each.fits else each.peak.total))
        changes = tuple(self._changes(candidates)) if candidates and not candidates[0].fits else ()
        return SearchResult(tuple(candidates), changes, tuple(dict.fromkeys(self.left_out)))

    def _evaluate(self, setting: Setting, batch: int = 0) -> Candidate:
        profile = self.profile_of(setting)
        return evaluate(profile.for_batch(batch) if batch else profile, setting, self.hardware)

    def _candidates(self) -> Iterator[Candidate]:
        choices = self.choices
        for setting in self._settings():
            has_units = setting.strategy in UNIT_STRATEGIES
            offloads = has_units and False not in choices.offload and self.hardware.device != "cpu"
            numel = 0 if has_units else self.profile_of(Setting(precision=choices.precision)).numel
            if 8 * numel > self.hardware.limit_bytes:  # a dry run is not worthwhile
                words = f"whole fp32 parameters and gradients alone are {format_bytes(8 * numel)} on every rank"
                self.left_out.append(f"{setting.strategy}: {words}")
                continue
            may_offload = has_units and len(set(choices.offload)) == 2 and self.hardware.device != "cpu"
            for recompute in choices.recompute:
                found = self._evaluate(replace(setting, recompute=recompute, offload=offloads))
                found = self._with_disk(found)
                yield self._with_kept_blocks(found) if choices.keep_blocks and recompute else found
                # State in the host's memory costs time, so it is tried only if nothing else fits, and if it frees enough.
                left = found.peak.total - sum(found.peak.held[:3])  # without parameters, optimizer, gradients
                if may_offload and not found.fits and left <= self.hardware.limit_bytes:
                    yield self._evaluate(replace(found.setting, offload=True))

    def _with_disk(self, found: Candidate) -> Candidate:
        """Return ``found``, or with the least optimizer state on disk with which it fits, or with parameters, too."""
        may_use = self.choices.disk and self.hardware.device == "cpu" and found.setting.strategy in UNIT_STRATEGIES
        for share, offload in [*((tenths / 10, False) for tenths in range(1, 11)), (1.0, True)] if may_use else ():
            if not found.fits:
                found = self._evaluate(replace(found.setting, disk_share=share, offload=offload))
        return found

    def _with_kept_blocks(self, found: Candidate) -> Candidate:
        """Return ``found``, or with the most blocks that keep their activations with which it fits."""
        low, high = 0, len(self.profile_of(found.setting).blocks) - 1 if found.fits else 0
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._evaluate(replace(found.setting, keep_blocks=middle))
            low, high, found = (middle, high, tried) if tried.fits else (low, middle, found)
        return found

    def _settings(self) -> Iterator[Setting]:
        choices, state_bytes = self.choices, state_bytes_of(self.choices.optimizer, self.dtype)
        for tensor in choices.tensor:
            if self.ranks % tensor:
                self.left_out.append(f"tp {tensor}: it does not divide {self.ranks:,} ranks")
                continue
            base = Setting(
                ranks=self.ranks // tensor,
                tensor=tensor,
                precision=choices.precision,
                accumulate=choices.accumulate,
                state_bytes=state_bytes,
            )
            for strategy in choices.strategies:
                if strategy == "hsdp":
                    numbers = self._replicas(base) if choices.replicas is None else (choices.replicas,)
                    yield from (replace(base, strategy=strategy, replicas=each) for each in numbers)
                elif strategy == "zero3":
                    sized = (replace(base, strategy=strategy, min_unit_bytes=each) for each in choices.unit_bytes)
                    yield from self._distinct(sized)
                elif tensor == 1 or strategy in UNIT_STRATEGIES:
                    yield replace(base, strategy=strategy, min_unit_bytes=choices.unit_bytes[0])

    def _distinct(self, settings: Iterator[Setting]) -> Iterator[Setting]:
        """Yield the settings whose units differ."""
        seen: set[tuple[tuple[str, ...], ...]] = set()
        for setting in settings:
            profile = self.profile_of(replace(setting, recompute=self.choices.recompute[0]))
            paths = tuple(unit_paths(profile, setting))
            if paths not in seen:
                seen.add(paths)
                yield setting

    def _replicas(self, setting: Setting) -> Iterator[int]:
        """Yield numbers of replicas: shards over one host, two, four, and so on, up to two replicas."""
        shards = min(self.hardware.data_ranks_per_host(setting.tensor), setting.ranks // 2)
        while shards and shards * 2 <= setting.ranks:
            if setting.ranks % shards == 0 and shards > 1:
                yield setting.ranks // shards
            shards *= 2

    def _changes(self, candidates: list[Candidate]) -> Iterator[Change]:
        """Yield single changes after which something fits, of each kind the smallest."""
        settings = [each.setting for each in candidates]
        done: set[str] = set()
        for attempt in self._neighbours(settings):
            if attempt.kind in done:
                continue
            new = [each for each in dict.fromkeys(attempt.settings) if attempt.batch or each not in settings]
            fitting = [each for each in (self._evaluate(setting, attempt.batch) for setting in new) if each.fits]
            if fitting:
                done.add(attempt.kind)
                yield Change(attempt.words, min(fitting, key=lambda each: each.rank_s))
        least = min(candidates, key=lambda each: each.peak.total)
        needed, found = least.peak.total / self.hardware.usable, self.hardware.memory_bytes
        yield Change(f"devices with {format_bytes(needed)}, in place of {format_bytes(found)}", least)

    def _neighbours(self, settings: list[Setting]) -> Iterator[_Attempt]:
        """Yield changes to try, of each kind the smallest first."""
        sharded = [each for each in settings if each.strategy == "zero3"]
        recomputed = [replace(each, recompute=True) for each in settings]
        yield _Attempt("recompute", "recompute blocks in backward", recomputed)
        yield _Attempt("bf16", "compute in bf16", [replace(each, precision="bf16") for each in settings])
        if self.hardware.device != "cpu":
            words = "keep shards and optimizer state in the host's memory (offload)"
            away = [replace(each, offload=each.strategy in UNIT_STRATEGIES) for each in settings]
            yield _Attempt("offload", words, away)
        tensor = max(self.choices.tensor) * 2
        while self.choices.tensor_plan and tensor <= min(self.hardware.ranks_per_host, self.ranks):
            split = [
                replace(each, ranks=self.ranks // tensor, tensor=tensor) for each in sharded if not self.ranks % tensor
            ]
            yield _Attempt("split", f"split every block over {tensor} ranks (tensor parallelism)", split)
            tensor *= 2
        batch = whole = self.profile_of(settings[0]).batch
        while batch > 1:
            batch //= 2
            more = -(-whole // batch)
            words = f"a batch of {batch} in place of {whole} on every rank: {more} microbatches make the same step"
            yield _Attempt("batch", words, settings, batch)
        ranks = self.ranks
        while sharded and ranks * 2 <= _MOST_RANKS:
            ranks *= 2
            words = f"{ranks:,} ranks in place of {self.ranks:,}, with the same batch on each"
            yield _Attempt("ranks", words, [replace(each, ranks=ranks // each.tensor) for each in sharded])


_HEADINGS = ("", "way", "peak", "of which", "step", "samples/s", "compute", "exposed", "host", "sent", "padding")


@dataclass(frozen=True, slots=True)
class Plan(SearchResult):
    """The ways to train a model on some ranks, their costs, and which to take.

    Attributes:
        candidates: the fastest that fit first, then those that do not fit, the smallest first.
        changes: if nothing fits: single changes after which something does, the smallest first.
        left_out: ways that were not evaluated, and why.
        model: name of its class.  num_parameters: elements.
        ranks: all of them.  batch: of a microbatch of one data-parallel rank.
        hardware: of a rank.
    """

    model: str = field(kw_only=True)
    num_parameters: int = field(kw_only=True)
    ranks: int = field(kw_only=True)
    batch: int = field(kw_only=True)
    hardware: Hardware = field(kw_only=True)

    @property
    def best(self) -> Candidate | None:
        """The fastest way that fits; None if none does."""
        return next((each for each in self.candidates[:1] if each.fits), None)

    def why(self) -> str:
        """Return in a sentence or two why to take this way, or what to change."""
        if self.best is None:
            return self._why_nothing_fits()
        best, peak = self.best, format_bytes(self.best.peak.total)
        words = f"Take {best.setting.label}: {_seconds(best.time.step_s)} a step, {peak} at most on a rank"
        tight = [each for each in self.candidates if not each.fits and each.rank_s < best.rank_s]
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
            f"Nothing fits in {format_bytes(self.hardware.limit_bytes)}. The smallest change that makes it fit: {first.words} "
            f"({first.best.setting.label}, {format_bytes(first.best.peak.total)}).{others}"
        )

    def table(self, most: int = 16) -> str:
        """Return the candidates as text, at most ``most``, and the reasons."""
        head = (
            f"{self.model}: {self.num_parameters:,} parameters on {self.ranks:,} ranks, batch {self.batch} on each; "
            f"{self.hardware.name}; a plan may fill {format_bytes(self.hardware.limit_bytes)}"
        )
        if not self.candidates:
            return "\n".join([head, *[f"left out: {each}" for each in self.left_out], "", self.why()])
        rows = [_HEADINGS, *[self._cells(each) for each in self.candidates[:most]]]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        more = len(self.candidates) - most
        notes = [f"... and {more} more"] if more > 0 else []
        notes += [f"left out: {each}" for each in self.left_out]
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
            f"{candidate.padding_ratio:.2f}",
        )

    def __str__(self) -> str:
        return self.table()

    def code(self) -> str:
        """Return the call to paste: of the best way, or of the smallest change if nothing fits.  Raises: ConfigError."""
        chosen = self.best or next((each.best for each in self.changes), None)
        if chosen is None:
            reasons = "".join(f" ({each})" for each in self.left_out)
            raise ConfigError(
                f"no way to train was looked at{reasons}; name other strategies, or numbers of ranks that go together"
            )
        return code_of(chosen.setting, self.hardware.device)

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
            "left_out": list(self.left_out),
            "why": self.why(),
            "code": self.code() if self.candidates else "",
        }
        return json.dumps(values, indent=2)


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
    Raises: ConfigError for impossible arguments; errors of the model's forward pass through.

    Example:
        >>> import torch, shardwise
        >>> make = lambda: torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        >>> found = shardwise.plan(make, (torch.empty(8, 64),), ranks=4, hardware="cpu")
        >>> found.best is not None
        True
    """
    if ranks < 1:
        raise ConfigError(f"ranks is {ranks}, expected at least 1")
    built, given = _build(model), _inputs(inputs)
    machine = hardware if isinstance(hardware, Hardware) else read_hardware(hardware)

    @functools.cache
    def profile(precision: str, recompute: bool, keep_blocks: int, tensor: int) -> Profile:
        recomputed = recompute and slice(1, -keep_blocks or None)
        split = TensorSplit(tensor, choices.tensor_plan) if tensor > 1 else None
        return dry_run(built, given, loss, precision=precision, recompute=recomputed, split=split)

    def profile_of(setting: Setting) -> Profile:
        return profile(setting.computes_in, setting.recompute, setting.keep_blocks, setting.tensor)

    dtype = next((param.dtype for param in built.parameters() if param.is_floating_point()), torch.float32)
    found = Search(profile_of, ranks, machine, choices, dtype).run()
    first = next(each for each in given if isinstance(each, torch.Tensor))
    return Plan(
        found.candidates,
        found.changes,
        found.left_out,
        model=type(built).__name__,
        num_parameters=sum(param.numel() for param in built.parameters()),
        ranks=ranks,
        batch=first.shape[0] if first.ndim else 1,
        hardware=machine,
    )


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
        "padding_ratio": candidate.padding_ratio,
        "units": candidate.num_units,
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

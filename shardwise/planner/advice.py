"""``plan``: what one rank will hold and how long a step will take, for every way to train, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardwise.errors import ConfigError
from shardwise.planner.dry_run import DryRun, Loss, default_loss, dry_run
from shardwise.planner.hardware import Hardware, read_hardware
from shardwise.planner.paste import code_of
from shardwise.planner.profile import Profile
from shardwise.planner.rank_memory import KINDS, RankMemory
from shardwise.planner.search import Candidate, Change, Choices, Search, SearchResult, memory_over_step
from shardwise.planner.split import TensorSplit

_HEADINGS = ("", "way", "peak", "of which", "step", "samples/s", "compute", "exposed", "host", "sent", "padding")


@dataclass(frozen=True, slots=True)
class Plan:
    """The ways to train a model on some ranks, what each costs, and which to take.

    Attributes:
        model: name of its class.  num_parameters: elements.
        ranks: all of them.  batch: of a microbatch of one data-parallel rank.
        hardware: what a rank runs on.
        candidates: the fastest that fit first, then those that do not, the smallest first.
        changes: where nothing fits: changes of one thing after which something does, the smallest first.
        left_out: ways that were not looked at, and why.
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
        """All ways that were looked at, the best first."""
        return self.found.candidates

    @property
    def changes(self) -> tuple[Change, ...]:
        """Where nothing fits: what to change, the smallest change first."""
        return self.found.changes

    @property
    def best(self) -> Candidate | None:
        """The fastest way that fits; None if none does."""
        first = self.found.candidates[0] if self.found.candidates else None
        return first if first is not None and first.fits else None

    def why(self) -> str:
        """Return in a sentence or two why this way, or what to change."""
        if self.best is None:
            return self._why_nothing_fits()
        best, faster = self.best, [each for each in self.candidates if not each.fits]
        words = (
            f"Take {best.setting.label}: {_seconds(best.time.step_s)} a step, {_gb(best.peak.total)} at most on a rank"
        )
        tight = [each for each in faster if each.rank_s < best.rank_s]
        if tight:
            first = min(tight, key=lambda each: each.rank_s)
            words += (
                f"; {first.setting.label} would take {_seconds(first.time.step_s)} but needs {_gb(first.peak.total)}"
            )
        waits = ", ".join(f"{unit} {_seconds(seconds)}" for unit, seconds in best.time.waits[:3])
        return f"{words}. " + (f"Waits that nothing hides: {waits}." if waits else "Nothing waits for other ranks.")

    def _why_nothing_fits(self) -> str:
        if not self.candidates:
            return "No way to train was looked at: none of the doors goes with these numbers of ranks."
        if not self.changes:
            return "Nothing fits, and no single change makes it fit."
        first = self.changes[0]
        others = "".join(f"\n  or: {each.words} ({each.best.setting.label})" for each in self.changes[1:])
        return (
            f"Nothing fits in {_gb(self._room)}. The smallest change that makes it fit: {first.words} "
            f"({first.best.setting.label}, {_gb(first.best.peak.total)}).{others}"
        )

    @property
    def _room(self) -> float:
        return self.hardware.usable * self.hardware.memory_bytes

    def table(self, most: int = 16) -> str:
        """Return the candidates as text, at most ``most``, and the reasons."""
        head = (
            f"{self.model}: {self.num_parameters:,} parameters on {self.ranks:,} ranks, batch {self.batch} on each; "
            f"{self.hardware.name}; a plan may fill {_gb(self._room)}"
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
        parts = [f"{kind} {_gb(num_bytes)}" for num_bytes, kind in largest if num_bytes]
        time, setting = candidate.time, candidate.setting
        return (
            "->" if candidate is self.best else "" if candidate.fits else "no",
            setting.label,
            _gb(candidate.peak.total),
            ", ".join([*parts, *([f"host {_gb(candidate.host_bytes)}"] if candidate.host_bytes else [])]),
            _seconds(time.step_s),
            f"{self.batch * setting.accumulate * setting.ranks / max(time.step_s, 1e-12):.3g}",
            _seconds(time.compute_s),
            _seconds(time.exposed_s),
            _seconds(time.host_s),
            _gb(time.inside_bytes + time.between_bytes),
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
            f"no way to train was looked at{reasons}; name other doors, or numbers of ranks that go together"
        )

    def code(self) -> str:
        """Return Python to paste: the best way, or that of the smallest change if nothing fits."""
        chosen = self._chosen()
        return code_of(chosen.setting, self._profile(chosen), self.hardware.device, self.tensor_plan)

    def _profile(self, candidate: Candidate) -> Profile:
        wanted = (candidate.setting.computes_in, candidate.setting.recompute, candidate.setting.tensor)
        return next(p for p in self._profiles if (p.precision, p.recomputes, p.tensor) == wanted)

    def memory(self, candidate: Candidate | None = None) -> RankMemory:
        """Return what a rank holds over the step of ``candidate``, by default that of :meth:`code`."""
        chosen = candidate or self._chosen()
        return memory_over_step(
            self._profile(chosen), chosen.setting, self.hardware.device, self.hardware.library_bytes
        )

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
        """Draw the memory of the chosen way over the step, stacked by kind, with the peak named (needs matplotlib)."""
        from shardwise.planner.picture import draw_memory

        chosen = self._chosen()
        title = f"{self.model} on {self.ranks:,} ranks: {chosen.setting.label}"
        draw_memory(self.memory(chosen), title, self._room, Path(path))


def plan(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Sequence[object] | tuple[int, int],
    ranks: int,
    *,
    hardware: Hardware | str | Path = "h100",
    loss: Loss = default_loss,
    choices: Choices = Choices(),  # noqa: B008  frozen
) -> Plan:
    """Say what every way to train ``model`` on ``ranks`` ranks would hold and take, before any of them runs.

    Args:
        model: a module, on any device, or a function that makes one: it is called on the meta device, without memory.
        inputs: of one microbatch of one data-parallel rank: tensors, of which shape and dtype count; or (batch, time) for
            int64 tokens.
        ranks: all of them, 1 or more: those that split blocks (``Choices.tensor``) included.
        hardware: "a100", "h100", "h200", "cpu", a JSON file with the fields of :class:`Hardware`, or that itself.
        loss: called as ``loss(model, *inputs)``; default: next-token cross entropy for tokens, else the mean of the output.
        choices: what may be chosen from.

    Returns: a :class:`Plan`; ``print(plan)`` is its table.  Bytes are those of the rank that holds most.
    Needs no process group, no GPU and no memory for the model.
    Raises: ConfigError (a ValueError) for arguments that cannot be; errors of the model's forward pass through.

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
    if not runs.done:  # no door that goes with so many ranks
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
        "padding_ratio": candidate.padding_ratio,
        "units": candidate.num_units,
    }


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def with_hosts(hardware: Hardware, ranks: int, hosts: int) -> Hardware:
    """Return ``hardware`` with ``ranks`` on ``hosts`` hosts.  Raises: ConfigError if they cannot be equally many."""
    if hosts < 1 or ranks % hosts:
        raise ConfigError(f"{ranks} ranks cannot be on {hosts} hosts, equally many on each; choose a divisor")
    return replace(hardware, ranks_per_host=ranks // hosts)
